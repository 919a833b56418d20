use super::*;
use crate::backend::{CommConfig, DataType, ReduceOp};
use crate::message::Local;

/// Four ranks, two a participant, that agree.
fn hellos() -> Vec<Hello> {
    let hello = |participant: u32| Hello {
        size: 4,
        process: format!("node:{participant}"),
        library: "NCCL 2.28.3".to_owned(),
        library_version: 22803,
        several_ids: true,
        config: CommConfig::default(),
        large_bytes: 4096,
        locals: (2 * participant..2 * participant + 2)
            .map(|rank| Local { rank, uuid: format!("GPU-{rank}") })
            .collect(),
        uses: Vec::new(),
        environment: vec![("NCCL_ALGO".to_owned(), "Ring".to_owned())],
        hardware: vec![("NCCL_IB_HCA".to_owned(), format!("mlx5_{participant}"))],
    };
    vec![hello(0), hello(1)]
}

fn says(hellos: &[Hello]) -> String {
    verdict(hellos).unwrap_err().to_string()
}

#[test]
fn those_that_agree() {
    let agreement = verdict(&hellos()).unwrap();
    assert_eq!(agreement.seats.len(), 4);
    assert_eq!(agreement.seats[2].participant, 1);
    assert_eq!(agreement.seats[3].uuid, "GPU-3");
    // Hosts call their adapters differently: that is told, and no difference.
    assert_eq!(agreement.hardware, ["NCCL_IB_HCA=\"mlx5_0\" (node:0)", "NCCL_IB_HCA=\"mlx5_1\" (node:1)"]);
}

#[test]
fn a_size_names_rank_process_and_value() {
    let mut all = hellos();
    all[1].size = 5;
    assert_eq!(says(&all), "size of rank 2 (node:1): expected 4, seen 5");
}

/// Of three the two that are alike are right.
#[test]
fn the_one_that_differs_is_named() {
    let mut all = hellos();
    all[0].locals.truncate(1);
    all[1].locals = vec![Local { rank: 1, uuid: "GPU-1".to_owned() }];
    let mut third = all[1].clone();
    third.locals = [2, 3].map(|rank| Local { rank, uuid: format!("GPU-{rank}") }).to_vec();
    third.process = "node:2".to_owned();
    all.push(third);
    verdict(&all).unwrap();
    all[0].library_version = 22707;
    assert_eq!(says(&all), "library version of rank 0 (node:0): expected 22803, seen 22707");
}

#[test]
fn a_rank_taken_twice_and_one_by_nobody() {
    let mut all = hellos();
    all[1].locals[0].rank = 1;
    assert_eq!(
        says(&all),
        "rank of rank 1 (node:1): expected this rank once, at node:0, seen once more; \
         rank of rank 2 (nobody): expected a participant that has it, seen none"
    );
}

#[test]
fn a_rank_beyond_the_size() {
    let mut all = hellos();
    all[1].locals[1].rank = 9;
    let text = says(&all);
    assert!(text.starts_with("rank of rank 9 (node:1): expected below 4, seen 9"), "{text}");
}

/// A size that is wrong by far is one difference, not as many as there are ranks.
#[test]
fn a_size_of_four_thousand_million() {
    let mut all = hellos();
    all.iter_mut().for_each(|hello| hello.size = u32::MAX);
    let disagreement = verdict(&all).unwrap_err();
    assert_eq!(disagreement.total, 1, "{disagreement}");
    assert_eq!(disagreement.differences[0].rank, Some(4));
}

/// Two numbers in two processes can mean one device: the UUID tells.
#[test]
fn a_device_used_twice() {
    let mut all = hellos();
    all[1].locals[1].uuid = "GPU-0".to_owned();
    assert_eq!(
        says(&all),
        "device of rank 3 (node:1): expected a device of its own; rank 0 (node:0) has this one, seen GPU-0"
    );
}

#[test]
fn configuration_and_environment() {
    let mut all = hellos();
    all[1].config.max_ctas = Some(8);
    assert!(says(&all).contains("configuration of rank 2 (node:1)"), "{}", says(&all));
    let mut all = hellos();
    all[1].environment[0].1 = "Tree".to_owned();
    assert_eq!(
        says(&all),
        "environment variable NCCL_ALGO of rank 2 (node:1): expected \"Ring\", seen \"Tree\""
    );
    all[1].environment.clear();
    assert_eq!(
        says(&all),
        "environment variable NCCL_ALGO of rank 2 (node:1): expected \"Ring\", seen not set"
    );
    let mut all = hellos();
    all[0].large_bytes = 1;
    all[1].several_ids = false;
    let text = says(&all);
    assert!(text.contains("large size") && text.contains("number of unique ids"), "{text}");
}

#[test]
fn what_anybody_declares_is_run_by_all() {
    let mut all = hellos();
    let sum = Use::AllReduce { data_type: DataType::F32, op: ReduceOp::Sum };
    all[0].uses = vec![Use::Peers { from: 3, to: 0 }, sum];
    all[1].uses = vec![sum, Use::AllGather];
    let uses = verdict(&all).unwrap().uses;
    assert_eq!(uses, [sum, Use::AllGather, Use::Peers { from: 3, to: 0 }]);
    for (from, to) in [(4, 0), (0, 4), (1, 1)] {
        all[0].uses = vec![Use::Peers { from, to }];
        assert!(says(&all).contains("declared peers of rank 0 (node:0)"), "{}", says(&all));
    }
}

/// The verdict comes from the messages alone, and names at most 16 of what it counts.
#[test]
fn many_differences() {
    let mut all = hellos();
    for index in 0..40 {
        all[1].environment.push((format!("NCCL_{index:02}"), "1".to_owned()));
    }
    let disagreement = verdict(&all).unwrap_err();
    assert_eq!((disagreement.differences.len(), disagreement.total), (16, 40));
    assert!(disagreement.to_string().ends_with("; and 24 more"), "{disagreement}");
    assert_eq!(verdict(&all.clone()).unwrap_err(), disagreement);
}

#[test]
fn a_participant_without_ranks() {
    let mut all = hellos();
    let mut third = all[0].clone();
    third.locals.clear();
    third.process = "node:2".to_owned();
    all.push(third);
    assert_eq!(says(&all), "number of local ranks of node:2: expected at least 1, seen 0");
}
