//! [`Answers`]: what was said in a round, as bytes. However many gather a round, they share one answer: with one each, memory
//! would grow with the square of the participants.

use std::sync::Arc;

use crate::rendezvous::Post;
use crate::rendezvous::tcp::seats::Seats;
use crate::rendezvous::wire::encode_gathered;

/// The last answer, if somebody may want the same.
#[derive(Debug, Default)]
pub(super) struct Answers(Option<Answer>);

#[derive(Debug)]
struct Answer {
    said: Arc<Vec<Option<Post>>>,
    /// With gaps it also says where those are who are missing.
    seats_seen: Option<u64>,
    bytes: Arc<Vec<u8>>,
}

impl Answers {
    pub(super) fn encode(&mut self, said: Arc<Vec<Option<Post>>>, seats: &Seats) -> Arc<Vec<u8>> {
        let seats_seen = said.iter().any(Option::is_none).then(|| seats.changes());
        if let Some(last) = &self.0 {
            if Arc::ptr_eq(&last.said, &said) && last.seats_seen == seats_seen {
                return last.bytes.clone();
            }
        }
        let missing: Vec<String> = said
            .iter()
            .zip(0..)
            .map(|(post, participant)| match post {
                Some(_) => String::new(),
                None => seats.whereabouts(participant),
            })
            .collect();
        let each = said.iter().zip(&missing).map(|(post, missing)| post.as_ref().ok_or(missing));
        let bytes = Arc::new(encode_gathered(said.len(), each));
        self.0 = Some(Answer { said, seats_seen, bytes: bytes.clone() });
        bytes
    }

    /// A post has come, so that an answer with gaps may not be given again.
    pub(super) fn forget_gaps(&mut self) {
        self.0 = self.0.take().filter(|answer| answer.seats_seen.is_none());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::board::{Board, Key};

    #[test]
    fn those_who_gather_a_round_share_one_answer() {
        let (mut answers, mut seats, mut board) = (Answers::default(), Seats::new(2), Board::new(2));
        let complete = Arc::new(vec![Some(Post::Ok(vec![1])), Some(Post::Ok(vec![2]))]);
        let gaps = Arc::new(vec![Some(Post::Ok(vec![1])), None]);
        for said in [&complete, &gaps] {
            let first = answers.encode(said.clone(), &seats);
            assert!(Arc::ptr_eq(&first, &answers.encode(said.clone(), &seats)));
        }
        // So do those who gather one that nobody has posted to.
        let key = Key { clique: "c".to_owned(), attempt: 0, phase: "p".to_owned() };
        let (once, again) = [(); 2].map(|()| board.gather(0, &key, true).unwrap().unwrap()).into();
        let first = answers.encode(once, &seats);
        assert!(Arc::ptr_eq(&first, &answers.encode(again, &seats)));
        // With gaps it says where those are who are missing, and that may change.
        let before = answers.encode(gaps.clone(), &seats);
        seats.goodbye(1);
        assert!(!Arc::ptr_eq(&before, &answers.encode(gaps, &seats)));
    }
}
