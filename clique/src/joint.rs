//! [`Joint`]: each participant does its part, and all go on together or none does.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Instant;

use crate::CliqueError;
use crate::failure::Fault;
use crate::life::{ABORT_WITHIN, HEARD_BY, Life, told_by};
use crate::message::Note;
use crate::owner::{Desk, LOST_COMMAND, spawn};
use crate::rendezvous::{IS_THERE, Post};
use crate::rounds::{Heard, LOOK, Rounds, note_of};
use crate::state::Phase;
use crate::sync::Deadline;
use crate::verify::Seat;

/// Where a joint part belongs.
pub(crate) struct Joint<'a> {
    pub(crate) rounds: &'a Rounds,
    /// The round in which all say how it went.
    pub(crate) round: &'static str,
    /// Where the others are told of what goes wrong after the own word was said.
    pub(crate) next: &'static str,
    /// The round, posted to before, whose gaps tell who never began, if there is one.
    pub(crate) begun: Option<&'static str>,
    pub(crate) phase: Phase,
    pub(crate) process: &'a str,
    pub(crate) seats: &'a [Seat],
    pub(crate) deadline: Deadline,
    /// The clique in whose use this happens, if there is one: with its end the part ends.
    pub(crate) parent: Option<&'a Life>,
}

/// What an owner has to do: until the deadline, after which it is aborted.
pub(crate) type Part<R> = Box<dyn FnOnce(&mut Desk, Deadline) -> Result<R, Fault> + Send>;

/// What came of it.
pub(crate) struct Done<R> {
    pub(crate) results: Vec<R>,
    /// When the own part was done.
    pub(crate) own_done: Instant,
}

enum Event<R> {
    Own(usize, Result<R, Fault>),
    Heard(Result<Heard, CliqueError>),
}

/// Says that it was lost if nothing else is said.
struct Answer<R> {
    events: Sender<Event<R>>,
    index: usize,
    is_given: bool,
}

impl<R> Answer<R> {
    fn give(mut self, result: Result<R, Fault>) {
        self.is_given = true;
        // Whoever asked may have given up.
        let _ = self.events.send(Event::Own(self.index, result));
    }
}

impl<R> Drop for Answer<R> {
    fn drop(&mut self) {
        if !self.is_given {
            let lost = Err(Fault::new(None, LOST_COMMAND));
            let _ = self.events.send(Event::Own(self.index, lost));
        }
    }
}

impl Joint<'_> {
    /// Runs a part on each owner, hears the others meanwhile, says at once how the own parts ended, and returns when
    /// everybody has said that theirs are done.
    ///
    /// # Errors
    /// What failed first, here or elsewhere. The others know.
    pub(crate) fn run<R: Send + 'static>(&self, parts: Vec<(Arc<Life>, Part<R>)>) -> Result<Done<R>, Note> {
        let (events, next) = channel();
        let count = parts.len();
        self.listen(events.clone()).map_err(|error| self.tell(note_of(&error, self.phase, self.process)))?;
        // Whether the time is over is decided here, with what the others have said.
        let owners_until = self.deadline.plus(ABORT_WITHIN);
        for (index, (life, part)) in parts.into_iter().enumerate() {
            let answer = Answer { events: events.clone(), index, is_given: false };
            drop(life.owner.post(move |desk| answer.give(part(desk, owners_until))));
        }
        drop(events);
        let mut results: Vec<Option<R>> = (0..count).map(|_| None).collect();
        let mut own_done = if count == 0 { self.say()? } else { None };
        // The listener ends by the deadline by itself, and knows more than this clock.
        let until = self.deadline.plus(HEARD_BY);
        loop {
            let slice = if self.parent.is_some() { LOOK } else { until.left() };
            match next.recv_timeout(until.left().min(slice)) {
                Ok(Event::Own(index, Ok(result))) => {
                    results[index] = Some(result);
                    if results.iter().all(Option::is_some) {
                        own_done = self.say()?;
                    }
                }
                Ok(Event::Own(_, Err(fault))) => {
                    let own = self.tell(fault.note(self.phase, self.process));
                    return Err(self.first_of(own, &next));
                }
                Ok(Event::Heard(Ok(Heard::All(_)))) => {
                    let own_done = own_done.unwrap_or_else(Instant::now);
                    return Ok(Done { results: results.into_iter().flatten().collect(), own_done });
                }
                Ok(Event::Heard(Ok(Heard::Failed(note)))) => return Err(note),
                Ok(Event::Heard(Ok(Heard::Missing(missing)))) => {
                    return Err(self.missing(&missing, own_done.is_some()));
                }
                Ok(Event::Heard(Err(error))) => {
                    return Err(self.tell(note_of(&error, self.phase, self.process)));
                }
                Err(RecvTimeoutError::Timeout) if !until.is_over() => {
                    if let Some(end) = self.parent.and_then(Life::end) {
                        return Err(self.tell(note_of(&end, self.phase, self.process)));
                    }
                }
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    // It is not asked again, and not waited for: all that is left goes to the abort.
                    let fault = Fault::new(None, "the rendezvous did not return by the deadline");
                    let note = fault.note(self.phase, self.process);
                    self.rounds.tell(
                        self.round,
                        self.next,
                        &note,
                        Deadline::after(core::time::Duration::ZERO),
                    );
                    return Err(note);
                }
            }
        }
    }

    /// Hears the round on a thread of its own.
    fn listen<R: Send + 'static>(&self, events: Sender<Event<R>>) -> Result<(), CliqueError> {
        let (rounds, round, deadline) = (self.rounds.clone(), self.round, self.deadline);
        spawn("clique-listener", move || {
            let heard = rounds.hear(round, deadline.left());
            drop(rounds);
            // Whoever asked may have given up.
            let _ = events.send(Event::Heard(heard));
        })
    }

    /// Says that the own part is done.
    fn say(&self) -> Result<Option<Instant>, Note> {
        let said = self.rounds.post(self.round, Post::Ok(Vec::new()), self.deadline);
        // What was said may have arrived all the same: so the others are told that it counts no more.
        said.map(|()| Some(Instant::now()))
            .map_err(|error| self.tell(note_of(&error, self.phase, self.process)))
    }

    /// Says that the own part failed.
    fn tell(&self, note: Note) -> Note {
        self.rounds.tell(self.round, self.next, &note, told_by(self.deadline));
        note
    }

    /// The time is over, or somebody has gone. Who never began is missing; if all have begun, who did not end is.
    fn missing(&self, silent: &[u32], own_is_done: bool) -> Note {
        let begun = self.begun.and_then(|round| self.rounds.hear_so_far(round, told_by(self.deadline)));
        let (missing, what) = match begun {
            Some(Heard::Missing(never)) if !never.is_empty() => (never, "did not begin"),
            _ => (silent.to_vec(), "did not end"),
        };
        // Before the time is over those who are there are not missing: they wait for who has gone, as this one does.
        let is_over = self.deadline.is_over();
        let has_gone = |one: &u32| is_over || !self.rounds.name(*one).ends_with(IS_THERE);
        let missing: Vec<u32> = missing.into_iter().filter(has_gone).collect();
        let this = self.rounds.rendezvous.participant();
        let is_missing = |seat: &Seat| seat.participant != this && missing.contains(&seat.participant);
        let ranks: Vec<u32> =
            (0..).zip(self.seats).filter(|(_, seat)| is_missing(seat)).map(|(rank, _)| rank).collect();
        let own = if own_is_done { "done" } else { "not done" };
        let others = if ranks.is_empty() {
            String::new()
        } else {
            format!(", and the ranks {} of other participants {what}", list(&ranks))
        };
        let ranks_are = format!("the ranks of this process are {own}{others}");
        let cause = match is_over {
            true => format!("the time is over: {ranks_are}"),
            false => format!("{ranks_are}; {}", self.rounds.silent(silent)),
        };
        let mut fault = Fault::new(None, cause);
        fault.missing = ranks;
        let own = self.tell(fault.note(self.phase, self.process));
        // Others have found out at the same moment, and one of them was first: in this round, or in the next.
        let first = [self.round, self.next].into_iter().find_map(|round| {
            match self.rounds.hear_so_far(round, told_by(self.deadline)) {
                Some(Heard::Failed(first)) => Some(first),
                _ => None,
            }
        });
        first.unwrap_or(own)
    }

    /// The own failure, or an earlier one of another participant, of which it may be a consequence. The listener hears
    /// which was first.
    fn first_of<R>(&self, own: Note, next: &Receiver<Event<R>>) -> Note {
        let until = told_by(self.deadline);
        loop {
            match next.recv_timeout(until.left()) {
                Ok(Event::Heard(Ok(Heard::Failed(first)))) => return first,
                Ok(Event::Own(..)) => {}
                Ok(Event::Heard(_)) | Err(_) => return own,
            }
        }
    }
}

/// Ranks, the first of them by name.
fn list(ranks: &[u32]) -> String {
    match ranks.split_at_checked(16) {
        Some((named, more)) if !more.is_empty() => format!("{named:?} and {} more", more.len()),
        _ => format!("{ranks:?}"),
    }
}
