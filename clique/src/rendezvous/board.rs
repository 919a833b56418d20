//! [`Board`]: what was said in which round, apart from how it got here. No threads, no clock.

use core::fmt;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use crate::CliqueError;
use crate::rendezvous::{MAX_PARTICIPANTS, Post, Round};

/// The most rounds that are open at once.
pub(crate) const MAX_OPEN_ROUNDS: usize = 1024;
/// How many rounds that are over are remembered, so that using one again is an error and not a wait.
const MAX_REMEMBERED: usize = 1024;

/// A [`Round`] that may come from elsewhere.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    pub(crate) clique: String,
    pub(crate) attempt: u64,
    pub(crate) phase: String,
}

impl From<&Round> for Key {
    fn from(round: &Round) -> Self {
        Key { clique: round.clique.clone(), attempt: round.attempt, phase: round.phase.to_owned() }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "round {:?} of attempt {} of clique {:?}", self.phase, self.attempt, self.clique)
    }
}

/// Why a round takes no more messages.
#[derive(Clone, Copy, Debug)]
enum End {
    Gathered,
    /// A participant has begun a later attempt of the same clique.
    Superseded {
        by: u32,
        attempt: u64,
    },
    /// Nobody has used it for longest when there were too many.
    GivenUp,
}

#[derive(Debug)]
struct Open {
    said: Arc<Vec<Option<Post>>>,
    posted: Vec<bool>,
    missing: u32,
    /// Nothing is added to what was said any more: all who gather it get the same first failure.
    failed: bool,
    /// Who posted first: it is named when this attempt ends an earlier one.
    first: u32,
    gathered: Vec<bool>,
    not_gathered: u32,
    /// When it was used last, counted in uses.
    used: u64,
}

/// The rounds of all cliques among the same participants.
///
/// A round ends, and its memory is freed, when everybody has posted and gathered it. A post in a later attempt of a
/// clique ends the earlier attempts: at once the rounds in which somebody is missing, and those that are complete or have
/// failed when they are two attempts old. So a slow participant still gets what a round has come to.
/// What is left behind all the same, under names that are not used again, is given up when there are too many.
#[derive(Debug)]
pub(crate) struct Board {
    participants: u32,
    open: HashMap<Key, Open>,
    over: VecDeque<(Key, End)>,
    /// How many gathers wait in a round, which need not be open.
    waiting: HashMap<Key, u32>,
    uses: u64,
    /// What has been said in a round that nobody has posted to. Shared, so that answers made of it can be, too: whoever
    /// watches a clique in use gathers such a round at each heartbeat.
    nobody: Arc<Vec<Option<Post>>>,
}

impl Board {
    pub(crate) fn new(participants: u32) -> Self {
        Board {
            participants,
            open: HashMap::new(),
            over: VecDeque::new(),
            waiting: HashMap::new(),
            uses: 0,
            nobody: Arc::new(vec![None; participants as usize]),
        }
    }

    /// A gather begins to wait: until it has ended, the round is not given up.
    pub(crate) fn begin_wait(&mut self, key: &Key) {
        *self.waiting.entry(key.clone()).or_default() += 1;
    }

    pub(crate) fn end_wait(&mut self, key: &Key) {
        if let Some(count) = self.waiting.get_mut(key) {
            *count -= 1;
            if *count == 0 {
                self.waiting.remove(key);
            }
        }
    }

    /// Takes a message. Returns whether a gather of this or an earlier round may end now.
    pub(crate) fn post(&mut self, participant: u32, key: &Key, post: Post) -> Result<bool, CliqueError> {
        let mut ended = false;
        if !self.open.contains_key(key) {
            self.check_not_over(key)?;
            ended = self.begin(participant, key)?;
        }
        self.uses += 1;
        let (participants, failing) = (self.participants, matches!(post, Post::Failed(_)));
        let open = self.open.get_mut(key).ok_or_else(|| unexpected(key))?;
        open.used = self.uses;
        let posted = open.posted.get_mut(participant as usize);
        let posted = posted.ok_or_else(|| out_of_range(participant, participants))?;
        if core::mem::replace(posted, true) {
            return Err(CliqueError::Config {
                what: format!("{key}, participant {participant}"),
                expected: "one post".to_owned(),
                seen: "a second one".to_owned(),
            });
        }
        if !open.failed {
            Arc::make_mut(&mut open.said)[participant as usize] = Some(post);
        }
        open.missing -= 1;
        open.failed |= failing;
        Ok(ended || open.missing == 0 || failing)
    }

    /// What this participant's gather returns now; `None` if it has to wait. With `over` it does not wait any more.
    pub(crate) fn gather(
        &mut self,
        participant: u32,
        key: &Key,
        over: bool,
    ) -> Result<Option<Arc<Vec<Option<Post>>>>, CliqueError> {
        let participants = self.participants;
        let Some(open) = self.open.get_mut(key) else {
            self.check_not_over(key)?;
            return Ok(over.then(|| self.nobody.clone()));
        };
        self.uses += 1;
        open.used = self.uses;
        let gathered = open.gathered.get_mut(participant as usize);
        let gathered = gathered.ok_or_else(|| out_of_range(participant, participants))?;
        if *gathered {
            return Err(CliqueError::Config {
                what: format!("{key}, participant {participant}"),
                expected: "one gather that ends complete or with a failure".to_owned(),
                seen: "another one".to_owned(),
            });
        }
        if open.missing > 0 && !open.failed {
            return Ok(over.then(|| open.said.clone()));
        }
        let said = open.said.clone();
        *gathered = true;
        open.not_gathered -= 1;
        if open.not_gathered == 0 && open.missing == 0 {
            self.end(key, End::Gathered);
        }
        Ok(Some(said))
    }

    /// What was said in a round that has ended, complete or with a failure; `None` while it has not. No gather.
    pub(crate) fn look(&mut self, key: &Key) -> Result<Option<Arc<Vec<Option<Post>>>>, CliqueError> {
        let Some(open) = self.open.get_mut(key) else {
            return self.check_not_over(key).map(|()| None);
        };
        self.uses += 1;
        open.used = self.uses;
        Ok((open.missing == 0 || open.failed).then(|| open.said.clone()))
    }

    /// Whether somebody is missing in a round, of those who have gone, who had posted in its attempt before, be it for the
    /// clique that this one belongs to. It will not post any more, and nobody can in its place: that one would have to
    /// begin with a round which has its post already.
    pub(crate) fn waits_in_vain(&self, key: &Key, gone: &[u32]) -> bool {
        let of_attempt = |other: &Key| {
            let rest = key.clique.strip_prefix(&other.clique);
            other.attempt == key.attempt && rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        let all_have = self.over.iter().any(|(old, end)| matches!(end, End::Gathered) && of_attempt(old));
        let open: Vec<&Open> =
            self.open.iter().filter(|(other, _)| of_attempt(other)).map(|(_, open)| open).collect();
        let has_posted = |open: &Open, who: u32| open.posted.get(who as usize) == Some(&true);
        gone.iter().any(|who| {
            let is_missing = !self.open.get(key).is_some_and(|open| has_posted(open, *who));
            is_missing && (all_have || open.iter().any(|open| has_posted(open, *who)))
        })
    }

    /// How many rounds are open.
    pub(crate) fn open_rounds(&self) -> usize {
        self.open.len()
    }

    /// Opens a round; returns whether that ended others.
    fn begin(&mut self, participant: u32, key: &Key) -> Result<bool, CliqueError> {
        if participant >= self.participants {
            return Err(out_of_range(participant, self.participants));
        }
        let superseded: Vec<Key> = self
            .open
            .iter()
            .filter(|(old, open)| {
                old.clique == key.clique && old.attempt < key.attempt && {
                    open.missing > 0 && !open.failed || key.attempt - old.attempt >= 2
                }
            })
            .map(|(old, _)| old.clone())
            .collect();
        for old in &superseded {
            self.end(old, End::Superseded { by: participant, attempt: key.attempt });
        }
        if self.open.len() >= MAX_OPEN_ROUNDS {
            let idle = self.open.iter().filter(|(old, _)| !self.waiting.contains_key(old));
            let Some(idlest) = idle.min_by_key(|(_, open)| open.used).map(|(old, _)| old.clone()) else {
                return Err(CliqueError::Config {
                    what: format!("rounds that somebody waits in, with {key}"),
                    expected: format!("at most {MAX_OPEN_ROUNDS}"),
                    seen: (self.open.len() + 1).to_string(),
                });
            };
            self.end(&idlest, End::GivenUp);
        }
        let count = self.participants as usize;
        let open = Open {
            said: Arc::new(vec![None; count]),
            posted: vec![false; count],
            missing: self.participants,
            failed: false,
            first: participant,
            gathered: vec![false; count],
            not_gathered: self.participants,
            used: self.uses,
        };
        self.open.insert(key.clone(), open);
        Ok(!superseded.is_empty())
    }

    fn end(&mut self, key: &Key, end: End) {
        self.open.remove(key);
        if self.over.len() == MAX_REMEMBERED {
            self.over.pop_front();
        }
        self.over.push_back((key.clone(), end));
    }

    /// For a round that is not open: an error if it has been, or cannot be any more.
    fn check_not_over(&self, key: &Key) -> Result<(), CliqueError> {
        let later =
            self.open.iter().find(|(other, _)| other.clique == key.clique && other.attempt > key.attempt);
        let later = later.map(|(other, open)| End::Superseded { by: open.first, attempt: other.attempt });
        let end = self.over.iter().rev().find(|(old, _)| old == key).map(|(_, end)| *end).or(later);
        Err(match end {
            None => return Ok(()),
            Some(End::Gathered) => closed(key, "everybody has posted and gathered it already".to_owned()),
            Some(End::GivenUp) => {
                closed(key, format!("it was given up: {MAX_OPEN_ROUNDS} others were used since"))
            }
            Some(End::Superseded { by, attempt }) => superseded(key, by, attempt),
        })
    }
}

/// A round of an attempt after which somebody has begun a later one.
pub(crate) fn superseded(key: &Key, by: u32, attempt: u64) -> CliqueError {
    closed(key, format!("participant {by} has begun attempt {attempt}"))
}

/// A round that takes no more messages, and why.
pub(crate) fn closed(key: &Key, seen: String) -> CliqueError {
    CliqueError::Config { what: key.to_string(), expected: "a round that is not over".to_owned(), seen }
}

pub(crate) fn out_of_range(participant: u32, participants: u32) -> CliqueError {
    CliqueError::Config {
        what: "participant".to_owned(),
        expected: format!("below {participants}"),
        seen: participant.to_string(),
    }
}

pub(crate) fn check_participants(participants: u32) -> Result<(), CliqueError> {
    if (1..=MAX_PARTICIPANTS).contains(&participants) {
        return Ok(());
    }
    Err(CliqueError::Config {
        what: "participants".to_owned(),
        expected: format!("1 to {MAX_PARTICIPANTS}"),
        seen: participants.to_string(),
    })
}

fn unexpected(key: &Key) -> CliqueError {
    CliqueError::Config { what: key.to_string(), expected: "open".to_owned(), seen: "not open".to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(attempt: u64, phase: &str) -> Key {
        Key { clique: "c".to_owned(), attempt, phase: phase.to_owned() }
    }

    fn ok(byte: u8) -> Post {
        Post::Ok(vec![byte])
    }

    #[test]
    fn a_round_that_everybody_has_gathered_is_forgotten() {
        let mut board = Board::new(2);
        for attempt in 0..10_000 {
            let key = key(attempt, "a");
            assert!(!board.post(0, &key, ok(0)).unwrap());
            assert!(board.gather(0, &key, false).unwrap().is_none());
            assert!(board.post(1, &key, ok(1)).unwrap());
            for participant in 0..2 {
                assert_eq!(board.open_rounds(), 1);
                let said = board.gather(participant, &key, false).unwrap().unwrap();
                assert_eq!(*said, [Some(ok(0)), Some(ok(1))]);
            }
            assert_eq!(board.open_rounds(), 0);
        }
        assert_eq!(board.over.len(), MAX_REMEMBERED);
        let again = board.post(0, &key(9_999, "a"), ok(0)).unwrap_err().to_string();
        assert!(again.contains("everybody has posted and gathered it already"), "{again}");
        let again = board.gather(0, &key(9_999, "a"), false).unwrap_err().to_string();
        assert!(again.contains("everybody has posted and gathered it already"), "{again}");
    }

    #[test]
    fn a_later_attempt_ends_what_is_incomplete_and_keeps_what_is_complete() {
        let mut board = Board::new(2);
        board.post(0, &key(1, "a"), ok(0)).unwrap();
        board.post(1, &key(1, "a"), ok(1)).unwrap();
        board.post(0, &key(1, "b"), ok(0)).unwrap();
        assert!(board.post(0, &key(2, "a"), ok(0)).unwrap(), "who waits for b has to be woken");
        assert!(board.gather(1, &key(1, "a"), false).unwrap().is_some());
        for error in [
            board.gather(1, &key(1, "b"), false).unwrap_err(),
            board.post(1, &key(1, "b"), ok(1)).unwrap_err(),
            board.post(1, &key(1, "never opened"), ok(1)).unwrap_err(),
        ] {
            assert!(error.to_string().contains("participant 0 has begun attempt 2"), "{error}");
        }
        assert!(board.post(0, &key(3, "a"), ok(0)).unwrap());
        let error = board.gather(0, &key(1, "a"), false).unwrap_err().to_string();
        assert!(error.contains("participant 0 has begun attempt 3"), "{error}");
        assert_eq!(board.open_rounds(), 1);
    }

    #[test]
    fn a_failure_ends_the_wait_and_the_round_stays_for_the_rest() {
        let mut board = Board::new(3);
        board.post(0, &key(0, "a"), ok(0)).unwrap();
        assert!(board.post(1, &key(0, "a"), Post::Failed(vec![9])).unwrap());
        let said = board.gather(0, &key(0, "a"), false).unwrap().unwrap();
        assert_eq!(*said, [Some(ok(0)), Some(Post::Failed(vec![9])), None]);
        // A later failure, even of a lower participant, changes nothing: all get the first.
        board.post(2, &key(0, "a"), Post::Failed(vec![8])).unwrap();
        for participant in [1, 2] {
            assert_eq!(board.look(&key(0, "a")).unwrap().as_ref(), Some(&said));
            assert_eq!(board.gather(participant, &key(0, "a"), false).unwrap(), Some(said.clone()));
        }
        assert_eq!(board.open_rounds(), 0);
    }

    #[test]
    fn who_has_begun_an_attempt_and_gone_is_waited_for_in_vain() {
        let mut board = Board::new(3);
        let (a, b) = (key(1, "a"), key(1, "b"));
        board.post(1, &a, ok(1)).unwrap();
        // Where it has posted nobody waits for it, and who had not posted may have a successor.
        assert!(!board.waits_in_vain(&a, &[0, 1, 2]));
        assert!(board.waits_in_vain(&b, &[1]));
        assert!(!board.waits_in_vain(&b, &[0, 2]));
        // What is done for the clique, a barrier say, is of its attempt.
        let of = |clique: &str| Key { clique: clique.to_owned(), ..b.clone() };
        assert!(board.waits_in_vain(&of(&format!("{}/barrier1", b.clique)), &[1]));
        // Neither an earlier nor a later attempt is this one, nor is another clique's.
        for other in [key(0, "b"), key(2, "b"), of("d"), of(&format!("{}d", b.clique))] {
            assert!(!board.waits_in_vain(&other, &[1]), "{other}");
        }
        // A round that is over counts too.
        for participant in [0, 2] {
            board.post(participant, &a, ok(0)).unwrap();
        }
        for participant in 0..3 {
            board.gather(participant, &a, false).unwrap().unwrap();
        }
        assert_eq!(board.open_rounds(), 0);
        board.post(1, &b, ok(1)).unwrap();
        assert!(!board.waits_in_vain(&b, &[1]));
        assert!(board.waits_in_vain(&b, &[2]));
        assert!(!board.waits_in_vain(&b, &[]));
    }

    #[test]
    fn a_look_waits_for_nothing_and_counts_for_nothing() {
        let mut board = Board::new(2);
        assert_eq!(board.look(&key(0, "a")).unwrap(), None, "nobody has posted");
        board.post(0, &key(0, "a"), ok(0)).unwrap();
        assert_eq!(board.look(&key(0, "a")).unwrap(), None);
        board.post(1, &key(0, "a"), ok(1)).unwrap();
        for _ in 0..3 {
            assert_eq!(*board.look(&key(0, "a")).unwrap().unwrap(), [Some(ok(0)), Some(ok(1))]);
        }
        for participant in 0..2 {
            board.gather(participant, &key(0, "a"), false).unwrap().unwrap();
        }
        assert!(board.look(&key(0, "a")).unwrap_err().to_string().contains("gathered it already"));
    }

    #[test]
    fn wrong_use_is_named() {
        let mut board = Board::new(2);
        board.post(0, &key(0, "a"), ok(0)).unwrap();
        let error = board.post(0, &key(0, "a"), ok(7)).unwrap_err().to_string();
        assert!(error.contains("participant 0: expected one post, seen a second one"), "{error}");
        assert!(board.post(2, &key(0, "a"), ok(2)).unwrap_err().to_string().contains("below 2, seen 2"));
        assert!(board.post(2, &key(0, "b"), ok(2)).unwrap_err().to_string().contains("below 2, seen 2"));
        assert!(board.gather(2, &key(0, "a"), false).unwrap_err().to_string().contains("below 2, seen 2"));
        let said = board.gather(1, &key(0, "a"), true).unwrap().unwrap();
        assert_eq!(*said, [Some(ok(0)), None], "the second post changed nothing");
        board.post(1, &key(0, "a"), ok(1)).unwrap();
        board.gather(1, &key(0, "a"), false).unwrap();
        let error = board.gather(1, &key(0, "a"), false).unwrap_err().to_string();
        assert!(error.contains("another one"), "{error}");
    }

    #[test]
    fn of_rounds_that_nobody_ends_the_one_used_longest_ago_goes() {
        let mut board = Board::new(2);
        let name = |number: usize| key(0, &number.to_string());
        board.begin_wait(&name(0));
        for number in 0..MAX_OPEN_ROUNDS {
            board.post(0, &name(number), ok(0)).unwrap();
        }
        assert!(board.gather(1, &name(1), true).unwrap().is_some());
        board.post(0, &key(0, "one more"), ok(0)).unwrap();
        assert_eq!(board.open_rounds(), MAX_OPEN_ROUNDS);
        // Somebody waits in 0, and 1 was gathered a moment ago.
        for kept in [0, 1, 3] {
            board.post(1, &name(kept), ok(1)).unwrap();
        }
        let error = board.post(1, &name(2), ok(1)).unwrap_err().to_string();
        assert!(error.contains("given up: 1024 others were used since"), "{error}");
        // If somebody waits in each, there is no room.
        let keys: Vec<Key> = board.open.keys().cloned().collect();
        keys.iter().for_each(|key| board.begin_wait(key));
        let error = board.post(0, &key(0, "no room"), ok(0)).unwrap_err().to_string();
        assert!(error.contains("at most 1024, seen 1025"), "{error}");
        keys.iter().for_each(|key| board.end_wait(key));
        board.end_wait(&name(0));
        assert!(board.waiting.is_empty());
        board.post(0, &key(0, "room"), ok(0)).unwrap();
    }
}
