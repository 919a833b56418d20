//! A rendezvous in which something goes wrong when it is told so.

use core::fmt;
use std::sync::Arc;
use std::time::Duration;

use portway_clique::CliqueError;
use portway_clique::rendezvous::{Gathered, InProcess, Post, Rendezvous, Round};

/// What is about to happen in it, or just has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    Post,
    Posted,
    Gather,
    Look,
    Participant,
}

/// What is done then, with the round's phase, if there is one. An error is what the call returns, if it returns any.
pub type Meddle = Box<dyn Fn(Call, &str) -> Result<(), CliqueError> + Send + Sync>;

pub struct Meddled(pub Arc<InProcess>, pub Meddle);

impl fmt::Debug for Meddled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Rendezvous for Meddled {
    fn participant(&self) -> u32 {
        let _ = (self.1)(Call::Participant, "");
        self.0.participant()
    }

    fn participants(&self) -> u32 {
        self.0.participants()
    }

    fn post(&self, round: &Round, post: Post) -> Result<(), CliqueError> {
        (self.1)(Call::Post, round.phase)?;
        self.0.post(round, post)?;
        (self.1)(Call::Posted, round.phase)
    }

    fn gather(&self, round: &Round, within: Duration) -> Result<Gathered, CliqueError> {
        (self.1)(Call::Gather, round.phase)?;
        self.0.gather(round, within)
    }

    fn look(&self, round: &Round) -> Result<Option<Gathered>, CliqueError> {
        (self.1)(Call::Look, round.phase)?;
        self.0.look(round)
    }
}
