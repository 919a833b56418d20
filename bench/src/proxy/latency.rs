//! How long a flush takes, with nothing else on the way.

use std::sync::PoisonError;
use std::time::Instant;

use portway_proxy::ChannelProducer;

use super::null_port::Check;
use super::{NAME, Rig, payload, rig};
use crate::args::Args;
use crate::failure::Failure;
use crate::machine::Pinning;
use crate::report::Row;
use crate::round::{Round, Samples, timed};
use crate::stats::Times;
use crate::trial::{Phase, Trial};

/// The row, with the samples of all runs.
pub fn row(args: &Args, pinning: &Pinning) -> Result<Row, Failure> {
    let (mut samples, mut wrong) = Samples::default();
    let mut runs = 0;
    for _ in args.runs() {
        let trial = Trial::new("proxy latency, push-flush", 2, args.deadline());
        let (new, mistakes) = push_flush(&Round::new(args, pinning, &trial), args)?;
        samples.extend(new);
        wrong += mistakes;
        runs += 1;
    }
    Ok(Row {
        layer: NAME.into(),
        test: "push-flush".into(),
        size_bytes: 16,
        runs,
        iterations: samples.len() as u64,
        time_us: Times::of(&mut samples),
        wrong: args.check().then_some(wrong),
        ..Row::default()
    })
}

/// A trigger goes to the engine, and the news that its op is complete comes back as the frontier.
fn push_flush(round: &Round, args: &Args) -> Result<Samples, Failure> {
    let trial = round.trial;
    let failed = |source| Failure::proxy(trial.name(), source);
    let check = args.check().then(|| Check::new(1, 1, true));
    let Rig { mut engine, channels, verdict } = rig(1, 32, check, args.deadline()).map_err(failed)?;
    let ends: Vec<_> =
        channels.iter().map(|channel| channel.producer()).collect::<Result<_, _>>().map_err(failed)?;
    let time = || {
        round.time(|n| {
            let put = payload::put(0, n);
            let call = |end: &ChannelProducer| {
                end.put_signal_flush(put.source_offset_bytes, put.destination_offset_bytes, put.len_bytes)
            };
            timed(|| ends.iter().try_for_each(call)).map_err(failed)
        })
    };
    let step = || {
        let start = Instant::now();
        let mut wait = trial.wait("a trigger to arrive", 1);
        loop {
            let over = trial.phase() == Phase::Over;
            if !engine.step(start.elapsed()).is_idle() {
                wait.step(0)?;
            } else if over {
                engine.shut_down();
                return Ok(());
            } else {
                std::hint::spin_loop();
                wait.look(0)?;
            }
        }
    };
    let ((samples, sent), ()) = round.both(time, step)?;
    let check = verdict.lock().unwrap_or_else(PoisonError::into_inner).take();
    Ok((samples, check.map_or(0, |check| check.finish(&[sent]))))
}
