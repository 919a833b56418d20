//! [`SharedFile`]: participants that are processes and share a folder, perhaps of another machine.
//!
//! ```text
//! DIRECTORY/portway-<job>/            the job's, by its token
//!     seat.<p>                        locked while participant p lives
//!     hello.<p>, welcome.<p>          how a process learns which run it is part of
//!     run-<number>/                   what only this run uses
//!         joined.<p>, left.<p>
//!         rounds/<clique>-<attempt>-<phase>/
//!             post.<p>, seen.<p>      what p has said, and that it has gathered what all have
//!             failed/post.<p>         the first failure, once more
//! ```
//!
//! Files of an earlier run cannot be mistaken for this one's: the run has a random number, participant 0 tells it only
//! in answer to a hello, and a hello has a random number too. Participant 0 removes what earlier runs have left.

mod folder;
mod join;
mod memory;
mod round;

use core::fmt;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::CliqueError;
use crate::rendezvous::board::{Key, MAX_OPEN_ROUNDS, closed, superseded};
use crate::rendezvous::identity::system;
use crate::rendezvous::wire::{Frame, HEADER_BYTES, Hello, MAX_REQUEST_BYTES};
use crate::rendezvous::{
    Gathered, LINGER, Membership, Post, Rendezvous, Round, StayFor, check_message, end_of,
};

use folder::{Folder, Lock};
pub use join::SharedFileConfig;
use memory::Memory;

/// The first and the longest pause between two looks.
const PAUSES: (Duration, Duration) = (Duration::from_micros(200), Duration::from_millis(10));
/// How many rounds too many there are before some are given up, so that not each post has to ask how old they are.
const TOO_MANY: usize = 128;

/// A participant by files.
///
/// Dropping it leaves, as [`close`](Self::close) does. But participant 0 stays for 2 s at most, and no longer than somebody
/// may need the files: while a round is kept that not everybody has posted and gathered, and anybody has not left.
pub struct SharedFile {
    member: Membership,
    job: Folder,
    run: Folder,
    rounds: Folder,
    /// Held while this participant lives; its file is removed when it leaves.
    seat: Option<Lock>,
    memory: Mutex<Memory>,
    /// What the participants said of themselves when they came, as far as it has been looked at.
    names: Vec<String>,
}

/// Waits a little longer each time, and not past a moment.
struct Pause(Duration);

impl Pause {
    fn new() -> Self {
        Pause(PAUSES.0)
    }

    fn wait(&mut self, end: Instant) {
        std::thread::sleep(self.0.min(end.saturating_duration_since(Instant::now())));
        self.0 = (self.0 * 2).min(PAUSES.1);
    }
}

/// A short name for a text of any length: FNV-1a. Contents say the whole text, so a collision is an error at worst.
fn short(bytes: &[u8]) -> String {
    let hash = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    format!("{:016x}", bytes.iter().fold(0xcbf2_9ce4_8422_2325, hash))
}

/// The name of a round's folder: of its clique and attempt, and of its phase.
fn round_name(key: &Key) -> String {
    format!("{}-{:016x}-{}", short(key.clique.as_bytes()), key.attempt, short(key.phase.as_bytes()))
}

/// The attempt that a round's folder is of, if it is of this clique.
fn attempt_of(name: &str, clique: &str) -> Option<u64> {
    let rest = name.strip_prefix(clique)?.strip_prefix('-')?;
    u64::from_str_radix(rest.get(..16)?, 16).ok()
}

/// The participant whose file of a kind this is.
fn participant_of(name: &str, kind: &str) -> Option<u32> {
    name.strip_prefix(kind)?.strip_prefix('.')?.parse().ok()
}

/// Whether the run is still there; participant 0 removes it when it leaves, a later run's when it comes.
fn check_run(run: &Folder) -> Result<(), CliqueError> {
    match run.path().try_exists() {
        Ok(true) => Ok(()),
        Ok(false) => Err(gone(run.path())),
        Err(error) => Err(system(format!("the run's folder {}", run.path().display()), error)),
    }
}

fn gone(run: &Path) -> CliqueError {
    CliqueError::System {
        what: format!("the run's folder {}", run.display()),
        errno: None,
        message: "it is gone: participant 0 has left, or a later run has begun".to_owned(),
    }
}

impl SharedFile {
    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An error if somebody has begun a later attempt, as the names of the rounds say.
    fn check_attempt(&self, key: &Key, rounds: &[String]) -> Result<(), CliqueError> {
        let clique = short(key.clique.as_bytes());
        for name in rounds {
            let Some(attempt) = attempt_of(name, &clique).filter(|attempt| *attempt > key.attempt) else {
                continue;
            };
            let Some(round) = Folder::existing(self.rounds.file(name), self.rounds.owner())? else {
                continue;
            };
            let posts = round.names()?;
            if let Some(by) = posts.iter().filter_map(|name| participant_of(name, "post")).min() {
                return Err(superseded(key, by, attempt));
            }
        }
        Ok(())
    }

    /// What was said in a round by now, and the round's folder if it has ended; see [`round::read`].
    fn look_into(
        &self,
        key: &Key,
        said: &mut [Option<Post>],
        only_at_the_end: bool,
    ) -> Result<Option<Folder>, CliqueError> {
        let (name, own) = (round_name(key), self.member.participant);
        if self.memory().is_to_touch(key) {
            self.rounds.touch(&name);
        }
        let has_posted = self.memory().has_posted(key);
        // Looked at first: what is complete by then counts, even if somebody has gone on to the next attempt since.
        let still = check_run(&self.run).and_then(|()| self.check_attempt(key, &self.rounds.names()?));
        // Only a post makes the folder.
        let folder = Folder::existing(self.rounds.file(&name), self.rounds.owner())?;
        if let Some(folder) = &folder {
            if round::read(folder, key, said, only_at_the_end)? {
                return Ok(Some(folder.clone()));
            }
        }
        still?;
        if !has_posted || folder.is_some_and(|folder| folder.has(&format!("post.{own}"))) {
            return Ok(None);
        }
        self.memory().may_gather(own, key)?;
        Err(closed(key, "its files are gone: it was given up, or ended by a later attempt".to_owned()))
    }

    /// Removes the rounds that are two attempts old, and those that were used longest ago if there are too many. Whoever
    /// posts does, since participant 0 may have no part in what is going on; it does not matter who comes first.
    fn trim(&self, key: &Key, mut rounds: Vec<String>) {
        let (name, clique) = (round_name(key), short(key.clique.as_bytes()));
        rounds.retain(|old| {
            let attempt = attempt_of(old, &clique);
            let is_old = attempt.is_some_and(|attempt| key.attempt.saturating_sub(attempt) >= 2);
            if is_old {
                self.rounds.remove(old);
            }
            !is_old
        });
        if rounds.len() < MAX_OPEN_ROUNDS + TOO_MANY {
            return;
        }
        // But never the round that is posted to.
        rounds.retain(|old| *old != name);
        rounds.sort_by_cached_key(|old| self.rounds.changed(old));
        rounds.iter().take(TOO_MANY).for_each(|old| self.rounds.remove(old));
    }

    /// This participant needs the round no more. Whoever sees that nobody does removes it.
    fn seen(&self, round: &Folder, name: &str) -> Result<(), CliqueError> {
        match round.write(&format!("seen.{}", self.member.participant), &[]) {
            // Somebody else may have found, a moment ago, that it was two attempts old.
            Err(_) if !round.path().is_dir() => return Ok(()),
            other => other?,
        }
        let names = round.names()?;
        let all = |kind: &str| {
            let count = names.iter().filter(|name| participant_of(name, kind).is_some()).count();
            count >= self.member.participants as usize
        };
        if all("seen") && all("post") {
            self.rounds.remove(name);
        }
        Ok(())
    }

    /// Leaves. Participant 0 waits until the others have left too, and removes the files.
    ///
    /// # Errors
    /// [`CliqueError::Timeout`] at participant 0, naming who had not left; the files are gone nevertheless.
    pub fn close(mut self, within: Duration) -> Result<(), CliqueError> {
        self.leave(within, StayFor::Everybody)
    }

    fn leave(&mut self, within: Duration, stay_for: StayFor) -> Result<(), CliqueError> {
        let Some(seat) = self.seat.take() else { return Ok(()) };
        let own = self.member.participant;
        let mut result = Ok(());
        if own == 0 {
            result = self.wait_for_others(end_of(within), stay_for);
            if let Some(name) = self.run.path().file_name().and_then(|name| name.to_str()) {
                self.job.remove(name);
            }
        } else if self.run.path().is_dir() {
            let _ = self.run.write(&format!("left.{own}"), &[]);
        }
        for name in ["hello", "welcome", "seat"] {
            self.job.remove(&format!("{name}.{own}"));
        }
        drop(seat);
        let _ = std::fs::remove_dir(self.job.path()); // succeeds for the last one
        result
    }

    fn wait_for_others(&self, end: Instant, stay_for: StayFor) -> Result<(), CliqueError> {
        let began = Instant::now();
        let mut pause = Pause::new();
        loop {
            let still = (1..self.member.participants)
                .find(|participant| !self.run.has(&format!("left.{participant}")));
            let Some(still) = still else { return Ok(()) };
            if stay_for == StayFor::Rounds && self.rounds.names()?.is_empty() {
                return Ok(());
            }
            if Instant::now() >= end {
                return Err(CliqueError::Timeout {
                    what: format!("closing {}", self.run.path().display()),
                    expected: "every participant to leave".to_owned(),
                    seen: format!("participant {still} has not left"),
                    waited: began.elapsed(),
                });
            }
            pause.wait(end);
        }
    }
}

impl Rendezvous for SharedFile {
    fn participant(&self) -> u32 {
        self.member.participant
    }

    fn participants(&self) -> u32 {
        self.member.participants
    }

    fn post(&self, round: &Round, post: Post) -> Result<(), CliqueError> {
        check_message(round, &post)?;
        let key = Key::from(round);
        check_run(&self.run)?;
        let rounds = self.rounds.names()?;
        self.check_attempt(&key, &rounds)?;
        self.memory().post(self.member.participant, &key)?;
        self.trim(&key, rounds);
        let folder = Folder::open(self.rounds.file(&round_name(&key)), self.rounds.owner())?;
        round::write(&folder, self.member.participant, &key, post)?;
        self.memory().posted(&key);
        Ok(())
    }

    fn gather(&self, round: &Round, within: Duration) -> Result<Gathered, CliqueError> {
        let key = Key::from(round);
        let end = end_of(within);
        self.memory().may_gather(self.member.participant, &key)?;
        let mut said = vec![None; self.member.participants as usize];
        let mut pause = Pause::new();
        loop {
            let over = Instant::now() >= end;
            if let Some(folder) = self.look_into(&key, &mut said, false)? {
                self.memory().gathered(self.member.participant, &key)?;
                self.seen(&folder, &round_name(&key))?;
                return Ok(Gathered(said));
            }
            if over {
                return Ok(Gathered(said));
            }
            pause.wait(end);
        }
    }

    fn look(&self, round: &Round) -> Result<Option<Gathered>, CliqueError> {
        let mut said = vec![None; self.member.participants as usize];
        let ended = self.look_into(&Key::from(round), &mut said, true)?;
        Ok(ended.map(|_| Gathered(said)))
    }

    fn whereabouts(&self, participant: u32) -> Option<String> {
        let name = self.names.get(participant as usize).filter(|name| !name.is_empty());
        let name = name.cloned().or_else(|| {
            let file = format!("joined.{participant}");
            match Frame::decode(
                &self.run.read(&file, HEADER_BYTES + MAX_REQUEST_BYTES).ok()??,
                MAX_REQUEST_BYTES,
            ) {
                Ok(Frame::Hello(Hello { name, .. })) => Some(name),
                _ => None,
            }
        });
        let left = if self.run.has(&format!("left.{participant}")) { " has left" } else { " has joined" };
        name.map(|name| format!("participant {participant}, {name},{left}"))
    }
}

impl Drop for SharedFile {
    fn drop(&mut self) {
        let _ = self.leave(LINGER, StayFor::Rounds);
    }
}

impl fmt::Debug for SharedFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.run.path().display();
        write!(f, "SharedFile({} of {}, {path})", self.member.participant, self.member.participants)
    }
}
