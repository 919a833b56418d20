//! How the processes of a clique exchange small messages before there is a communicator: [`Rendezvous`].

use core::fmt::Debug;
use std::time::Duration;

use crate::CliqueError;

/// Names one exchange by its content, so that a late message of an earlier attempt cannot be taken for one of this.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Round {
    /// The clique's name.
    pub clique: String,
    /// Which attempt to bring it up, counted by the application.
    pub attempt: u64,
    /// Which exchange of the attempt.
    pub phase: &'static str,
}

/// What one participant says in a round.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Post {
    /// It goes on; the bytes are for the others.
    Ok(Vec<u8>),
    /// It cannot go on; the bytes say why.
    Failed(Vec<u8>),
}

/// What was said in a round, one entry a participant; `None` is one that has not said anything.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gathered(pub Vec<Option<Post>>);

/// Carries messages between the participants of cliques. A participant is a process with all its local ranks.
///
/// Posting never waits for another participant. Gathering waits, with a limit, and holds no lock meanwhile that a post or
/// another gather needs, so a failure that is posted reaches everybody who gathers at once.
pub trait Rendezvous: Debug + Send + Sync {
    /// Which participant this process is, counted from 0.
    fn participant(&self) -> u32;

    /// How many there are.
    fn participants(&self) -> u32;

    /// Says this participant's message of a round.
    ///
    /// # Errors
    /// A second post of the same round; whatever keeps the message from being carried.
    fn post(&self, round: &Round, post: Post) -> Result<(), CliqueError>;

    /// Returns what was said in a round: as soon as everybody has said something, as soon as somebody has said
    /// [`Post::Failed`], or when the time is over, then with gaps.
    ///
    /// # Errors
    /// Whatever keeps messages from being carried. That somebody is missing is no error here: the caller sees the gaps.
    fn gather(&self, round: &Round, within: Duration) -> Result<Gathered, CliqueError>;
}
