//! The states of a clique, apart from threads, clocks and messages: [`Machine`].
//!
//! ```text
//! gathering ▸ verified ▸ initialising ▸ barrier ▸ first use ▸ ready        from each of them ▸ failed
//! ```

use core::fmt;

/// Where a clique stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// The participants say who they are.
    Gathering,
    /// All agree; the unique ids travel.
    Verified,
    /// The library initialises the local ranks.
    Initialising,
    /// The local ranks are up; every participant has to say so.
    Barrier,
    /// What was declared is run once.
    FirstUse,
    /// It can be used.
    Ready,
    /// It cannot be used, any more or at all.
    Failed,
}

impl Phase {
    /// All of them, in order.
    pub const ALL: [Phase; 7] = [
        Phase::Gathering,
        Phase::Verified,
        Phase::Initialising,
        Phase::Barrier,
        Phase::FirstUse,
        Phase::Ready,
        Phase::Failed,
    ];

    /// Its place in [`ALL`](Self::ALL).
    pub fn index(self) -> u8 {
        self as u8
    }

    /// The library may have made communicators that somebody has to end.
    pub fn has_communicators(self) -> bool {
        matches!(self, Phase::Initialising | Phase::Barrier | Phase::FirstUse | Phase::Ready)
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Phase::Gathering => "gathering",
            Phase::Verified => "verified",
            Phase::Initialising => "initialising",
            Phase::Barrier => "barrier",
            Phase::FirstUse => "first use",
            Phase::Ready => "ready",
            Phase::Failed => "failed",
        })
    }
}

/// What happened to a clique.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// Everybody said who they are, and the verdict is that they agree.
    Agreed,
    /// The unique ids are here.
    IdsArrived,
    /// Every local rank is up.
    LocalsUp,
    /// Every participant said that its ranks are up.
    EverybodyUp,
    /// The declared operations ran here, with right results, and every participant said the same.
    EverybodyUsed,
    /// Something failed, here or elsewhere, or the time is over.
    Failed,
}

impl Event {
    /// All of them, in order.
    pub const ALL: [Event; 6] = [
        Event::Agreed,
        Event::IdsArrived,
        Event::LocalsUp,
        Event::EverybodyUp,
        Event::EverybodyUsed,
        Event::Failed,
    ];
}

/// An event that does not belong to the phase. The phase stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{event:?} cannot happen to a clique that is {phase}")]
pub struct OutOfOrder {
    /// Where the clique stands.
    pub phase: Phase,
    /// What was to happen.
    pub event: Event,
}

/// The state of one attempt at a clique, as one participant sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    phase: Phase,
    failed_in: Option<Phase>,
}

impl Default for Machine {
    fn default() -> Self {
        Machine::new()
    }
}

impl Machine {
    /// An attempt that begins.
    pub fn new() -> Self {
        Machine { phase: Phase::Gathering, failed_in: None }
    }

    /// Where it stands.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Where it stood when it failed.
    pub fn failed_in(&self) -> Option<Phase> {
        self.failed_in
    }

    /// Takes an event in; where the clique stands then.
    ///
    /// # Errors
    /// The event does not belong to the phase. A failure belongs to each; the first one stays.
    pub fn on(&mut self, event: Event) -> Result<Phase, OutOfOrder> {
        self.phase = match (self.phase, event) {
            (Phase::Gathering, Event::Agreed) => Phase::Verified,
            (Phase::Verified, Event::IdsArrived) => Phase::Initialising,
            (Phase::Initialising, Event::LocalsUp) => Phase::Barrier,
            (Phase::Barrier, Event::EverybodyUp) => Phase::FirstUse,
            (Phase::FirstUse, Event::EverybodyUsed) => Phase::Ready,
            (Phase::Failed, Event::Failed) => Phase::Failed,
            (phase, Event::Failed) => {
                self.failed_in = Some(phase);
                Phase::Failed
            }
            (phase, event) => return Err(OutOfOrder { phase, event }),
        };
        Ok(self.phase)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A machine in each phase, by the shortest way there.
    fn machine_in(phase: Phase) -> Machine {
        let mut machine = Machine::new();
        if phase == Phase::Failed {
            machine.on(Event::Failed).unwrap();
        }
        for event in Event::ALL {
            if machine.phase() == phase {
                break;
            }
            machine.on(event).unwrap();
        }
        machine
    }

    #[test]
    fn every_event_in_every_phase() {
        for phase in Phase::ALL {
            for event in Event::ALL {
                let mut machine = machine_in(phase);
                assert_eq!(machine.phase(), phase);
                let before = machine.clone();
                let result = machine.on(event);
                let next = match (phase, event) {
                    (_, Event::Failed) => Some(Phase::Failed),
                    // The n-th event leads from the n-th phase to the next one.
                    _ if phase.index() == event as u8 => Some(Phase::ALL[usize::from(phase.index()) + 1]),
                    _ => None,
                };
                assert_eq!(result, next.ok_or(OutOfOrder { phase, event }), "{phase} {event:?}");
                if next.is_none() {
                    assert_eq!(machine, before, "what is refused changes nothing");
                }
            }
        }
    }

    proptest! {
        /// Whatever happens in whatever order: ready comes only after all five steps in order, a failure is final and
        /// the first one stays.
        #[test]
        fn any_order(events in proptest::collection::vec(0..Event::ALL.len(), 0..40)) {
            let mut machine = Machine::new();
            let mut taken = Vec::new();
            for index in events {
                let event = Event::ALL[index];
                let before = machine.clone();
                if machine.on(event).is_ok() && before.phase() != Phase::Failed {
                    taken.push(event);
                }
                if before.phase() == Phase::Failed {
                    prop_assert_eq!(&machine, &before);
                }
                prop_assert_eq!(machine.failed_in().is_some(), machine.phase() == Phase::Failed);
                if machine.phase() == Phase::Ready {
                    prop_assert_eq!(&taken[..], &Event::ALL[..5]);
                }
            }
        }
    }
}
