//! Who takes part: [`Membership`], under a [`JobToken`].

use core::fmt;

use rustix::rand::{GetRandomFlags, getrandom};

use crate::CliqueError;
use crate::rendezvous::board;
use crate::rendezvous::wire::{Instance, MAX_TOKEN_BYTES};

/// What the processes of one job have in common and no others have. It keeps jobs apart that meet by accident; it
/// travels as it is, so it keeps nobody out who can listen.
#[derive(Clone, PartialEq, Eq)]
pub struct JobToken(Vec<u8>);

impl JobToken {
    /// The fewest bytes of a token.
    pub const MIN_BYTES: usize = 8;
    /// The most bytes of a token.
    pub const MAX_BYTES: usize = MAX_TOKEN_BYTES;

    /// A token of these bytes.
    ///
    /// # Errors
    /// [`CliqueError::Config`] unless there are 8 to 256 of them.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Result<Self, CliqueError> {
        let bytes = bytes.into();
        if !(Self::MIN_BYTES..=Self::MAX_BYTES).contains(&bytes.len()) {
            return Err(CliqueError::Config {
                what: "length of the job token".to_owned(),
                expected: format!("{} to {} bytes", Self::MIN_BYTES, Self::MAX_BYTES),
                seen: format!("{} bytes", bytes.len()),
            });
        }
        Ok(JobToken(bytes))
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for JobToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "JobToken({} bytes)", self.0.len())
    }
}

/// Which participant this process is, of how many, in which job.
#[derive(Clone, Debug)]
pub struct Membership {
    /// The job.
    pub token: JobToken,
    /// This process, from 0.
    pub participant: u32,
    /// How many processes take part.
    pub participants: u32,
}

impl Membership {
    pub(crate) fn check(&self) -> Result<(), CliqueError> {
        board::check_participants(self.participants)?;
        if self.participant >= self.participants {
            return Err(board::out_of_range(self.participant, self.participants));
        }
        Ok(())
    }
}

/// A number that nobody else has.
pub(crate) fn fresh_instance() -> Result<Instance, CliqueError> {
    let mut instance = Instance::default();
    match getrandom(&mut instance, GetRandomFlags::empty()) {
        Ok(len) if len == instance.len() => Ok(instance),
        Ok(len) => Err(CliqueError::System {
            what: "random bytes".to_owned(),
            errno: None,
            message: format!("{len} of {}", instance.len()),
        }),
        Err(errno) => Err(system("random bytes", errno.into())),
    }
}

/// This process and its host, for messages.
pub(crate) fn own_name() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = match host.trim() {
        "" => "an unnamed host",
        host => host,
    };
    format!("process {} on {host}", std::process::id())
}

pub(crate) fn system(what: impl Into<String>, error: std::io::Error) -> CliqueError {
    CliqueError::System { what: what.into(), errno: error.raw_os_error(), message: error.to_string() }
}
