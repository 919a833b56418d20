//! Puts through the engine under an offered load, each from due to completed.

use std::sync::Arc;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};

use portway_proxy::ChannelProducer;

use super::null_port::Check;
use super::{NAME, Rig, payload, rig, serve};
use crate::args::Args;
use crate::failure::Failure;
use crate::load::software::{self, Offered};
use crate::load::{self, Pace, Run};
use crate::machine::Pinning;
use crate::report::Row;
use crate::round::Round;
use crate::trial::Trial;

/// Loads unless `--rate` says otherwise, in thousands a second.
pub const KOPS: (u64, u64, u64) = (500, 4_000, 500);

/// A row for each load; the whole is run `-N` times.
pub fn rows(args: &Args, pinning: &Pinning) -> Result<Vec<Row>, Failure> {
    let row = Row { layer: NAME.into(), test: "load".into(), size_bytes: 16, ..Row::default() };
    let offer = |(): &(), kops| offer(args, kops, None, pinning);
    load::rows(args, args.runs(), &[((), row)], &args.rates_kops(KOPS), offer)
}

/// One run. The offset of the put `corrupt` is wrong on purpose.
pub fn offer(args: &Args, kops: u64, corrupt: Option<u64>, pinning: &Pinning) -> Result<Run, Failure> {
    let trial = &Trial::new(format!("proxy load, {kops} thousand a second"), 2, args.deadline());
    let failed = |source| Failure::proxy(trial.name(), source);
    let check = args.check().then(|| Check::new(1, 1, false));
    let Rig { mut engine, channels, verdict, completed } =
        rig(1, 32, check, args.deadline()).map_err(failed)?;
    let ends: Vec<_> =
        channels.iter().map(|channel| channel.producer()).collect::<Result<_, _>>().map_err(failed)?;
    let mut puts = Puts { ends, completed, corrupt };
    let pace = Pace::new(args, kops);
    let ((run, sent), ()) = Round::new(args, pinning, trial)
        .both(|| software::offer(&mut puts, &pace, trial), || serve(&mut engine, trial, || ()))?;
    let check = verdict.lock().unwrap_or_else(PoisonError::into_inner).take();
    Ok(Run { wrong: check.map_or(0, |check| check.finish(&[sent])), ..run })
}

/// Puts over one channel.
struct Puts {
    ends: Vec<ChannelProducer>,
    completed: Arc<AtomicU64>,
    corrupt: Option<u64>,
}

impl Offered for Puts {
    fn most_under_way(&self) -> u64 {
        portway_fifo::Config::default().slots
    }

    fn begin(&mut self, n: u64, trial: &Trial) -> Result<(), Failure> {
        let mut put = payload::put(0, n);
        put.source_offset_bytes ^= u64::from(self.corrupt == Some(n));
        let put = |end: &ChannelProducer| {
            end.put(put.source_offset_bytes, put.destination_offset_bytes, put.len_bytes).map(drop)
        };
        self.ends.iter().try_for_each(put).map_err(|source| Failure::proxy(trial.name(), source))
    }

    fn done(&mut self, _: u64, _: &Trial) -> Result<u64, Failure> {
        Ok(self.completed.load(Ordering::Acquire))
    }
}
