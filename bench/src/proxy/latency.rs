//! How long a flush takes, with nothing else on the way.

use std::sync::PoisonError;

use portway_proxy::ChannelProducer;

use super::null_port::Check;
use super::{NAME, Rig, payload, rig, serve};
use crate::args::Args;
use crate::failure::Failure;
use crate::machine::Pinning;
use crate::report::Row;
use crate::round::{Round, Samples, timed};
use crate::trial::Trial;

/// The rows, with the samples of all runs.
pub fn rows(args: &Args, pinning: &Pinning) -> Result<Vec<Row>, Failure> {
    let mut samples = Samples::default();
    let mut runs = 0;
    for _ in args.runs() {
        samples.add(run(args, None, pinning)?);
        runs += 1;
    }
    let (layer, test) = (NAME.into(), "push-flush".into());
    Ok(samples.rows(args, Row { layer, test, size_bytes: 16, runs, ..Row::default() }))
}

/// One run. The offset of the put `corrupt` is wrong on purpose.
pub fn run(args: &Args, corrupt: Option<u64>, pinning: &Pinning) -> Result<Samples, Failure> {
    let trial = Trial::new("proxy latency, push-flush", 2, args.deadline());
    push_flush(&Round::new(args, pinning, &trial), args, corrupt)
}

/// A trigger goes to the engine, and the news that its op is complete comes back as the frontier.
fn push_flush(round: &Round, args: &Args, corrupt: Option<u64>) -> Result<Samples, Failure> {
    let trial = round.trial;
    let failed = |source| Failure::proxy(trial.name(), source);
    let check = args.check().then(|| Check::new(1, 1, true));
    let Rig { mut engine, channels, verdict, .. } = rig(1, 32, check, args.deadline()).map_err(failed)?;
    let ends: Vec<_> =
        channels.iter().map(|channel| channel.producer()).collect::<Result<_, _>>().map_err(failed)?;
    let time = || {
        round.time(|n| {
            let mut put = payload::put(0, n);
            put.source_offset_bytes ^= u64::from(corrupt == Some(n));
            let call = |end: &ChannelProducer| {
                end.put_signal_flush(put.source_offset_bytes, put.destination_offset_bytes, put.len_bytes)
            };
            timed(|| ends.iter().try_for_each(call)).map_err(failed)
        })
    };
    let ((samples, sent), ()) = round.both(time, || serve(&mut engine, trial, || ()))?;
    let check = verdict.lock().unwrap_or_else(PoisonError::into_inner).take();
    Ok(Samples { wrong: check.map_or(0, |check| check.finish(&[sent])), ..samples })
}
