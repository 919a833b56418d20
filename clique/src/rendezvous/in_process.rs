//! [`Hub`] and [`InProcess`]: participants that are threads of one process.

use core::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::CliqueError;
use crate::rendezvous::board::{Board, Key, check_participants, out_of_range};
use crate::rendezvous::{Gathered, Post, Rendezvous, Round, check_message, end_of};

/// Where the participants of one process meet. Clones are the same place.
///
/// ```
/// use std::time::Duration;
/// use portway_clique::rendezvous::{Hub, Post, Rendezvous, Round};
///
/// let hub = Hub::new(2)?;
/// let round = Round { clique: "all".into(), attempt: 0, phase: "names" };
/// let (first, second) = (hub.join(0)?, hub.join(1)?);
/// second.post(&round, Post::Ok(b"right".to_vec()))?; // as another thread would
/// first.post(&round, Post::Ok(b"left".to_vec()))?;
/// let all = first.gather(&round, Duration::from_secs(10))?;
/// assert_eq!(all.0[1], Some(Post::Ok(b"right".to_vec())));
/// # Ok::<(), portway_clique::CliqueError>(())
/// ```
#[derive(Clone)]
pub struct Hub {
    shared: Arc<Shared>,
}

struct Shared {
    participants: u32,
    state: Mutex<State>,
    /// A gather may end.
    changed: Condvar,
}

struct State {
    board: Board,
    joined: Vec<bool>,
}

impl Shared {
    /// The state. No code of a caller runs under the lock, and the board is whole between its calls, so a thread that
    /// panicked elsewhere has left it usable.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Hub {
    /// A place for so many participants.
    ///
    /// # Errors
    /// [`CliqueError::Config`] for none, or more than [`MAX_PARTICIPANTS`](crate::rendezvous::MAX_PARTICIPANTS).
    pub fn new(participants: u32) -> Result<Self, CliqueError> {
        check_participants(participants)?;
        let state = State { board: Board::new(participants), joined: vec![false; participants as usize] };
        let shared = Shared { participants, state: Mutex::new(state), changed: Condvar::new() };
        Ok(Hub { shared: Arc::new(shared) })
    }

    /// Becomes a participant, until the value is dropped.
    ///
    /// # Errors
    /// [`CliqueError::Config`] if there is no such participant, or somebody else is it.
    pub fn join(&self, participant: u32) -> Result<InProcess, CliqueError> {
        let mut state = self.shared.lock();
        match state.joined.get_mut(participant as usize) {
            None => Err(out_of_range(participant, self.shared.participants)),
            Some(true) => Err(CliqueError::Config {
                what: format!("participant {participant}"),
                expected: "one in this process".to_owned(),
                seen: "a second one".to_owned(),
            }),
            Some(joined) => {
                *joined = true;
                Ok(InProcess { shared: self.shared.clone(), participant })
            }
        }
    }

    /// How many rounds are kept because somebody has not posted or gathered them yet.
    pub fn open_rounds(&self) -> usize {
        self.shared.lock().board.open_rounds()
    }
}

impl fmt::Debug for Hub {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Hub({} participants)", self.shared.participants)
    }
}

/// A participant of a [`Hub`]. What it has said stays when it is dropped.
pub struct InProcess {
    shared: Arc<Shared>,
    participant: u32,
}

impl Rendezvous for InProcess {
    fn participant(&self) -> u32 {
        self.participant
    }

    fn participants(&self) -> u32 {
        self.shared.participants
    }

    fn post(&self, round: &Round, post: Post) -> Result<(), CliqueError> {
        check_message(round, &post)?;
        if self.shared.lock().board.post(self.participant, &Key::from(round), post)? {
            self.shared.changed.notify_all();
        }
        Ok(())
    }

    fn gather(&self, round: &Round, within: Duration) -> Result<Gathered, CliqueError> {
        let end = end_of(within);
        let key = Key::from(round);
        let mut state = self.shared.lock();
        state.board.begin_wait(&key);
        let said = loop {
            let left = end.saturating_duration_since(Instant::now());
            if let Some(said) = state.board.gather(self.participant, &key, left.is_zero()).transpose() {
                break said;
            }
            // The wait gives the lock back.
            let waited = self.shared.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        };
        state.board.end_wait(&key);
        drop(state);
        Ok(Gathered(Arc::unwrap_or_clone(said?)))
    }

    fn look(&self, round: &Round) -> Result<Option<Gathered>, CliqueError> {
        let said = self.shared.lock().board.look(&Key::from(round))?;
        Ok(said.map(|said| Gathered(Arc::unwrap_or_clone(said))))
    }
}

impl Drop for InProcess {
    fn drop(&mut self) {
        if let Some(joined) = self.shared.lock().joined.get_mut(self.participant as usize) {
            *joined = false;
        }
    }
}

impl fmt::Debug for InProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "InProcess({} of {})", self.participant, self.shared.participants)
    }
}
