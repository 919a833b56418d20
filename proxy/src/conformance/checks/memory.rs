//! Memory: how it is bound, how long it stays so, and how a peer learns of it.

use core::time::Duration;
use std::time::Instant;

use crate::conformance::Fixture;
use crate::conformance::command::{Command, FaultKind, Name, Reply};
use crate::conformance::report::Outcome;
use crate::conformance::rig::{check, quiesce};
use crate::conformance::side::{Checked, Side};
use crate::transport::Op;

/// For how long nothing may change, where that is the claim.
const QUIET: Duration = Duration::from_millis(50);

/// Sentence 8, second half.
pub fn nothing_is_written_once_quiesced(fixture: &dyn Fixture) -> Outcome {
    check(fixture, |rig| {
        let mut way = rig.way(2, 1 << 20)?;
        let ops: Vec<Op> = (0..64)
            .map(|at| way.op(at as usize % 2, Some((at * 16_000, at * 16_000 + 5, 15_000)), 1, false))
            .collect();
        for (at, op) in ops.iter().enumerate() {
            if !rig.a.submit(op)? {
                break;
            }
            // Some are kicked, and the last are not.
            if at == 40 {
                rig.a.kick()?;
            }
        }
        quiesce(&rig.a, rig.limits)?;
        // From here on the memory is somebody else's.
        let base = 77;
        rig.b.fill(&way.destination, base)?;
        let words = [rig.b.word(&way.lanes[0].word)?, rig.b.word(&way.lanes[1].word)?];
        rig.leave_open();
        let quiet = || -> Checked<()> {
            let start = Instant::now();
            loop {
                rig.b.verify("what the quiesced port had bound", &way.destination, base, &[])?;
                for (lane, before) in way.lanes.iter().zip(words) {
                    let word = rig.b.word(&lane.word)?;
                    if word != before {
                        return Err(rig
                            .b
                            .failure(format!("a signal word that stays at {before}"), word.to_string()));
                    }
                }
                if start.elapsed() > QUIET {
                    return Ok(());
                }
            }
        };
        for command in [Command::Kick {}, Command::Poll { room: 64 }, Command::Close {}] {
            // They return errors or not; that is another check's business.
            rig.a.attempt(command)?.ok();
        }
        quiet()?;
        rig.a.done(Command::DropPort {})?;
        quiet()?;
        Ok(quiesce(&rig.b, rig.limits)?)
    })
}

/// Sentence 11.
pub fn bindings_are_counted_and_checked(fixture: &dyn Fixture) -> Outcome {
    check(fixture, |rig| {
        let mut way = rig.way(2, 64 << 10)?;
        let released = rig.a.allocate(4_096)?;
        rig.a.done(Command::Release { memory: released.number })?;
        let (source, destination, signal) =
            (Name::Local { number: way.source.number }, way.destination_name, way.lanes[0].word_name);
        let unknown = [
            ("source", Name::Nobodys {}, destination, signal),
            ("destination", source, Name::Nobodys {}, signal),
            ("signal", source, destination, Name::Nobodys {}),
            ("released source", Name::Local { number: released.number }, destination, signal),
        ];
        for round in 0..3u64 {
            let mut ops: Vec<Op> = Vec::new();
            for at in 0..20u64 {
                let lane = at as usize % way.lanes.len();
                ops.push(way.op(lane, Some((at, round * 20_000 + at * 100, 99)), 1, false));
            }
            rig.b.watch(way.tracks())?;
            let mut stepper = rig.stepper();
            for op in &ops {
                stepper.offer(op)?;
            }
            // In the middle of that.
            for (what, source, destination, signal) in unknown {
                refused(&rig.a, what, Command::Bind { source, destination, signal }, FaultKind::Unknown {})?;
            }
            way.add_lane(&rig.a, &rig.b)?;
            stepper.kick()?;
            stepper.finish()?;
            rig.all_seen(&rig.b)?;
        }
        Ok(())
    })
}

/// Sentence 12.
pub fn memory_is_held_until_quiesced(fixture: &dyn Fixture) -> Outcome {
    check(fixture, |rig| {
        let mut way = rig.way(1, 64 << 10)?;
        let release = Command::Release { memory: way.source.number };
        refused(&rig.a, "memory that is bound", release.clone(), FaultKind::Busy {})?;
        let op = way.op(0, Some((0, 0, 60_000)), 1, true);
        rig.b.watch(way.tracks())?;
        rig.lockstep(&[op])?;
        refused(&rig.a, "memory that is bound", release.clone(), FaultKind::Busy {})?;
        rig.close()?;
        rig.a.done(release.clone())?;
        refused(&rig.a, "memory that is released", release, FaultKind::Unknown {})?;
        rig.b.done(Command::Release { memory: way.destination.number })?;
        rig.b.done(Command::Release { memory: way.lanes[0].word.number })?;
        Ok(())
    })
}

/// Sentence 12, for imports.
pub fn imports_are_held_until_quiesced(fixture: &dyn Fixture) -> Outcome {
    check(fixture, |rig| {
        let mut way = rig.way(1, 64 << 10)?;
        let forget = |name: Name| Command::Forget { name };
        let bound = [("a destination", way.destination_name), ("a signal word", way.lanes[0].word_name)];
        // One that no port has bound goes at once, and for good.
        let spare = rig.a.import(&rig.b.allocate(4_096)?)?;
        rig.a.done(forget(spare))?;
        refused(&rig.a, "an import that is forgotten", forget(spare), FaultKind::Unknown {})?;
        let (source, signal) = (Name::Local { number: way.source.number }, way.lanes[0].word_name);
        let bind = Command::Bind { source, destination: spare, signal };
        refused(&rig.a, "a binding to an import that is forgotten", bind, FaultKind::Unknown {})?;
        for (what, name) in bound {
            refused(&rig.a, &format!("{what} that is bound"), forget(name), FaultKind::Busy {})?;
        }
        let op = way.op(0, Some((0, 0, 60_000)), 1, true);
        rig.b.watch(way.tracks())?;
        rig.lockstep(&[op])?;
        rig.close()?;
        for (what, name) in bound {
            rig.a.done(forget(name))?;
            refused(&rig.a, &format!("{what} that is forgotten"), forget(name), FaultKind::Unknown {})?;
        }
        Ok(())
    })
}

/// Sentence 13.
pub fn bytes_from_a_peer_are_checked(fixture: &dyn Fixture) -> Outcome {
    check(fixture, |rig| {
        let memory = rig.a.allocate(4_096)?;
        let endpoint = rig.a.endpoint()?;
        let malformed = |what: &str, command| refused(&rig.b, what, command, FaultKind::Malformed {});
        for len in 0..memory.export.len() {
            let what = format!("a memory's export cut to {len} bytes");
            malformed(&what, Command::Import { bytes: memory.export[..len].to_vec() })?;
        }
        malformed("an import of an endpoint's bytes", Command::Import { bytes: endpoint.clone() })?;
        malformed("an import of other bytes", Command::Import { bytes: vec![0xa5; memory.export.len()] })?;
        // Each takes an endpoint, so not every length.
        let lens = [0, 1, endpoint.len() / 2, endpoint.len().saturating_sub(1)];
        let mut foreign: Vec<(String, Vec<u8>)> = lens
            .into_iter()
            .map(|len| (format!("an endpoint's bytes cut to {len}"), endpoint[..len].to_vec()))
            .collect();
        foreign.push(("a connection to a memory's export".into(), memory.export.clone()));
        foreign.push(("a connection to other bytes".into(), vec![0xa5; endpoint.len()]));
        for (what, bytes) in foreign {
            rig.b.endpoint()?;
            malformed(&what, Command::Connect { bytes, within: rig.limits.wait })?;
        }
        // None of that did any harm.
        let mut way = rig.way(1, 4_096)?;
        let ops = way.last_ops();
        rig.drive(&ops)?;
        Ok(())
    })
}

/// The side refuses the command with this kind of error.
fn refused(side: &Side, what: &str, command: Command, kind: FaultKind) -> Checked<()> {
    let name = format!("{what} is refused as {}", format!("{kind:?}").trim_end_matches(" {}"));
    let seen = match side.attempt(command)? {
        Err(fault) if fault.kind == kind => return Ok(()),
        Err(fault) => fault.text,
        Ok(Reply::Done {}) => "success".into(),
        Ok(reply) => format!("{reply:?}"),
    };
    Err(side.failure(name, seen))
}
