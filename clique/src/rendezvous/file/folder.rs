//! Files that others may have written: read with limits, written as a whole or not at all.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use rustix::fs::{AtFlags, CWD, FlockOperation, OFlags, Timespec, Timestamps, UTIME_NOW, flock, utimensat};
use rustix::io::Errno;

use crate::CliqueError;
use crate::rendezvous::identity::system;
use crate::rendezvous::wire::{Instance, Wrong};

/// Tells the unfinished files of this process apart.
static COUNT: AtomicU64 = AtomicU64::new(0);

fn at(what: &str, path: &Path, error: io::Error) -> CliqueError {
    system(format!("{what} {}", path.display()), error)
}

fn foreign(path: &Path, what: &'static str, expected: impl ToString, seen: impl ToString) -> CliqueError {
    Wrong::new(what, expected, seen).from(&format!("whoever wrote {}", path.display()))
}

/// A folder of one job, whose files belong to one user.
#[derive(Clone, Debug)]
pub(super) struct Folder {
    path: PathBuf,
    /// Whose files count: those of whoever this process writes as.
    owner: u32,
}

impl Folder {
    /// A folder that is there, or is made. Its owner has to be `owner`.
    pub(super) fn open(path: PathBuf, owner: u32) -> Result<Self, CliqueError> {
        match fs::DirBuilder::new().mode(0o700).create(&path) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => return Err(at("making the folder", &path, error)),
        }
        match Self::existing(path.clone(), owner)? {
            Some(folder) => Ok(folder),
            None => Err(at("looking at", &path, ErrorKind::NotFound.into())),
        }
    }

    /// A folder that is there; `None` if it is not, or no longer.
    pub(super) fn existing(path: PathBuf, owner: u32) -> Result<Option<Self>, CliqueError> {
        let data = match fs::symlink_metadata(&path) {
            Ok(data) => data,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(at("looking at", &path, error)),
        };
        if !data.is_dir() {
            return Err(foreign(&path, "kind of file", "a folder", kind(&data)));
        }
        if data.uid() != owner {
            return Err(foreign(&path, "owner", owner, data.uid()));
        }
        Ok(Some(Folder { path, owner }))
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn owner(&self) -> u32 {
        self.owner
    }

    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// The whole of a small file; `None` if there is none.
    pub(super) fn read(&self, name: &str, most: usize) -> Result<Option<Vec<u8>>, CliqueError> {
        let path = self.file(name);
        let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK; // a pipe must not make it wait
        let opened = OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(&path);
        let file = match opened {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) if error.raw_os_error() == Some(Errno::LOOP.raw_os_error()) => {
                return Err(foreign(&path, "kind of file", "a regular file", "a symbolic link"));
            }
            Err(error) => return Err(at("opening", &path, error)),
        };
        let data = file.metadata().map_err(|error| at("looking at", &path, error))?;
        if !data.is_file() {
            return Err(foreign(&path, "kind of file", "a regular file", kind(&data)));
        }
        if data.uid() != self.owner {
            return Err(foreign(&path, "owner", self.owner, data.uid()));
        }
        let mut bytes = Vec::new();
        let read = file.take(most as u64 + 1).read_to_end(&mut bytes);
        read.map_err(|error| at("reading", &path, error))?;
        if bytes.len() > most {
            let seen = format!("{} bytes", data.len().max(bytes.len() as u64));
            return Err(foreign(&path, "length", format!("at most {most} bytes"), seen));
        }
        Ok(Some(bytes))
    }

    /// Writes a file so that others see all of it or nothing. One that is there is replaced.
    pub(super) fn write(&self, name: &str, bytes: &[u8]) -> Result<(), CliqueError> {
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let (path, part) = (self.file(name), self.file(&format!(".{name}.{}.{count}", std::process::id())));
        let written = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&part);
        let written =
            written.and_then(|mut file| file.write_all(bytes)).and_then(|()| fs::rename(&part, &path));
        written.map_err(|error| {
            let _ = fs::remove_file(&part);
            at("writing", &path, error)
        })
    }

    /// Puts a folder with one file into this one, unless one of that name is there: of several who do at once, one does,
    /// and all see it whole. `own` is a name that nobody else uses.
    pub(super) fn put_first(
        &self,
        name: &str,
        own: &str,
        file: &str,
        bytes: &[u8],
    ) -> Result<(), CliqueError> {
        let part = Folder::open(self.file(own), self.owner)?;
        part.write(file, bytes)?;
        // No folder takes the place of one that has something in it, on any file system; links are not on all of them.
        let Err(error) = fs::rename(part.path(), self.file(name)) else { return Ok(()) };
        self.remove(own);
        match error.kind() {
            ErrorKind::AlreadyExists | ErrorKind::DirectoryNotEmpty => Ok(()),
            // A network file system may ask twice, if the first answer was lost, and the second time there is nothing left.
            ErrorKind::NotFound if self.has(name) => Ok(()),
            _ => Err(at("writing", &self.file(name), error)),
        }
    }

    /// The names in it; none if the folder is gone.
    pub(super) fn names(&self) -> Result<Vec<String>, CliqueError> {
        let failed = |error| at("listing", &self.path, error);
        let entries = match fs::read_dir(&self.path) {
            Ok(entries) => entries,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(failed(error)),
        };
        let mut names = Vec::new();
        for entry in entries {
            // A name that is no text is none of ours.
            names.extend(entry.map_err(failed)?.file_name().into_string());
        }
        Ok(names)
    }

    pub(super) fn has(&self, name: &str) -> bool {
        fs::symlink_metadata(self.file(name)).is_ok()
    }

    /// When a file or folder was last changed; a folder is when something is put into it.
    pub(super) fn changed(&self, name: &str) -> Option<SystemTime> {
        fs::symlink_metadata(self.file(name)).and_then(|data| data.modified()).ok()
    }

    /// Makes a file or folder, if it is there, one that was changed just now. Where a file system cannot do that nothing is
    /// lost but that.
    pub(super) fn touch(&self, name: &str) {
        let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
        let times = Timestamps { last_access: now, last_modification: now };
        let _ = utimensat(CWD, self.file(name), &times, AtFlags::SYMLINK_NOFOLLOW);
    }

    /// Removes a file or folder that may be gone already. What cannot be removed stays: nothing depends on it.
    pub(super) fn remove(&self, name: &str) {
        let path = self.file(name);
        match fs::symlink_metadata(&path) {
            Ok(data) if data.is_dir() => drop(fs::remove_dir_all(&path)),
            Ok(_) => drop(fs::remove_file(&path)),
            Err(_) => {}
        }
    }
}

fn kind(data: &fs::Metadata) -> &'static str {
    match data.file_type() {
        kind if kind.is_dir() => "a folder",
        kind if kind.is_symlink() => "a symbolic link",
        kind if kind.is_file() => "a regular file",
        _ => "a device, pipe or socket",
    }
}

/// The user whom this process makes files as, which on some file systems is not the user it runs as.
pub(super) fn owner_of_new_files(directory: &Path, instance: &Instance) -> Result<u32, CliqueError> {
    let path = directory.join(format!(".portway.{:032x}", u128::from_le_bytes(*instance)));
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
    let owner = file.and_then(|file| file.metadata()).map(|data| data.uid());
    let _ = fs::remove_file(&path);
    owner.map_err(|error| at("writing", &path, error))
}

/// A file that is locked while its process lives.
#[derive(Debug)]
pub(super) struct Lock {
    _file: File,
    /// Whether the file system has locks.
    pub(super) is_real: bool,
}

impl Lock {
    /// `None`: somebody else has it.
    pub(super) fn take(folder: &Folder, name: &str) -> Result<Option<Self>, CliqueError> {
        let path = folder.file(name);
        // A holder that leaves removes the file. Whoever had opened it by then has to look again.
        for _ in 0..100 {
            let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
            let mut options = OpenOptions::new();
            options.write(true).create(true).truncate(false).mode(0o600).custom_flags(flags);
            let file = options.open(&path).map_err(|error| at("opening", &path, error))?;
            let is_real = match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => true,
                Err(Errno::WOULDBLOCK) => return Ok(None),
                Err(Errno::NOSYS | Errno::OPNOTSUPP | Errno::NOLCK) => false,
                Err(errno) => return Err(at("locking", &path, errno.into())),
            };
            let same = |data: fs::Metadata| file.metadata().is_ok_and(|own| own.ino() == data.ino());
            if fs::symlink_metadata(&path).is_ok_and(same) {
                return Ok(Some(Lock { _file: file, is_real }));
            }
        }
        Err(foreign(&path, "file", "one that stays", "another one each time"))
    }
}
