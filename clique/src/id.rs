//! [`UniqueIds`]: made for one attempt, used once.

use crate::CliqueError;
use crate::backend::{Backend, ID_BYTES};
use crate::environment::fingerprint;
use crate::message::IdMessage;
use crate::rendezvous::Round;
use crate::verify::Seat;

/// Above this many ranks a library that can take several ids gets one for each such number of ranks.
const RANKS_PER_ID: u32 = 128;

/// The unique ids of one attempt. No clone and no way to look inside: initialisation takes them, and they are gone.
#[derive(Debug)]
pub(crate) struct UniqueIds(Vec<[u8; ID_BYTES]>);

/// How the ids of an attempt are shared out.
#[derive(Debug)]
pub(crate) struct IdPlan {
    /// Stands for the clique's name, the attempt and the members.
    key: u64,
    /// Which participant makes each id.
    makers: Vec<u32>,
}

impl IdPlan {
    pub(crate) fn new(round: &Round, seats: &[Seat], several: bool) -> Self {
        let size = seats.len() as u32;
        let count = if several { size.div_ceil(RANKS_PER_ID).max(1) } else { 1 };
        let maker = |index: u32| {
            let rank = u64::from(index) * u64::from(size) / u64::from(count);
            seats.get(rank as usize).map_or(0, |seat| seat.participant)
        };
        IdPlan { key: key(round, seats), makers: (0..count).map(maker).collect() }
    }

    /// Makes the ids that are this participant's to make. The participant of rank 0 makes the first.
    pub(crate) fn make(&self, participant: u32, backend: &dyn Backend) -> Result<IdMessage, CliqueError> {
        let mut ids = Vec::new();
        for (index, maker) in (0..).zip(&self.makers) {
            if *maker == participant {
                ids.push((index, backend.unique_id()?));
            }
        }
        Ok(IdMessage { key: self.key, ids })
    }

    /// Puts the ids together from what the participants sent, in their order.
    ///
    /// # Errors
    /// Ids of another attempt or other members; one from the wrong participant; one twice or not at all.
    pub(crate) fn collect(&self, messages: &[(String, IdMessage)]) -> Result<UniqueIds, CliqueError> {
        let mut ids = vec![None; self.makers.len()];
        for (participant, (peer, message)) in (0u32..).zip(messages) {
            let wrong = |what, expected: String, seen: String| {
                Err(CliqueError::Foreign { peer: peer.clone(), what, expected, seen })
            };
            if message.key != self.key {
                return wrong(
                    "key of unique ids",
                    format!("{:016x}", self.key),
                    format!("{:016x}", message.key),
                );
            }
            for (index, id) in &message.ids {
                let slot = self.makers.get(*index as usize).zip(ids.get_mut(*index as usize));
                match slot {
                    Some((maker, slot @ None)) if *maker == participant => *slot = Some(*id),
                    _ => {
                        let expected = format!("ids by the participants {:?}, each once", self.makers);
                        return wrong(
                            "unique id",
                            expected,
                            format!("id {index} by participant {participant}"),
                        );
                    }
                }
            }
        }
        match ids.iter().position(Option::is_none) {
            None => Ok(UniqueIds(ids.into_iter().flatten().collect())),
            Some(index) => Err(CliqueError::Foreign {
                peer: format!("participant {}", self.makers[index]),
                what: "unique ids",
                expected: format!("id {index}"),
                seen: "none".to_owned(),
            }),
        }
    }
}

impl UniqueIds {
    /// For the one call that they are for.
    pub(crate) fn into_raw(self) -> Vec<[u8; ID_BYTES]> {
        self.0
    }
}

fn key(round: &Round, seats: &[Seat]) -> u64 {
    let attempt = round.attempt.to_le_bytes();
    let head = [round.clique.as_bytes(), attempt.as_slice()];
    fingerprint(
        head.into_iter().chain(seats.iter().flat_map(|seat| [seat.process.as_bytes(), seat.uuid.as_bytes()])),
    )
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::software::{Fabric, Software};

    fn seats(participants: &[u32]) -> Vec<Seat> {
        let seat = |(rank, participant): (usize, &u32)| Seat {
            participant: *participant,
            process: format!("node:{participant}"),
            uuid: format!("GPU-{rank}"),
        };
        participants.iter().enumerate().map(seat).collect()
    }

    fn round(clique: &str, attempt: u64) -> Round {
        Round { clique: clique.to_owned(), attempt, phase: "ids" }
    }

    #[test]
    fn the_key_is_of_name_attempt_and_members() {
        let base = key(&round("a", 0), &seats(&[0, 0, 1]));
        assert_eq!(base, key(&round("a", 0), &seats(&[0, 0, 1])));
        for other in [
            key(&round("b", 0), &seats(&[0, 0, 1])),
            key(&round("a", 1), &seats(&[0, 0, 1])),
            key(&round("a", 0), &seats(&[0, 1, 1])),
            key(&round("a", 0), &seats(&[0, 0])),
        ] {
            assert_ne!(base, other);
        }
    }

    #[test]
    fn several_ids_above_128_ranks_if_the_library_can() {
        let participants: Vec<u32> = (0..300).map(|rank| rank / 8).collect();
        let one = IdPlan::new(&round("a", 0), &seats(&participants), false);
        assert_eq!(one.makers, [0]);
        let three = IdPlan::new(&round("a", 0), &seats(&participants), true);
        assert_eq!(three.makers, [0, 100 / 8, 200 / 8]);
        assert_eq!(IdPlan::new(&round("a", 0), &seats(&participants[..128]), true).makers, [0]);
    }

    #[test]
    fn ids_of_others_are_refused() {
        let backend = Software::new(&Fabric::new(2));
        let plan = IdPlan::new(&round("a", 0), &seats(&[1, 0]), false);
        assert_eq!(plan.makers, [1], "the participant of rank 0");
        let (other, own) = (plan.make(0, &backend).unwrap(), plan.make(1, &backend).unwrap());
        assert!(other.ids.is_empty());
        let named = |messages: Vec<IdMessage>| -> Vec<_> {
            messages
                .into_iter()
                .enumerate()
                .map(|(n, message)| (format!("participant {n}"), message))
                .collect()
        };
        assert!(plan.collect(&named(vec![other.clone(), own.clone()])).is_ok());
        let says = |messages| plan.collect(&named(messages)).unwrap_err().to_string();
        let wrong_maker = says(vec![own.clone(), other.clone()]);
        assert!(wrong_maker.contains("id 0 by participant 0"), "{wrong_maker}");
        let none = says(vec![other.clone(), other.clone()]);
        assert!(none.contains("expected id 0, seen none"), "{none}");
        let stale = IdPlan::new(&round("a", 1), &seats(&[1, 0]), false).make(1, &backend).unwrap();
        let stale = says(vec![other.clone(), stale]);
        assert!(stale.contains("key of unique ids"), "{stale}");
        let mut twice = own.clone();
        twice.ids.push(own.ids[0]);
        let twice = says(vec![other, twice]);
        assert!(twice.contains("each once"), "{twice}");
    }
}
