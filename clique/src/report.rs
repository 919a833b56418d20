//! What a bring-up took: [`Durations`].

use core::time::Duration;

/// How long each part of bringing a clique up took for this participant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Durations {
    /// Until everybody had said who they are.
    pub gathering: Duration,
    /// Reaching the verdict.
    pub verification: Duration,
    /// Making, sending and hearing the unique ids.
    pub id_exchange: Duration,
    /// Until the local ranks were up.
    pub initialisation: Duration,
    /// From then until everybody's were.
    pub barrier: Duration,
    /// Until everybody had run what was declared.
    pub first_use: Duration,
    /// All together, with what lies between.
    pub total: Duration,
}

/// What closing a clique did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Closed {
    /// Finalizing, and destroying.
    pub destroy: Duration,
    /// Every participant has closed as well.
    pub everybody: bool,
}
