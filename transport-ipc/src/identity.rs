//! [`Process`]: which process this is, so that two with the same number are told apart.

use std::os::unix::fs::MetadataExt;

use crate::error::Error;

/// A process of a machine: its number alone says nothing, since containers number theirs anew, and numbers come back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Process {
    /// The machine since it was started last; zeros where the kernel does not tell.
    pub(crate) boot: [u8; 16],
    /// The inode of the PID namespace.
    pub(crate) namespace: u64,
    pub(crate) pid: u32,
    /// When it was started, in the clock ticks of the machine.
    pub(crate) started: u64,
}

impl Process {
    /// This process.
    pub(crate) fn this() -> Result<Self, Error> {
        let unreadable = |operation| {
            move |error: std::io::Error| Error::System {
                operation,
                errno: error.raw_os_error().unwrap_or(rustix::io::Errno::IO.raw_os_error()),
            }
        };
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let namespace =
            std::fs::metadata("/proc/self/ns/pid").map_err(unreadable("reading the PID namespace"))?;
        let stat =
            std::fs::read_to_string("/proc/self/stat").map_err(unreadable("reading /proc/self/stat"))?;
        Ok(Process {
            boot: boot_id(&boot),
            namespace: namespace.ino(),
            pid: std::process::id(),
            started: started(&stat).unwrap_or(0),
        })
    }

    /// Whether both run on one machine, as far as is known.
    pub(crate) fn same_machine(&self, other: &Process) -> bool {
        self.boot == other.boot || self.boot == [0; 16] || other.boot == [0; 16]
    }

    /// Whether this process has ended, if this one can tell: it must see the other's number.
    pub(crate) fn has_ended(&self, seen_from: &Process) -> bool {
        if self.namespace != seen_from.namespace || self.boot != seen_from.boot {
            return false;
        }
        // Where `/proc` is another namespace's it does not show the asking process either.
        seen_from.is_shown() && !self.is_shown()
    }

    /// Whether `/proc` shows this process under its number.
    fn is_shown(&self) -> bool {
        match std::fs::read_to_string(format!("/proc/{}/stat", self.pid)) {
            Ok(stat) => started(&stat).is_none_or(|started| started == self.started),
            Err(error) => error.kind() != std::io::ErrorKind::NotFound,
        }
    }

    /// Its name in errors.
    pub(crate) fn name(&self, seen_from: &Process) -> String {
        if self == seen_from {
            format!("this process ({})", self.pid)
        } else if self.namespace == seen_from.namespace {
            format!("process {}", self.pid)
        } else {
            format!("process {} of PID namespace {}", self.pid, self.namespace)
        }
    }
}

/// A boot id as the kernel writes it; zeros for anything else.
fn boot_id(text: &str) -> [u8; 16] {
    let hex: Vec<u8> = text.trim().bytes().filter(|&byte| byte != b'-').collect();
    let mut id = [0; 16];
    if hex.len() != 32 {
        return id;
    }
    for (byte, pair) in id.iter_mut().zip(hex.chunks(2)) {
        let digits = core::str::from_utf8(pair).ok().and_then(|pair| u8::from_str_radix(pair, 16).ok());
        let Some(value) = digits else { return [0; 16] };
        *byte = value;
    }
    id
}

/// The 22nd field of a process's `stat`. The second is its name in parentheses, and may itself have blanks and
/// parentheses.
fn started(stat: &str) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_itself_and_has_not_ended() {
        let this = Process::this().unwrap();
        assert_eq!(this, Process::this().unwrap());
        assert!(this.started > 0 && this.namespace > 0);
        assert!(this.same_machine(&this) && !this.has_ended(&this));
    }

    #[test]
    fn the_same_number_in_another_namespace_is_another_process() {
        let this = Process::this().unwrap();
        let container = Process { namespace: this.namespace + 1, ..this };
        assert_ne!(this, container);
        // Nothing is known of it from here.
        assert!(!container.has_ended(&this));
        assert!(container.name(&this).contains("PID namespace"));
    }

    #[test]
    fn a_number_that_was_given_again_is_another_process_and_the_first_has_ended() {
        let this = Process::this().unwrap();
        let before = Process { started: this.started - 1, ..this };
        assert_ne!(this, before);
        assert!(before.has_ended(&this));
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let ended = Process { pid: child.id(), ..this };
        child.wait().unwrap();
        assert!(ended.has_ended(&this));
        // For a process that `/proc` does not show, it is another namespace's: nothing is known.
        assert!(!ended.has_ended(&before));
    }

    #[test]
    fn odd_names_and_odd_ids_are_read() {
        assert_eq!(started("1 (a) b) S 1 1 1 0 -1 1 1 1 1 1 1 1 1 1 20 0 1 0 777 1"), Some(777));
        assert_eq!(started("nonsense"), None);
        assert_eq!(boot_id("nonsense"), [0; 16]);
        assert_eq!(boot_id("00010203-0405-0607-0809-0a0b0c0d0e0f\n")[..4], [0, 1, 2, 3]);
    }
}
