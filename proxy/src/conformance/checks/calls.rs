//! Calls: that they return, that a refused op leaves nothing behind, and that errors stay.

use core::time::Duration;
use std::time::Instant;

use crate::conformance::Fixture;
use crate::conformance::command::{Command, Fault, FaultKind, Name};
use crate::conformance::report::{Failure, Outcome};
use crate::conformance::rig::{Rig, Stop, Way, check, failing_check, quiesce};
use crate::conformance::side::{Checked, Side};
use crate::transport::Op;

/// The most ops that a port is offered to fill it.
const MANY_OPS: u64 = 16_384;

/// Length of the put of each, and distance between two of them.
const PUT_BYTES: u64 = 16;
const STRIDE_BYTES: u64 = 24;

/// Memory for so many puts.
const FULL_BYTES: u64 = MANY_OPS * STRIDE_BYTES;

/// A put with a signal, the n-th of a round.
fn small_put(way: &mut Way, at: u64) -> Op {
    let lane = at as usize % way.lanes.len();
    way.op(lane, Some((at * STRIDE_BYTES + 3, at * STRIDE_BYTES, PUT_BYTES)), 1, at % 4 == 0)
}

/// Sentence 1.
pub fn no_call_blocks(fixture: &dyn Fixture) -> Outcome {
    check(fixture, |rig| {
        // Nothing to do.
        rig.a.kick()?;
        for _ in 0..20 {
            rig.a.poll()?;
        }
        let mut way = rig.way(2, FULL_BYTES)?;
        // More than the port takes, and nobody to make room.
        let (mut refusals, mut at) = (0, 0);
        let mut op = small_put(&mut way, at);
        while at < MANY_OPS - 1 && refusals < 50 {
            if rig.a.submit(&op)? {
                at += 1;
                op = small_put(&mut way, at);
            } else {
                refusals += 1;
            }
        }
        rig.a.kick()?;
        for _ in 0..3 {
            rig.a.poll()?;
        }
        // Closing is next, with most of it under way.
        Ok(())
    })
}

/// Sentence 1, when the peer has gone: calls may fail, and return.
pub fn no_call_waits_for_the_peer(fixture: &dyn Fixture) -> Outcome {
    check(fixture, |rig| {
        let mut way = rig.way(2, FULL_BYTES)?;
        let ops: Vec<Op> = (0..60).map(|at| small_put(&mut way, at)).collect();
        quiesce(&rig.b, rig.limits)?;
        rig.b.done(Command::DropPort {})?;
        for op in ops {
            for command in [Command::Submit { op }, Command::Kick {}, Command::Poll { room: 64 }] {
                if let Err(fault) = rig.a.attempt(command)? {
                    honest(&rig.a, &fault)?;
                }
            }
        }
        rig.leave_open();
        Ok(quiesce(&rig.a, rig.limits)?)
    })
}

/// Sentence 1, for the end of a port that was not closed.
pub fn a_port_can_be_dropped(fixture: &dyn Fixture) -> Outcome {
    check(fixture, |rig| {
        let mut way = rig.way(2, FULL_BYTES)?;
        for at in 0..MANY_OPS {
            if !rig.a.submit(&small_put(&mut way, at))? {
                break;
            }
        }
        rig.a.kick()?;
        rig.a.done(Command::DropPort {})?;
        rig.leave_open();
        // Its peer can still be closed.
        Ok(quiesce(&rig.b, rig.limits)?)
    })
}

/// Sentence 2.
pub fn full_leaves_no_trace(fixture: &dyn Fixture) -> Outcome {
    check(fixture, |rig| {
        let mut way = rig.way(2, FULL_BYTES)?;
        // Twice, so that a ring inside the port comes around.
        for round in 1..=2 {
            way.refill(&rig.a, &rig.b, round)?;
            // A port may work before it is kicked, and what it was offered is not known before it is full.
            rig.b.watch(Vec::new())?;
            let mut stepper = rig.stepper();
            let mut refused = None;
            for at in 0..MANY_OPS {
                let op = small_put(&mut way, at);
                if !stepper.offer_once(&op)? {
                    refused = Some((at, op));
                    way.take_back(&op);
                    break;
                }
            }
            let Some((at, refused)) = refused else {
                return Err(Stop::Waived(format!("the port took {MANY_OPS} ops and was not full")));
            };
            rig.b.watch(way.tracks())?;
            stepper.kick()?;
            stepper.finish()?;
            rig.all_seen(&rig.b)?;
            linger(rig)?;
            rig.b.verify("the destination", &way.destination, way.base_seed, &way.pieces()).map_err(
                |failure| {
                    let Op { lane, sequence, .. } = refused;
                    let seen =
                        format!("{}, after op {sequence} of lane {} was refused", failure.seen, lane.0);
                    Failure { seen, ..failure }
                },
            )?;
            // What was refused is offered again, as the engine does.
            let again = small_put(&mut way, at);
            rig.b.watch(way.tracks())?;
            rig.lockstep(&[again])?;
        }
        Ok(())
    })
}

/// Sentence 9.
pub fn an_error_stays(fixture: &dyn Fixture) -> Outcome {
    failing_check(fixture, |rig| {
        let mut way = rig.way(2, 64 << 10)?;
        let ops: Vec<Op> =
            (0..1_000).map(|at| way.op(at as usize % 2, Some((at * 8, at * 64, 64)), 1, false)).collect();
        let driven = rig.a.drive(&ops, rig.plan())?;
        let Some(first) = driven.fault else {
            let (who, expected) =
                ("the fixture".into(), "a port that fails within 1,000 ops of 64 bytes".into());
            let (wait, complete) = (rig.limits.wait, driven.completions.len());
            let seen = format!("no error within {wait:?}, and {complete} ops complete");
            return Err(Failure { who, expected, seen }.into());
        };
        honest(&rig.a, &first)?;
        let spare = [0, 1].map(|lane| way.op(lane, None, 1, true));
        errors_only(rig, &way, &spare, Some(&first))?;
        closed_for_good(rig)?;
        errors_only(rig, &way, &spare, None)?;
        rig.a.done(Command::Release { memory: way.source.number })?;
        rig.leave_open();
        Ok(quiesce(&rig.b, rig.limits)?)
    })
}

/// Sentence 9, for the end that a port is asked for.
pub fn a_closed_port_stays_closed(fixture: &dyn Fixture) -> Outcome {
    check(fixture, |rig| {
        let mut way = rig.way(2, 64 << 10)?;
        let ops: Vec<Op> = (0..20).map(|at| small_put(&mut way, at)).collect();
        rig.drive(&ops)?;
        let spare = [0, 1].map(|lane| way.op(lane, None, 1, true));
        closed_for_good(rig)?;
        errors_only(rig, &way, &spare, None)?;
        rig.leave_open();
        Ok(quiesce(&rig.b, rig.limits)?)
    })
}

/// Every call of A but `close` returns an error, and always the same: `first`, if there was one.
fn errors_only(rig: &Rig, way: &Way, spare: &[Op; 2], first: Option<&Fault>) -> Checked<()> {
    let source = Name::Local { number: way.source.number };
    let signal = way.lanes[0].word_name;
    let calls = [
        ("submit on lane 0", Command::Submit { op: spare[0] }),
        ("submit on lane 1", Command::Submit { op: spare[1] }),
        ("kick", Command::Kick {}),
        ("poll", Command::Poll { room: 64 }),
        ("bind", Command::Bind { source, destination: way.destination_name, signal }),
    ];
    let mut expected = first.map(|fault| fault.text.clone());
    for _ in 0..3 {
        for (call, command) in &calls {
            let fault = match rig.a.attempt(command.clone())? {
                Err(fault) => fault,
                Ok(reply) => {
                    let expected = expected.as_deref().unwrap_or("an error");
                    return Err(rig.a.failure(format!("{call} returns “{expected}”"), format!("{reply:?}")));
                }
            };
            honest(&rig.a, &fault)?;
            let expected = expected.get_or_insert_with(|| fault.text.clone());
            if *expected != fault.text {
                return Err(rig.a.failure(format!("{call} returns “{expected}” again"), fault.text));
            }
        }
    }
    Ok(())
}

/// Closes A and sees that it stays quiesced.
fn closed_for_good(rig: &Rig) -> Checked<()> {
    quiesce(&rig.a, rig.limits)?;
    for _ in 0..3 {
        if !rig.a.close()? {
            return Err(rig.a.failure("a quiesced port stays quiesced", "Pending"));
        }
    }
    Ok(())
}

/// A fault that a transport may have: not a panic, not a broken contract.
fn honest(side: &Side, fault: &Fault) -> Checked<()> {
    match fault.kind {
        FaultKind::Panicked {} | FaultKind::Violation {} => Err(side.fault(fault)),
        _ => Ok(()),
    }
}

/// Drives both ports a little longer, so that what was not to happen has a chance to.
fn linger(rig: &Rig) -> Checked<()> {
    let start = Instant::now();
    let mut polls = 0;
    while polls < 20 || start.elapsed() < Duration::from_millis(5) {
        rig.a.kick()?;
        rig.a.poll()?;
        rig.b.look(Duration::ZERO)?;
        polls += 1;
    }
    Ok(())
}
