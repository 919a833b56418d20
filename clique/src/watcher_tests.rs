use std::sync::Arc;
use std::time::Duration;

use super::Beat;
use crate::backend::{LocalRank, RawComm};
use crate::group::Plan;
use crate::life::Life;
use crate::owner::LOST_COMMAND;
use crate::rendezvous::Hub;
use crate::rounds::Rounds;
use crate::software::{Fabric, Software};
use crate::team::Team;

/// A clique whose owner has not made a communicator.
fn team() -> Team {
    let rendezvous = Arc::new(Hub::new(1).unwrap().join(0).unwrap());
    let rounds = Rounds { rendezvous, clique: "test".to_owned(), attempt: 0, who: None };
    let backend = Arc::new(Software::new(&Fabric::new(1)));
    let life = Arc::new(Life::new(backend, rounds, "here".to_owned(), 1).unwrap());
    let locals = vec![LocalRank { rank: 0, device: 0 }];
    let plan = Plan { size: 1, locals, uses: Vec::new(), large_bytes: 0 };
    Team::new(life, &plan, vec![RawComm::NULL], Vec::new(), Duration::from_secs(20), Duration::from_secs(20))
}

/// An owner that is gone, though the clique has not ended, is no reason to stop asking and to say nothing.
#[test]
fn a_lost_owner_ends_the_clique() {
    let team = team();
    team.life.owner.close();
    assert!(!Beat::new(&team).again());
    let end = team.life.end().expect("an end").to_string();
    assert!(end.contains(LOST_COMMAND), "{end}");
}

/// The control: after an end the owner is gone as well, and the end stays.
#[test]
fn an_owner_that_has_ended_with_the_clique_changes_nothing() {
    let team = team();
    let mut beat = Beat::new(&team);
    team.life.end_by_itself("aborted", "a test");
    assert!(!beat.again() && !beat.hear_library_anew());
    let end = team.life.end().expect("an end").to_string();
    assert!(end.contains("is aborted"), "{end}");
}

impl Beat {
    /// Asks the library and hears it, as if the clique had ended in between.
    fn hear_library_anew(&mut self) -> bool {
        self.library = Some(super::Asked::now(self.ask_library()));
        self.hear_library()
    }
}
