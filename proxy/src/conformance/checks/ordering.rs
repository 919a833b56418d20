//! What lands, and when.

use crate::conformance::Fixture;
use crate::conformance::command::{Command, Plan, Reply};
use crate::conformance::pattern::Random;
use crate::conformance::report::{Failure, Outcome};
use crate::conformance::rig::{Rig, Way, check, each_completes_once};
use crate::conformance::side::{Checked, Side};
use crate::transport::Op;

/// Around every size at which a copy or a packet may be cut.
const LENS_BYTES: [u64; 18] = [
    1,
    2,
    3,
    7,
    8,
    9,
    63,
    64,
    65,
    255,
    4_095,
    4_096,
    4_097,
    65_535,
    65_536,
    65_537,
    (1 << 20) + 13,
    (3 << 20) + 1,
];

/// Lengths up to `1 << bits`, as many short ones as long ones.
fn random_lens(random: &mut Random, count: usize, bits: u64) -> Vec<u64> {
    let mut len = || {
        let limit = 1 << random.below(bits + 1);
        1 + random.below(limit)
    };
    (0..count).map(|_| len()).collect()
}

/// Sentence 3.
pub fn signals_stay_behind_data(fixture: &dyn Fixture) -> Outcome {
    check(fixture, |rig| {
        let mut random = Random::new(3);
        let mut way = rig.way(4, 64 << 10)?;
        for round in 1..=3 {
            way.refill(&rig.a, &rig.b, round)?;
            let lens = random_lens(&mut random, 30, 11);
            let ops = way.random_ops(&mut random, &lens);
            rig.b.watch(way.tracks())?;
            rig.lockstep(&ops)?;
        }
        for round in 4..=6 {
            way.refill(&rig.a, &rig.b, round)?;
            let lens = random_lens(&mut random, 200, 11);
            let ops = way.random_ops(&mut random, &lens);
            rig.b.watch(way.tracks())?;
            rig.side_by_side(&ops)?;
        }
        Ok(())
    })
}

/// Sentence 3, with every size. The offsets are odd, so most of these are aligned differently at both ends.
pub fn signals_stay_behind_long_puts(fixture: &dyn Fixture) -> Outcome {
    check(fixture, |rig| {
        let mut random = Random::new(33);
        let mut way = rig.way(2, 6 << 20)?;
        for round in 1..=2 {
            way.refill(&rig.a, &rig.b, round)?;
            let ops = way.random_ops(&mut random, &LENS_BYTES);
            rig.b.watch(way.tracks())?;
            rig.side_by_side(&ops)?;
        }
        Ok(())
    })
}

/// Sentence 4.
pub fn signals_arrive_as_written(fixture: &dyn Fixture) -> Outcome {
    check(fixture, |rig| {
        let mut way = rig.way(2, 64)?;
        // Every width, over the end and around; then so many that some are on their way at once.
        let steps =
            [1, 1, 1, 1, 1, 2, 250, 1 << 16, 1 << 28, 1 << 33, 1 << 62, 1 << 62, 1 << 62, 1 << 62, 1, 1];
        let ops: Vec<_> = (0..2 * steps.len()).map(|at| way.op(at % 2, None, steps[at / 2], false)).collect();
        rig.b.watch(way.tracks())?;
        rig.lockstep(&ops)?;
        let mut random = Random::new(4);
        let mut ops = Vec::new();
        for at in 0..600 {
            let put = (random.below(3) == 0).then_some((0, 0, 1 + random.below(60)));
            let by = 1 + random.below(1 << 28);
            ops.push(way.op(at % 2, put, if put.is_some() { 1 } else { by }, false));
        }
        // These puts overlap, and only the signals are of interest.
        way.forget_puts();
        rig.b.watch(way.tracks())?;
        rig.side_by_side(&ops)?;
        Ok(())
    })
}

/// Sentence 8, first half.
pub fn nothing_else_is_written(fixture: &dyn Fixture) -> Outcome {
    check(fixture, |rig| {
        let mut random = Random::new(8);
        let mut there = rig.way(3, 200_003)?;
        let mut back = rig.way_back(3, 200_003)?;
        for round in 0..4 {
            there.refill(&rig.a, &rig.b, 2 * round + 1)?;
            back.refill(&rig.b, &rig.a, 2 * round + 2)?;
            let lens = random_lens(&mut random, 100, 11);
            let ops = [there.random_ops(&mut random, &lens), back.random_ops(&mut random, &lens)];
            both_ways(rig, &ops, [rig.plan(), rig.plan()])?;
            compare(rig, &there, &back)?;
        }
        // The first byte, the last byte, and all of it.
        let len = there.destination.len_bytes;
        for (round, range) in
            [(0, 0, 1), (len - 1, len - 1, 1), (0, len - 1, 1), (0, 0, len)].into_iter().enumerate()
        {
            there.refill(&rig.a, &rig.b, 100 + round as u64)?;
            let mut ops = vec![there.op(0, Some(range), 1, true)];
            ops.extend(there.last_ops());
            both_ways(rig, &[ops, Vec::new()], [rig.plan(), rig.plan()])?;
            compare(rig, &there, &back)?;
        }
        Ok(())
    })
}

/// All sentences together: both ways, all kinds of ops, all sizes, in random order with random portions.
pub fn random_ops(fixture: &dyn Fixture) -> Outcome {
    const SEED: u64 = 0x5eed;
    check(fixture, |rig| {
        let mut random = Random::new(SEED);
        let mut there = rig.way(8, 1 << 20)?;
        let mut back = rig.way_back(8, 1 << 20)?;
        for round in 0..6 {
            there.refill(&rig.a, &rig.b, 2 * round + 1)?;
            back.refill(&rig.b, &rig.a, 2 * round + 2)?;
            let mut side = |way: &mut Way| {
                let lens = random_lens(&mut random, 300, 15);
                let plan = Plan {
                    submits_a_kick: 1 + random.below(64),
                    room: 1 + random.below(64),
                    polls_after: 3,
                    ..rig.plan()
                };
                (way.random_ops(&mut random, &lens), plan)
            };
            let (there_ops, there_plan) = side(&mut there);
            let (back_ops, back_plan) = side(&mut back);
            both_ways(rig, &[there_ops, back_ops], [there_plan, back_plan])
                .and_then(|()| compare(rig, &there, &back))
                .map_err(|failure| Failure {
                    seen: format!("{} (seed {SEED:#x}, round {round})", failure.seen),
                    ..failure
                })?;
        }
        Ok(())
    })
}

/// Drives both ports at the same time: A the first ops, B the second.
fn both_ways(rig: &Rig, ops: &[Vec<Op>; 2], plans: [Plan; 2]) -> Checked<()> {
    let sides = [&rig.a, &rig.b];
    for ((side, ops), plan) in sides.iter().zip(ops).zip(plans) {
        side.begin(Command::Drive { ops: ops.clone(), plan })?;
    }
    let finish = |side: &Side, ops| match side.finish(rig.limits.wait)? {
        Reply::Driven { driven } => each_completes_once(side, ops, &driven, rig.limits.wait),
        other => Err(side.failure("an answer to the command", format!("{other:?}"))),
    };
    let [a, b] = [finish(&rig.a, &ops[0]), finish(&rig.b, &ops[1])];
    a.and(b)
}

/// Waits for the last signals, then compares all memories.
fn compare(rig: &Rig, there: &Way, back: &Way) -> Checked<()> {
    rig.b.watch(there.tracks())?;
    rig.all_seen(&rig.b)?;
    rig.a.watch(back.tracks())?;
    rig.all_seen(&rig.a)?;
    for (way, from, to) in [(there, &rig.a, &rig.b), (back, &rig.b, &rig.a)] {
        to.verify("the destination", &way.destination, way.base_seed, &way.pieces())?;
        from.verify("the source", &way.source, way.source_seed, &[])?;
    }
    Ok(())
}
