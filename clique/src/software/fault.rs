//! What can be told to go wrong: [`Fault`] at a [`Step`].

use core::time::Duration;

use crate::backend::Status;

/// A point at which something can be told to go wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// Asking for the device's UUID.
    Uuid,
    /// Making a unique id.
    UniqueId,
    /// Allocating a workspace.
    Workspace,
    /// The call that begins the initialisation.
    Init,
    /// The initialisation in the background: finding the others, and allocating.
    InitProgress,
    /// Asking a communicator for its shape.
    Shape,
    /// The call that puts an operation into a stream.
    Enqueue,
    /// The set-up of an operation in the background: finding the others, and allocating.
    EnqueueProgress,
    /// An operation in its stream: with [`Kind::Fail`] its result is wrong.
    Result,
    /// Asking for the state of a communicator that is ready: an error that comes later.
    State,
    /// The call that begins a split or a shrink.
    Split,
    /// The split or shrink in the background.
    SplitProgress,
    /// Beginning to finalize.
    Finalize,
    /// Destroying.
    Destroy,
    /// Aborting.
    Abort,
}

impl Step {
    /// All of them.
    pub const ALL: [Step; 15] = [
        Step::Uuid,
        Step::UniqueId,
        Step::Workspace,
        Step::Init,
        Step::InitProgress,
        Step::Shape,
        Step::Enqueue,
        Step::EnqueueProgress,
        Step::Result,
        Step::State,
        Step::Split,
        Step::SplitProgress,
        Step::Finalize,
        Step::Destroy,
        Step::Abort,
    ];
}

/// How something goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// It takes this much longer.
    Delay(Duration),
    /// It fails with this status.
    Fail(Status),
    /// A call does not return, until [`Fabric::release`](super::Fabric::release); what is in progress stays so.
    Hang,
    /// The call panics.
    Panic,
}

/// Something that goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Where.
    pub step: Step,
    /// For which rank, or, where a step has no rank, whatever this says; `None` for all.
    pub rank: Option<u32>,
    /// How.
    pub kind: Kind,
    /// How many times the step goes well before.
    pub after: u32,
}

impl Fault {
    /// Goes wrong from the first time on.
    pub fn new(step: Step, rank: Option<u32>, kind: Kind) -> Self {
        Fault { step, rank, kind, after: 0 }
    }
}

/// The faults of a process, with how often each step has come by.
#[derive(Debug, Default)]
pub(super) struct Faults(Vec<(Fault, u32)>);

impl Faults {
    pub(super) fn add(&mut self, fault: Fault) {
        self.0.push((fault, 0));
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// What goes wrong at this step now.
    pub(super) fn at(&mut self, step: Step, rank: Option<u32>) -> Option<Kind> {
        let mut found = None;
        for (fault, seen) in &mut self.0 {
            let matches =
                fault.step == step && (fault.rank.is_none() || rank.is_none() || fault.rank == rank);
            if matches {
                if *seen >= fault.after {
                    found = found.or(Some(fault.kind));
                }
                *seen = seen.saturating_add(1);
            }
        }
        found
    }
}
