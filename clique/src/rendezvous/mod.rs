//! How the processes of a clique exchange small messages before there is a communicator: [`Rendezvous`].
//!
//! | | for | needs |
//! | --- | --- | --- |
//! | [`Hub`] | threads of one process | nothing |
//! | [`Tcp`] | processes, also on several hosts | an address that participant 0 may listen at |
//! | [`SharedFile`] | processes, also on several hosts | a folder that all of them may write to |
//!
//! The last two keep jobs apart by a [`JobToken`], and runs of one job by random numbers, so what an earlier run has left,
//! a process or a file, is known as such. All attempts to bring a clique up, and all its children, go over the same
//! rendezvous: keep it for them, or the next attempt meets the store that the last one is about to leave. Every wait has a limit, and what ends one names who was missing:
//! [`whereabouts`](Rendezvous::whereabouts) says which process that is and whether it has come, left or gone. None of this
//! keeps out somebody who can read the messages: a rendezvous belongs into a network, or a folder, that the job trusts.

mod board;
mod file;
mod identity;
mod in_process;
mod tcp;
mod wire;

use core::fmt::Debug;
use std::time::{Duration, Instant};

use crate::CliqueError;

pub use file::{SharedFile, SharedFileConfig};
pub use identity::{JobToken, Membership};
pub use in_process::{Hub, InProcess};
pub use tcp::{Tcp, TcpConfig};

/// The most participants of a rendezvous.
pub const MAX_PARTICIPANTS: u32 = 1 << 14;
/// The longest message of one participant in one round, in bytes.
pub const MAX_MESSAGE_BYTES: usize = 1 << 16;
/// The longest name of a clique or phase, in bytes.
pub const MAX_NAME_BYTES: usize = 256;

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
///
/// # How long a round is kept
///
/// Until everybody has posted and gathered it, with a gather that ended complete or with a failure. So every participant
/// does both in every round; a gather that ended with gaps may be repeated, one that ended otherwise may not. What failed
/// attempts leave behind is freed when somebody posts in a later attempt of the same clique: who still waits in a round of
/// an earlier one in which somebody is missing, and nobody has failed, gets an error that names the one who went on. Of what is left behind all the
/// same, the rounds that were used last are kept, 1,024 of them or a few more. Waiting in a round uses it; using one that
/// was given up is an error.
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
    /// It ends with gaps before its time is over where a rendezvous knows that it waits in vain, as [`Tcp`] does: for a
    /// participant that is missing, that posted in this attempt of the clique before, and whose process has gone since. What
    /// is done for a clique, a split say, has rounds of the clique's name with a `/` and its own name after it.
    ///
    /// Of several failures the first decides: it alone is in the answer, the same one for everybody who gathers. First is
    /// what came first to where the messages meet, the hub, the store or the folder; no clock has a say in it.
    ///
    /// # Errors
    /// Whatever keeps messages from being carried. That somebody is missing is no error here: the caller sees the gaps.
    fn gather(&self, round: &Round, within: Duration) -> Result<Gathered, CliqueError>;

    /// What a gather would return at once if it ended without its time being over: `None` while somebody is missing and
    /// nobody has failed. A clique in use asks this at each heartbeat, so where messages travel an answer of `None` has a
    /// few bytes, however many participants there are. It does not count as a gather.
    ///
    /// # Errors
    /// As [`gather`](Self::gather).
    fn look(&self, round: &Round) -> Result<Option<Gathered>, CliqueError>;

    /// What is known of another participant, for messages: its process and host, whether it has come or gone. `None` if
    /// nothing is known. Waits for nobody.
    fn whereabouts(&self, participant: u32) -> Option<String> {
        let _ = participant;
        None
    }
}

/// How the whereabouts end of a participant that is there and has said nothing.
pub(crate) const IS_THERE: &str = "is connected and has not posted";

/// How long participant 0 stays when it is dropped, for the others' sake.
const LINGER: Duration = Duration::from_secs(2);

/// For whom participant 0 stays when it leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StayFor {
    /// For everybody who has not left.
    Everybody,
    /// As long as some round is kept: somebody has not posted or gathered it.
    Rounds,
}

/// Refuses what no rendezvous carries.
fn check_message(round: &Round, post: &Post) -> Result<(), CliqueError> {
    let too_long = |what: String, most: usize, seen: usize| CliqueError::Config {
        what,
        expected: format!("at most {most} bytes"),
        seen: format!("{seen} bytes"),
    };
    for (what, name) in [("the clique's name", round.clique.as_str()), ("the phase's name", round.phase)] {
        if name.len() > MAX_NAME_BYTES {
            return Err(too_long(what.to_owned(), MAX_NAME_BYTES, name.len()));
        }
    }
    let (Post::Ok(bytes) | Post::Failed(bytes)) = post;
    if bytes.len() > MAX_MESSAGE_BYTES {
        let what = format!("a message of phase {:?} of clique {:?}", round.phase, round.clique);
        return Err(too_long(what, MAX_MESSAGE_BYTES, bytes.len()));
    }
    Ok(())
}

/// Everybody has said something, or somebody has failed.
fn has_ended(said: &[Option<Post>]) -> bool {
    said.iter().all(Option::is_some) || said.iter().any(|said| matches!(said, Some(Post::Failed(_))))
}

/// The moment at which a limit is over; one that no clock can hold is a year.
fn end_of(within: Duration) -> Instant {
    const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);
    let now = Instant::now();
    now + within.min(YEAR)
}
