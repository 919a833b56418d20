//! What lands, and when.

use crate::conformance::Fixture;
use crate::conformance::agent::DRIVE_LIMITS;
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
        // Now on many lanes.
        let mut way = rig.way(64, 64)?;
        let mut random = Random::new(4);
        let mut ops = Vec::new();
        for at in 0..1_000 {
            let put = (random.below(3) == 0).then_some((0, 0, 1 + random.below(60)));
            let by = 1 + random.below(1 << 28);
            ops.push(way.op(at % 64, put, if put.is_some() { 1 } else { by }, false));
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
        let mut ways = [rig.way(3, 100_003)?, rig.way_back(3, 100_003)?];
        for round in 0..4 {
            ways[0].refill(&rig.a, &rig.b, 2 * round + 1)?;
            ways[1].refill(&rig.b, &rig.a, 2 * round + 2)?;
            let mut ops = || random_lens(&mut random, 100, 11);
            let (there, back) = (ops(), ops());
            let ops = [ways[0].random_ops(&mut random, &there), ways[1].random_ops(&mut random, &back)];
            both_ways(rig, &ops, [rig.plan(), rig.plan()])?;
            compare(rig, &ways[..1], &ways[1..])?;
        }
        // The first byte, the last byte, and all of it.
        let len = ways[0].destination.len_bytes;
        let ranges = [(0, 0, 1), (len - 1, len - 1, 1), (0, len - 1, 1), (0, 0, len)];
        for (round, range) in ranges.into_iter().enumerate() {
            ways[0].refill(&rig.a, &rig.b, 100 + round as u64)?;
            let mut ops = vec![ways[0].op(0, Some(range), 1, true)];
            ops.extend(ways[0].last_ops());
            both_ways(rig, &[ops, Vec::new()], [rig.plan(), rig.plan()])?;
            compare(rig, &ways[..1], &ways[1..])?;
        }
        Ok(())
    })
}

/// All sentences together: both ways, between two memories each, all kinds of ops, in random order and portions.
pub fn random_ops(fixture: &dyn Fixture) -> Outcome {
    const SEED: u64 = 0x5eed;
    check(fixture, |rig| {
        let mut random = Random::new(SEED);
        let mut there = [rig.way(4, 500_000)?, rig.way(4, 500_001)?];
        let mut back = [rig.way_back(4, 500_002)?, rig.way_back(4, 500_003)?];
        for round in 0..6 {
            let mut side = |from: &Side, to: &Side, ways: &mut [Way; 2], first: u64| -> Checked<_> {
                let mut ops = [Vec::new(), Vec::new()];
                for (at, way) in ways.iter_mut().enumerate() {
                    way.refill(from, to, first + at as u64)?;
                    let lens = random_lens(&mut random, 150, 15);
                    ops[at] = way.random_ops(&mut random, &lens);
                }
                let plan = Plan {
                    submits_a_kick: 1 + random.below(64),
                    room: 1 + random.below(64),
                    polls_after: 3,
                    ..rig.plan()
                };
                Ok((interleave(&mut random, ops), plan))
            };
            let (there_ops, there_plan) = side(&rig.a, &rig.b, &mut there, 4 * round + 1)?;
            let (back_ops, back_plan) = side(&rig.b, &rig.a, &mut back, 4 * round + 3)?;
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

/// Both in one, each in its own order.
fn interleave(random: &mut Random, ops: [Vec<Op>; 2]) -> Vec<Op> {
    let mut rest = ops.map(Vec::into_iter);
    let mut both = Vec::new();
    loop {
        let first = random.below(2) as usize;
        match rest[first].next().or_else(|| rest[1 - first].next()) {
            Some(op) => both.push(op),
            None => return both,
        }
    }
}

/// Drives both ports at the same time: A the first ops, B the second.
fn both_ways(rig: &Rig, ops: &[Vec<Op>; 2], plans: [Plan; 2]) -> Checked<()> {
    let sides = [&rig.a, &rig.b];
    for ((side, ops), plan) in sides.iter().zip(ops).zip(plans) {
        side.begin(Command::Drive { ops: ops.clone(), plan })?;
    }
    let finish = |side: &Side, ops| match side.finish(DRIVE_LIMITS * rig.limits.wait)? {
        Reply::Driven { driven } => each_completes_once(side, ops, &driven, rig.limits.wait),
        other => Err(side.failure("an answer to the command", format!("{other:?}"))),
    };
    let [a, b] = [finish(&rig.a, &ops[0]), finish(&rig.b, &ops[1])];
    a.and(b)
}

/// Waits for the last signals, then compares all memories.
fn compare(rig: &Rig, there: &[Way], back: &[Way]) -> Checked<()> {
    for (ways, from, to) in [(there, &rig.a, &rig.b), (back, &rig.b, &rig.a)] {
        to.watch(ways.iter().flat_map(Way::tracks).collect())?;
        rig.all_seen(to)?;
        for way in ways {
            to.verify("the destination", &way.destination, way.base_seed, &way.pieces())?;
            from.verify("the source", &way.source, way.source_seed, &[])?;
        }
    }
    Ok(())
}
