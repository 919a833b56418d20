//! [`Rounds`]: the exchanges of one attempt at a clique, over a rendezvous.

use core::time::Duration;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::Instant;

use crate::CliqueError;
use crate::failure::Fault;
use crate::life::HEARD_BY;
use crate::message::Note;
use crate::owner::spawn;
use crate::rendezvous::{Gathered, IS_THERE, Post, Rendezvous, Round};
use crate::state::Phase;
use crate::sync::Deadline;

/// While the clique is used: whoever fails says so here, and whoever closes.
pub(crate) const LIFE: &str = "life";
/// How often whoever waits for other participants looks whether it still has to.
pub(crate) const LOOK: Duration = Duration::from_millis(5);
/// How many of those that are missing are named.
const MAX_NAMED: usize = 16;
/// How often the word of some of the participants is looked for.
const SLICE: Duration = Duration::from_millis(5);

/// The exchanges of one attempt.
#[derive(Clone, Debug)]
pub(crate) struct Rounds {
    pub(crate) rendezvous: Arc<dyn Rendezvous>,
    pub(crate) clique: String,
    pub(crate) attempt: u64,
    /// The participants that take part; `None` for all of the rendezvous.
    pub(crate) who: Option<Arc<[u32]>>,
}

/// How an exchange ended.
#[derive(Debug)]
pub(crate) enum Heard {
    /// Everybody goes on; their messages, in the order of the participants.
    All(Vec<(u32, Vec<u8>)>),
    /// Somebody failed; what it said.
    Failed(Note),
    /// These participants have said nothing by the deadline, or by when the rendezvous knew that one of them has gone.
    Missing(Vec<u32>),
}

/// Why an exchange did not bring what everybody says.
#[derive(Debug)]
pub(crate) enum Short {
    /// Somebody failed; what it said.
    Failed(Note),
    /// Somebody has said nothing, and the time is over or it has gone; in words.
    Silent(String),
    /// It cannot be had here.
    Error(CliqueError),
}

impl Rounds {
    pub(crate) fn round(&self, phase: &'static str) -> Round {
        Round { clique: self.clique.clone(), attempt: self.attempt, phase }
    }

    /// A round beside the attempt's own, told apart by its key.
    pub(crate) fn keyed(&self, key: &str) -> Self {
        Rounds { clique: format!("{}/{key}", self.clique), ..self.clone() }
    }

    /// Says something. Posting waits for no participant; a store that does not answer is not waited for after `until`.
    pub(crate) fn post(&self, phase: &'static str, post: Post, until: Deadline) -> Result<(), CliqueError> {
        let start = Instant::now();
        let posted = self.apart(move |rounds| rounds.rendezvous.post(&rounds.round(phase), post))?;
        posted.recv_timeout(until.left()).unwrap_or_else(|_| {
            Err(CliqueError::Timeout {
                what: format!("posting {phase:?}"),
                expected: "the rendezvous to take it".to_owned(),
                seen: "nothing".to_owned(),
                waited: start.elapsed(),
            })
        })
    }

    /// Says that this participant failed: in a round or, if it has said there that it goes on, in the next. Both on one
    /// thread, which is waited for until `until` and goes on after.
    pub(crate) fn tell(&self, round: &'static str, next: &'static str, note: &Note, until: Deadline) {
        let failed = note.encode();
        let told = self.apart(move |rounds| {
            let refused = rounds.rendezvous.post(&rounds.round(round), Post::Failed(failed.clone())).is_err();
            if refused {
                let _ = rounds.rendezvous.post(&rounds.round(next), Post::Failed(failed));
            }
        });
        if let Ok(told) = told {
            // Where the others cannot be told their own deadlines end their waits.
            let _ = told.recv_timeout(until.left());
        }
    }

    /// Hears what the participants say in a round.
    pub(crate) fn hear(&self, phase: &'static str, within: Duration) -> Result<Heard, CliqueError> {
        let (round, until) = (self.round(phase), Deadline::after(within));
        loop {
            // A rendezvous waits for everybody; if some are enough, they are looked for now and then.
            let slice = if self.who.is_some() { until.left().min(SLICE) } else { within };
            let gathered = match self.rendezvous.gather(&round, slice) {
                // A late answer to one look of many is no loss.
                Err(CliqueError::Timeout { .. }) if self.who.is_some() && !until.is_over() => {
                    std::thread::sleep(slice);
                    continue;
                }
                gathered => gathered?,
            };
            let heard = self.understand(gathered)?;
            if self.who.is_none() || !matches!(heard, Heard::Missing(_)) || until.is_over() {
                return Ok(heard);
            }
        }
    }

    /// Says something and hears what all say, by name: as everybody does who has nothing else to do meanwhile. A
    /// rendezvous that does not keep its limit is not waited for, and `go_on` can end the wait.
    pub(crate) fn exchange(
        &self,
        phase: &'static str,
        post: Post,
        deadline: Deadline,
        go_on: impl Fn() -> Result<(), CliqueError>,
    ) -> Result<Vec<(u32, Vec<u8>)>, Short> {
        let start = Instant::now();
        let heard = self.apart(move |rounds| {
            rounds.rendezvous.post(&rounds.round(phase), post)?;
            rounds.hear(phase, deadline.left())
        });
        let (heard, until) = (heard.map_err(Short::Error)?, deadline.plus(HEARD_BY));
        loop {
            match heard.recv_timeout(until.left().min(LOOK)) {
                Ok(Ok(Heard::All(said))) => return Ok(said),
                Ok(Ok(Heard::Failed(note))) => return Err(Short::Failed(note)),
                Ok(Ok(Heard::Missing(missing))) => {
                    let over = if deadline.is_over() { "the time is over, and " } else { "" };
                    return Err(Short::Silent(format!("{over}{}", self.silent(&missing))));
                }
                Ok(Err(error)) => return Err(Short::Error(error)),
                Err(RecvTimeoutError::Timeout) if !until.is_over() => go_on().map_err(Short::Error)?,
                Err(_) => {
                    return Err(Short::Error(CliqueError::Timeout {
                        what: format!("gathering {phase:?}"),
                        expected: "the rendezvous to return by the deadline".to_owned(),
                        seen: "nothing".to_owned(),
                        waited: start.elapsed(),
                    }));
                }
            }
        }
    }

    /// Who is missing, and where they are: those first who are not there, for whom the others may wait.
    pub(crate) fn silent(&self, missing: &[u32]) -> String {
        // Asking where somebody is may take a look at a file: no more are asked than needed.
        let (mut names, mut there) = (Vec::new(), Vec::new());
        for one in missing {
            if names.len() == MAX_NAMED {
                break;
            }
            let name = self.name(*one);
            if !name.ends_with(IS_THERE) {
                names.push(name);
            } else if there.len() < MAX_NAMED {
                there.push(name);
            }
        }
        names.append(&mut there);
        names.truncate(MAX_NAMED);
        let all = self.who.as_ref().map_or(self.rendezvous.participants() as usize, |who| who.len());
        format!("{} of {all} participants said nothing: {}", missing.len(), names.join("; "))
    }

    /// Does something on a thread of its own, in case the rendezvous does not keep its limits.
    fn apart<R: Send + 'static>(
        &self,
        body: impl FnOnce(&Rounds) -> R + Send + 'static,
    ) -> Result<Receiver<R>, CliqueError> {
        let (answer, result) = sync_channel(1);
        let rounds = self.clone();
        spawn("clique-rounds", move || {
            let result = body(&rounds);
            // First, so that who has the answer holds the rendezvous alone, and it can end with its last owner.
            drop(rounds);
            // Whoever asked may have given up.
            let _ = answer.send(result);
        })?;
        Ok(result)
    }

    /// Hears what has been said so far.
    pub(crate) fn hear_so_far(&self, phase: &'static str, until: Deadline) -> Option<Heard> {
        let heard = self.apart(move |rounds| rounds.hear(phase, Duration::ZERO)).ok()?;
        heard.recv_timeout(until.left()).ok()?.ok()
    }

    /// Looks, on a thread of its own, whether a round has ended; `None` if it has not.
    pub(crate) fn watch(
        &self,
        phase: &'static str,
    ) -> Result<Receiver<Result<Option<Heard>, CliqueError>>, CliqueError> {
        self.apart(move |rounds| {
            let seen = rounds.rendezvous.look(&rounds.round(phase))?;
            seen.map(|gathered| rounds.understand(gathered)).transpose()
        })
    }

    /// A participant, for messages.
    pub(crate) fn name(&self, participant: u32) -> String {
        let number = format!("participant {participant}");
        match self.rendezvous.whereabouts(participant) {
            // Most say the number, too.
            Some(known) if known.starts_with(&number) => known,
            Some(known) => format!("{number}, {known}"),
            None => number,
        }
    }

    fn understand(&self, gathered: Gathered) -> Result<Heard, CliqueError> {
        let expected = self.rendezvous.participants() as usize;
        if gathered.0.len() != expected {
            return Err(CliqueError::Foreign {
                peer: "the rendezvous".to_owned(),
                what: "number of participants",
                expected: expected.to_string(),
                seen: gathered.0.len().to_string(),
            });
        }
        let mut said = Vec::with_capacity(expected);
        let mut missing = Vec::new();
        let mut failed: Option<Note> = None;
        for (participant, post) in (0..).zip(gathered.0) {
            if self.who.as_ref().is_some_and(|who| !who.contains(&participant)) {
                continue;
            }
            match post {
                Some(Post::Ok(bytes)) => said.push((participant, bytes)),
                Some(Post::Failed(bytes)) => {
                    let note = Note::decode(&bytes, &self.name(participant))?;
                    // There is one, the first; of a rendezvous that has several the lowest participant's counts.
                    failed.get_or_insert(note);
                }
                None => missing.push(participant),
            }
        }
        Ok(match failed {
            Some(note) => Heard::Failed(note),
            None if missing.is_empty() => Heard::All(said),
            None => Heard::Missing(missing),
        })
    }
}

/// An error of this participant, or of what carries its messages, as others are told of it.
pub(crate) fn note_of(error: &CliqueError, phase: Phase, process: &str) -> Note {
    if let CliqueError::Failed(failure) = error {
        return Note {
            phase: failure.phase,
            rank: failure.rank,
            process: failure.process.clone(),
            status: failure.status,
            cause: failure.cause.clone(),
            missing: failure.missing.clone(),
        };
    }
    let fault = match error {
        CliqueError::Backend(error) => Fault::of(None, error),
        _ => Fault::new(None, error.to_string()),
    };
    fault.note(phase, process)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::rendezvous::{Hub, InProcess, JobToken, Membership, Tcp, TcpConfig};

    /// Asks take their time, as in a folder on another host.
    #[derive(Debug)]
    struct Slow(InProcess, AtomicUsize);

    impl Rendezvous for Slow {
        fn participant(&self) -> u32 {
            self.0.participant()
        }

        fn participants(&self) -> u32 {
            self.0.participants()
        }

        fn post(&self, round: &Round, post: Post) -> Result<(), CliqueError> {
            self.0.post(round, post)
        }

        fn gather(&self, round: &Round, within: Duration) -> Result<Gathered, CliqueError> {
            self.0.gather(round, within)
        }

        fn look(&self, round: &Round) -> Result<Option<Gathered>, CliqueError> {
            self.0.look(round)
        }

        fn whereabouts(&self, participant: u32) -> Option<String> {
            self.1.fetch_add(1, Ordering::AcqRel);
            (participant % 2 == 0).then(|| format!("process {participant} {IS_THERE}"))
        }
    }

    /// Naming who is missing is done when the time is over.
    #[test]
    fn no_more_are_asked_where_they_are_than_are_named() {
        let slow = Arc::new(Slow(Hub::new(1024).unwrap().join(0).unwrap(), AtomicUsize::new(0)));
        let rounds = Rounds { rendezvous: slow.clone(), clique: "c".to_owned(), attempt: 0, who: None };
        let silent = rounds.silent(&(1..1024).collect::<Vec<_>>());
        assert!(
            silent.starts_with("1023 of 1024 participants said nothing: participant 1; participant 3;"),
            "{silent}"
        );
        assert_eq!(
            (silent.matches("participant ").count(), silent.matches(IS_THERE).count()),
            (MAX_NAMED, 0)
        );
        assert!(slow.1.load(Ordering::Acquire) <= 2 * MAX_NAMED, "{slow:?}");
        assert!(
            rounds
                .silent(&[2, 3, 4])
                .ends_with(&format!("process 2 {IS_THERE}; participant 4, process 4 {IS_THERE}"))
        );
    }

    /// Many wait for one, and it is named.
    #[test]
    fn who_has_gone_is_named_before_those_who_wait_for_it() {
        let start = |participant, address| {
            let token = JobToken::new(*b"a test's token").unwrap();
            let member = Membership { token, participant, participants: 40 };
            Tcp::start(TcpConfig { member, address, within: Duration::from_secs(20) }).unwrap()
        };
        let first = start(0, "127.0.0.1:0".parse().unwrap());
        let address = first.address();
        let mut others: Vec<Tcp> = (1..40).map(|participant| start(participant, address)).collect();
        drop(others.remove(29));
        let rounds = Rounds { rendezvous: Arc::new(first), clique: "c".to_owned(), attempt: 0, who: None };
        let until = Deadline::after(Duration::from_secs(20));
        loop {
            let heard = rounds.hear("a", Duration::from_millis(100)).unwrap();
            let Heard::Missing(missing) = heard else { panic!("{heard:?}") };
            let silent = rounds.silent(&missing);
            assert!(silent.starts_with("40 of 40 participants said nothing: participant "), "{silent}");
            assert_eq!(silent.matches(IS_THERE).count() + silent.matches("has left").count(), MAX_NAMED);
            if silent.contains("nothing: participant 30,") {
                break;
            }
            // The store has not seen its end yet.
            assert!(!until.is_over(), "{silent}");
        }
    }
}
