//! [`SharedFile`]: participants that are processes and share a folder, perhaps of another machine.
//!
//! ```text
//! DIRECTORY/portway-<job>/            the job's, by its token
//!     seat.<p>                        locked while participant p lives
//!     hello.<p>, welcome.<p>          how a process learns which run it is part of
//!     run-<number>/                   what only this run uses
//!         joined.<p>, left.<p>
//!         <clique>-<attempt>-<phase>/ a round: post.<p>, failed for the first failure, and seen.<p> once p has
//!                                     gathered it
//! ```
//!
//! Files of an earlier run cannot be mistaken for this one's: the run has a random number, participant 0 tells it only
//! in answer to a hello, and a hello has a random number too. Participant 0 removes what earlier runs have left.

mod folder;
mod join;
mod memory;

use core::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::CliqueError;
use crate::rendezvous::board::{Key, MAX_OPEN_ROUNDS, out_of_range};
use crate::rendezvous::wire::{Frame, HEADER_BYTES, Hello, MAX_REQUEST_BYTES, Wrong};
use crate::rendezvous::{Gathered, Membership, Post, Rendezvous, Round, check_message, end_of, has_ended};

use folder::{Folder, Lock};
pub use join::SharedFileConfig;
use memory::Memory;

/// The first and the longest pause between two looks.
const PAUSES: (Duration, Duration) = (Duration::from_micros(200), Duration::from_millis(10));
/// The file of a round's first failure: who it is of, and its post.
const FAILED: &str = "failed";
const PARTICIPANT_BYTES: usize = 4;
/// How long dropping participant 0 waits for the others to have left before it removes the run's files.
const LINGER: Duration = Duration::from_secs(2);

/// A participant by files.
pub struct SharedFile {
    member: Membership,
    job: Folder,
    run: Folder,
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

/// The post of a participant, as some file of a round has it.
fn decode_post(
    key: &Key,
    bytes: &[u8],
    participant: u32,
    round: &Folder,
    file: &str,
) -> Result<Post, CliqueError> {
    let peer = || format!("participant {participant}, in {}", round.file(file).display());
    match Frame::decode(bytes, MAX_REQUEST_BYTES).map_err(|wrong| wrong.from(&peer()))? {
        Frame::Post { key: of, post } if of == *key => Ok(post),
        Frame::Post { key: of, .. } => Err(Wrong::new("round", key, of).from(&peer())),
        other => Err(Wrong::new("frame", "a post", other.kind()).from(&peer())),
    }
}

/// The participant whose file of a kind this is.
fn participant_of(name: &str, kind: &str) -> Option<u32> {
    name.strip_prefix(kind)?.strip_prefix('.')?.parse().ok()
}

impl SharedFile {
    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the run is still there; participant 0 removes it when it leaves, a later run's when it comes.
    fn check_run(&self) -> Result<(), CliqueError> {
        if self.run.path().is_dir() {
            return Ok(());
        }
        Err(CliqueError::System {
            what: format!("the run's folder {}", self.run.path().display()),
            errno: None,
            message: "it is gone: participant 0 has left, or a later run has begun".to_owned(),
        })
    }

    /// An error if somebody has begun a later attempt.
    fn check_attempt(&self, key: &Key) -> Result<(), CliqueError> {
        let clique = short(key.clique.as_bytes());
        for name in self.run.names()? {
            let Some(attempt) = attempt_of(&name, &clique).filter(|attempt| *attempt > key.attempt) else {
                continue;
            };
            let Some(round) = Folder::existing(self.run.file(&name), self.run.owner())? else { continue };
            let posts = round.names()?;
            if let Some(by) = posts.iter().filter_map(|name| participant_of(name, "post")).min() {
                return Err(CliqueError::Config {
                    what: key.to_string(),
                    expected: "a round that is not over".to_owned(),
                    seen: format!("participant {by} has begun attempt {attempt}"),
                });
            }
        }
        Ok(())
    }

    /// Reads the posts of a round that have come since the last look.
    fn read_posts(&self, key: &Key, round: &Folder, said: &mut [Option<Post>]) -> Result<(), CliqueError> {
        for name in round.names()? {
            let Some(participant) = participant_of(&name, "post") else { continue };
            let Some(place @ None) = said.get_mut(participant as usize) else { continue };
            let Some(bytes) = round.read(&name, HEADER_BYTES + MAX_REQUEST_BYTES)? else { continue };
            *place = Some(decode_post(key, &bytes, participant, round, &name)?);
        }
        self.keep_the_first_failure(key, round, said)
    }

    /// Of several failures one stays, the same for everybody: that of the file `failed`, which is made once, and before
    /// the post that it repeats. Where a file system cannot make it, that of the lowest participant.
    fn keep_the_first_failure(
        &self,
        key: &Key,
        round: &Folder,
        said: &mut [Option<Post>],
    ) -> Result<(), CliqueError> {
        let first = match round.read(FAILED, PARTICIPANT_BYTES + HEADER_BYTES + MAX_REQUEST_BYTES)? {
            Some(bytes) => {
                let (who, bytes) = bytes.split_at_checked(PARTICIPANT_BYTES).unwrap_or_default();
                let who = who.try_into().map_or(u32::MAX, u32::from_le_bytes);
                let post = decode_post(key, bytes, who, round, FAILED)?;
                let place = said.get_mut(who as usize);
                *place.ok_or_else(|| out_of_range(who, self.member.participants))? = Some(post);
                Some(who as usize)
            }
            None => said.iter().position(|said| matches!(said, Some(Post::Failed(_)))),
        };
        for (participant, place) in said.iter_mut().enumerate() {
            if Some(participant) != first && matches!(place, Some(Post::Failed(_))) {
                *place = None;
            }
        }
        Ok(())
    }

    /// What was said in a round by now, and the round's folder if it has ended.
    fn look_into(&self, key: &Key, said: &mut [Option<Post>]) -> Result<Option<Folder>, CliqueError> {
        // Only a post makes the folder.
        let Some(folder) = Folder::existing(self.run.file(&round_name(key)), self.run.owner())? else {
            return Ok(None);
        };
        self.read_posts(key, &folder, said)?;
        Ok(has_ended(said).then_some(folder))
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
            self.run.remove(name);
        }
        Ok(())
    }

    /// Leaves. Participant 0 waits until the others have left too, and removes the files.
    ///
    /// # Errors
    /// [`CliqueError::Timeout`] at participant 0, naming who had not left; the files are gone nevertheless.
    pub fn close(mut self, within: Duration) -> Result<(), CliqueError> {
        self.leave(within)
    }

    fn leave(&mut self, within: Duration) -> Result<(), CliqueError> {
        let Some(seat) = self.seat.take() else { return Ok(()) };
        let own = self.member.participant;
        let mut result = Ok(());
        if own == 0 {
            result = self.wait_for_others(end_of(within));
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

    fn wait_for_others(&self, end: Instant) -> Result<(), CliqueError> {
        let began = Instant::now();
        let mut pause = Pause::new();
        loop {
            let still = (1..self.member.participants)
                .find(|participant| !self.run.has(&format!("left.{participant}")));
            let Some(still) = still else { return Ok(()) };
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
        self.check_run()?;
        self.check_attempt(&key)?;
        self.memory().post(self.member.participant, &key)?;
        let name = round_name(&key);
        let clique = short(key.clique.as_bytes());
        let mut rounds = self.run.names()?;
        rounds.retain(|old| {
            let is_old =
                attempt_of(old, &clique).is_some_and(|attempt| key.attempt.saturating_sub(attempt) >= 2);
            if is_old {
                self.run.remove(old);
            }
            !is_old && !old.starts_with("joined.") && !old.starts_with("left.")
        });
        // Whoever posts, since participant 0 may have no part in what is going on. It does not matter who comes first.
        if rounds.len() > MAX_OPEN_ROUNDS {
            // But never the round that is posted to: others may have waited in it for long.
            let others = rounds.iter().filter(|old| **old != name);
            if let Some(oldest) = others.min_by_key(|old| self.run.changed(old)) {
                self.run.remove(oldest);
            }
        }
        let folder = Folder::open(self.run.file(&name), self.run.owner())?;
        let (own, failing) = (self.member.participant, matches!(post, Post::Failed(_)));
        let bytes = Frame::Post { key, post }.encode();
        if failing {
            let first = [own.to_le_bytes().as_slice(), &bytes].concat();
            folder.write_first(FAILED, &format!("{FAILED}.{own}"), &first)?;
        }
        folder.write(&format!("post.{own}"), &bytes)
    }

    fn gather(&self, round: &Round, within: Duration) -> Result<Gathered, CliqueError> {
        let key = Key::from(round);
        let end = end_of(within);
        let name = round_name(&key);
        self.memory().may_gather(self.member.participant, &key)?;
        let mut said = vec![None; self.member.participants as usize];
        let mut pause = Pause::new();
        loop {
            let over = Instant::now() >= end;
            // Looked at first: what is complete by then counts, even if somebody has gone on to the next attempt since.
            let still = self.check_run().and_then(|()| self.check_attempt(&key));
            if let Some(folder) = self.look_into(&key, &mut said)? {
                self.memory().gathered(self.member.participant, &key)?;
                self.seen(&folder, &name)?;
                return Ok(Gathered(said));
            }
            still?;
            if over {
                return Ok(Gathered(said));
            }
            pause.wait(end);
        }
    }

    fn look(&self, round: &Round) -> Result<Option<Gathered>, CliqueError> {
        let key = Key::from(round);
        let mut said = vec![None; self.member.participants as usize];
        let still = self.check_run().and_then(|()| self.check_attempt(&key));
        if self.look_into(&key, &mut said)?.is_some() {
            return Ok(Some(Gathered(said)));
        }
        still.map(|()| None)
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
        let _ = self.leave(LINGER);
    }
}

impl fmt::Debug for SharedFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.run.path().display();
        write!(f, "SharedFile({} of {}, {path})", self.member.participant, self.member.participants)
    }
}
