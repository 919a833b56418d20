//! What a completion means, and that it comes.

use crate::conformance::Fixture;
use crate::conformance::command::{Command, Plan};
use crate::conformance::pattern::{Piece, Random};
use crate::conformance::report::Outcome;
use crate::conformance::rig::{check, each_completes_once};
use crate::transport::{Completion, Op};

/// Sentence 5.
pub fn every_op_completes_once(fixture: &dyn Fixture) -> Outcome {
    check(fixture, |rig| {
        let mut random = Random::new(5);
        let mut way = rig.way(4, 64 << 10)?;
        for (submits_a_kick, room) in [(1, 64), (7, 1), (64, 3), (1000, 64)] {
            let mut ops = Vec::new();
            // Every kind of op on every lane, in turn.
            for at in 0..112u64 {
                let kind = 1 + at / 4 % 7;
                let put = (kind & 1 != 0).then(|| (random.below(1000), 512 * at, 1 + random.below(512)));
                ops.push(way.op(at as usize % 4, put, kind >> 1 & 1, kind & 4 != 0));
            }
            let plan = Plan { submits_a_kick, room, polls_after: 20, ..rig.plan() };
            let driven = rig.a.drive(&ops, plan)?;
            each_completes_once(&rig.a, &ops, &driven, rig.limits.wait)?;
        }
        Ok(())
    })
}

/// Sentence 6.
pub fn a_completed_put_has_left_its_source(fixture: &dyn Fixture) -> Outcome {
    const LEN_BYTES: u64 = 30_011;
    check(fixture, |rig| {
        let mut way = rig.way(1, 16 * 40_000)?;
        for round in 1..=2 {
            way.refill(&rig.a, &rig.b, round)?;
            let range = |at: u64| (at * 40_000 + 7, at * 40_000 + 1_000 * round, LEN_BYTES);
            let puts: Vec<Op> = (0..16).map(|at| way.op(0, Some(range(at)), 0, false)).collect();
            let last = way.last_ops();
            rig.b.watch(way.tracks())?;
            // As soon as a put completes, its source gets other bytes.
            let overwrite = |completion: &Completion| {
                let put = puts.iter().find(|op| op.sequence == completion.sequence).and_then(|op| op.put);
                put.map_or(Ok(()), |put| {
                    let piece = Piece {
                        offset_bytes: put.source_offset_bytes,
                        len_bytes: put.len_bytes,
                        seed: 999,
                        pattern_offset_bytes: 0,
                    };
                    rig.a.done(Command::Write { memory: way.source.number, piece })
                })
            };
            let mut stepper = rig.stepper();
            for put in &puts {
                stepper.offer(put)?.iter().try_for_each(overwrite)?;
            }
            stepper.kick()?;
            while !stepper.is_over() {
                stepper.poll()?.iter().try_for_each(overwrite)?;
            }
            for op in &last {
                stepper.offer(op)?;
            }
            stepper.kick()?;
            stepper.finish()?;
            rig.all_seen(&rig.b)?;
        }
        Ok(())
    })
}

/// Sentence 7.
pub fn a_completed_flush_means_delivered(fixture: &dyn Fixture) -> Outcome {
    check(fixture, |rig| {
        let mut way = rig.way(2, 300_000)?;
        for round in 0..12 {
            way.refill(&rig.a, &rig.b, round + 1)?;
            let lens = [1, 64, 4_097, 100_003];
            let mut ops = Vec::new();
            let mut at = round;
            // The flush is an op of its own, or goes with the last put.
            let apart = round % 2 == 0;
            for (index, len) in lens.into_iter().enumerate() {
                ops.push(way.op(0, Some((at + 3, at, len)), 0, !apart && index == 3));
                at += len + 5;
            }
            if apart {
                ops.push(way.op(0, None, 0, true));
            }
            way.hand_over(0, 1);
            let signal = way.op(1, None, 1, false);
            rig.b.watch(way.tracks())?;
            let mut stepper = rig.stepper();
            for op in &ops {
                stepper.offer(op)?;
            }
            stepper.kick()?;
            stepper.poll_until(ops.last())?;
            // Between lanes nothing is promised, so it is the flush alone that puts this signal behind the data.
            stepper.offer(&signal)?;
            stepper.kick()?;
            stepper.finish()?;
            rig.all_seen(&rig.b)?;
        }
        Ok(())
    })
}

/// Sentence 10.
pub fn polls_alone_finish(fixture: &dyn Fixture) -> Outcome {
    check(fixture, |rig| {
        let mut way = rig.way(2, 64 << 10)?;
        let mut stepper = rig.stepper();
        let mut refused = false;
        let mut at = 0;
        while at < 32 && !refused {
            let op = way.op(at as usize % 2, Some((at, 2_000 * at, 1_999)), at % 3, at % 5 == 0);
            refused = !stepper.offer_once(&op)?;
            if refused {
                way.take_back(&op);
            }
            at += 1;
        }
        rig.b.watch(way.tracks())?;
        stepper.kick()?;
        stepper.finish()?;
        rig.all_seen(&rig.b)?;
        Ok(())
    })
}
