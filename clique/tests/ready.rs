//! A clique that comes up, and what can be done with it.

#[path = "support/cliques.rs"]
#[allow(dead_code, reason = "each test program uses some of it")]
mod cliques;

use std::time::Duration;

use cliques::{Job, PATIENT, each};
use portway_clique::backend::{DataType, ReduceOp};
use portway_clique::software::Live;
use portway_clique::{Clique, CliqueError, FirstUse, Member};

fn all_members(cliques: &mut [Clique]) -> Vec<Member> {
    cliques.iter_mut().flat_map(Clique::members).collect()
}

/// An all-reduce of one number a rank, on each member's own thread.
fn sum(members: Vec<Member>) -> Vec<(Member, Result<i64, CliqueError>)> {
    each(PATIENT, members, |_, mut member| {
        let mut run = || {
            let mut buffers = member.buffers(64)?;
            buffers.write(&(i64::from(member.rank()) + 1).to_le_bytes())?;
            member.all_reduce(&mut buffers, 1, DataType::I64, ReduceOp::Sum)?;
            member.wait(&mut buffers, PATIENT)?;
            let mut result = [0; 8];
            buffers.read(&mut result)?;
            Ok(i64::from_le_bytes(result))
        };
        let result = run();
        (member, result)
    })
}

fn close(cliques: Vec<Clique>) {
    for closed in each(PATIENT, cliques, |_, clique| clique.close(PATIENT)) {
        assert!(closed.unwrap().everybody);
    }
}

#[test]
fn threads_processes_and_mixtures() {
    for ranks in [&[1][..], &[2], &[1, 1], &[4], &[2, 2], &[1, 3], &[1, 1, 1, 1]] {
        let job = Job::new(ranks);
        let mut cliques = job.up(0);
        let size = i64::from(job.size());
        let members = sum(all_members(&mut cliques));
        for (_, result) in &members {
            assert_eq!(*result.as_ref().unwrap(), size * (size + 1) / 2, "{ranks:?}");
        }
        drop(members);
        close(cliques);
        assert_eq!(job.fabric.live(), Live::default(), "{ranks:?}");
    }
}
