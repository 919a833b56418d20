//! Whole cliques over each rendezvous, and what they leave in it.

mod meeting;

use std::sync::Arc;
use std::time::{Duration, Instant};

use meeting::{KINDS, PATIENCE, meet};
use portway_clique::backend::{DataType, ReduceOp};
use portway_clique::rendezvous::{Hub, Rendezvous};
use portway_clique::software::{Fabric, Software};
use portway_clique::{Clique, FirstUse};

/// Brings up a clique of two participants with two ranks each.
fn bring_up(places: &[Arc<dyn Rendezvous>], name: &str, attempt: u64) -> Vec<Clique> {
    let fabric = Fabric::new(4);
    std::thread::scope(|scope| {
        let coming: Vec<_> = (0..2u32)
            .map(|participant| {
                let (place, backend) =
                    (places[participant as usize].clone(), Arc::new(Software::new(&fabric)));
                scope.spawn(move || {
                    let first =
                        FirstUse::default().all_reduce(DataType::I32, ReduceOp::Sum).large_bytes(4096);
                    let builder = Clique::builder(name, 4).attempt(attempt).first_use(first);
                    let builder = [0, 1].iter().fold(builder, |builder, rank| {
                        builder.local(participant * 2 + rank, participant * 2 + rank)
                    });
                    builder.heartbeat(Duration::from_millis(5)).bring_up(backend, place, PATIENCE)
                })
            })
            .collect();
        coming.into_iter().map(|one| one.join().unwrap().unwrap()).collect()
    })
}

fn close(cliques: Vec<Clique>) {
    std::thread::scope(|scope| {
        for clique in cliques {
            scope.spawn(move || clique.close(PATIENCE).unwrap());
        }
    });
}

#[test]
fn a_clique_comes_up_over_each_rendezvous_again_and_again() {
    for kind in KINDS {
        let places = meet(kind, 2);
        for attempt in 0..3 {
            close(bring_up(&places, "test", attempt));
        }
    }
}

/// One that has failed goes on to the next attempt before the others have heard why.
#[test]
fn the_next_attempt_hides_no_failure_of_the_last_one() {
    for kind in KINDS {
        let places = meet(kind, 2);
        let [here, there] = <[Clique; 2]>::try_from(bring_up(&places, "test", 0)).unwrap();
        there.abort();
        let backend = Arc::new(Software::new(&Fabric::new(1)));
        let next = Clique::builder("test", 2).attempt(1).local(1, 0);
        next.bring_up(backend, places[1].clone(), Duration::from_millis(50)).map(drop).unwrap_err();
        let began = Instant::now();
        while here.end().is_none() {
            assert!(began.elapsed() < PATIENCE, "{kind:?}: waited {PATIENCE:?} for the end, seen none");
            std::thread::sleep(Duration::from_millis(1));
        }
        let end = here.end().unwrap().to_string();
        assert!(end.contains("aborted its clique"), "{kind:?}: {end}");
    }
}

/// A rendezvous keeps what somebody has not posted or gathered, up to a limit.
#[test]
fn cliques_that_are_closed_leave_no_rounds_and_others_few() {
    let hub = Hub::new(2).unwrap();
    let places: Vec<Arc<dyn Rendezvous>> = (0..2).map(|one| Arc::new(hub.join(one).unwrap()) as _).collect();
    for number in 0..20 {
        close(bring_up(&places, &format!("closed {number}"), 0));
    }
    assert_eq!(hub.open_rounds(), 0);
    for number in 0..20 {
        for clique in bring_up(&places, &format!("aborted {number}"), 0) {
            clique.abort();
        }
        drop(bring_up(&places, &format!("dropped {number}"), 0));
    }
    let left = hub.open_rounds();
    println!("{left} rounds after 20 that were aborted and 20 that were dropped");
    assert!(left <= 40, "more than the round in which a clique's end is told");
}
