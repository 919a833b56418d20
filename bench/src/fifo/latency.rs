//! How long a trigger is on its way, with nothing else on the way.

use std::time::{Duration, Instant};

use portway_fifo::{Consumer, Producer};

use super::payload::{Check, trigger};
use super::queue::{self, Receiver, Sender};
use super::trial::{Phase, Trial};
use super::{NAME, REFERENCE};
use crate::args::Args;
use crate::failure::Failure;
use crate::machine::{Pinning, pin};
use crate::report::Row;
use crate::stats::Times;

/// Round trips of a run unless `-n` says otherwise.
const ITERATIONS: u64 = 10_000;

/// Half of each round trip in microseconds, and the payloads that were wrong.
type Samples = (Vec<f64>, u64);

/// The rows, with the samples of all runs; the runs of the tests alternate.
pub fn rows(args: &Args, pinning: &Pinning) -> Result<Vec<Row>, Failure> {
    let slots = args.depth.iter().max().copied().unwrap_or(portway_fifo::MIN_SLOTS);
    let (warmup, timed) = (args.warmup, args.iterations.unwrap_or(ITERATIONS));
    let fifo = || queue::fifo(slots, 1, args.deadline());
    let mut tests = [
        (("push-pop", NAME), Samples::default()),
        (("push-pop", REFERENCE), Samples::default()),
        (("push-sync", NAME), Samples::default()),
    ];
    for _ in 0..args.runs {
        for ((test, subject), (samples, wrong)) in &mut tests {
            let name = format!("fifo latency, {test} of {subject}");
            let refused = |source| Failure::Fifo { measurement: name.clone(), source };
            let trial = &Trial::new(&name, 2, args.deadline());
            let round = Round { pinning, trial, warmup, timed, limit: args.limit() };
            let (new, mistakes) = match (*test, *subject) {
                ("push-sync", _) => round.push_sync(fifo().map_err(refused)?),
                (_, REFERENCE) => round.ping_pong(queue::reference(slots, 1), queue::reference(slots, 1)),
                _ => round.ping_pong(fifo().map_err(refused)?, fifo().map_err(refused)?),
            }?;
            samples.extend(new);
            *wrong += mistakes;
        }
    }
    let row = |((test, subject), (mut samples, wrong)): ((&str, &str), Samples)| Row {
        layer: NAME.into(),
        test: test.into(),
        subject: subject.into(),
        shape: [("slots".to_owned(), slots)].into(),
        size_bytes: 16,
        iterations: samples.len() as u64,
        time_us: Times::of(&mut samples),
        wrong: args.check().then_some(wrong),
        ..Row::default()
    };
    Ok(tests.into_iter().map(row).collect())
}

/// One run of one test.
struct Round<'a> {
    pinning: &'a Pinning,
    trial: &'a Trial,
    warmup: u64,
    timed: u64,
    limit: Duration,
}

impl Round<'_> {
    /// A trigger goes to the other thread through one queue and comes back through another.
    fn ping_pong<S: Sender, R: Receiver>(
        &self,
        (mut there, far): (Vec<S>, R),
        (mut back, near): (Vec<S>, R),
    ) -> Result<Samples, Failure> {
        let time = || {
            let mut arrivals = Arrivals::of(near);
            let (samples, sent) = self.time(|n| {
                send(&mut there, n, self.trial)?;
                arrivals.next(self.trial).map(|_| ())
            })?;
            Ok((samples, sent, arrivals))
        };
        let echo = || {
            let mut arrivals = Arrivals::of(far);
            let mut n = 0;
            while arrivals.next(self.trial)? {
                send(&mut back, n, self.trial)?;
                n += 1;
            }
            Ok(arrivals)
        };
        let ((samples, sent, near), far) = self.both(time, echo)?;
        Ok((samples, near.check.finish(&[sent]) + far.check.finish(&[sent])))
    }

    /// A trigger goes to the other thread, and the news that it was taken comes back as the tail.
    fn push_sync(&self, (producers, consumer): (Vec<Producer>, Consumer)) -> Result<Samples, Failure> {
        let refused = |source| Failure::Fifo { measurement: self.trial.name().into(), source };
        let time = || {
            self.time(|n| {
                let push_sync = |producer: &Producer| producer.sync(producer.push(trigger(0, n))?);
                producers.iter().try_for_each(push_sync).map_err(refused)
            })
        };
        let take = || {
            let mut arrivals = Arrivals::of(consumer);
            while arrivals.next(self.trial)? {}
            Ok(arrivals)
        };
        let ((samples, sent), arrivals) = self.both(time, take)?;
        Ok((samples, arrivals.check.finish(&[sent])))
    }

    /// Runs the timing side on a producer's core and the other side on the consumer's.
    fn both<A: Send, B: Send>(
        &self,
        time: impl FnOnce() -> Result<A, Failure> + Send,
        other: impl FnOnce() -> Result<B, Failure> + Send,
    ) -> Result<(A, B), Failure> {
        let Round { pinning, trial, .. } = self;
        std::thread::scope(|scope| {
            let timing = scope.spawn(|| {
                pin(pinning.producer(0));
                trial.part(|| trial.start().and_then(|()| time()))
            });
            let other = scope.spawn(|| {
                pin(pinning.consumer());
                trial.part(|| trial.start().and_then(|()| other()))
            });
            match (timing.join().ok().flatten(), other.join().ok().flatten()) {
                (Some(timed), Some(other)) => Ok((timed, other)),
                _ => Err(trial.why()),
            }
        })
    }

    /// Half the time of each counted round trip, in microseconds, and how many round trips there were with those
    /// before them. Ends the trial.
    fn time(
        &self,
        mut round_trip: impl FnMut(u64) -> Result<(), Failure>,
    ) -> Result<(Vec<f64>, u64), Failure> {
        let mut samples = Vec::with_capacity(self.timed.min(1 << 20) as usize);
        let mut wait = self.trial.wait("round trips", self.warmup + self.timed);
        let mut sent = 0;
        for (phase, count) in [(Phase::Warm, self.warmup), (Phase::Timed, self.timed)] {
            let begin = Instant::now();
            let mut now = begin;
            for _ in 0..count {
                let start = now;
                round_trip(sent)?;
                sent += 1;
                wait.step(sent)?;
                now = Instant::now();
                if phase == Phase::Timed {
                    samples.push((now - start).as_nanos() as f64 / 1e3 / 2.0);
                }
                if now - begin >= self.limit {
                    break;
                }
            }
        }
        self.trial.enter(Phase::Over);
        Ok((samples, sent))
    }
}

fn send<S: Sender>(senders: &mut [S], n: u64, trial: &Trial) -> Result<(), Failure> {
    senders.iter_mut().try_for_each(|sender| sender.send(&[trigger(0, n)], trial))
}

/// A receiver whose triggers come one by one and are checked.
struct Arrivals<R> {
    receiver: R,
    check: Check,
}

impl<R: Receiver> Arrivals<R> {
    fn of(receiver: R) -> Self {
        Arrivals { receiver, check: Check::new(1) }
    }

    /// Takes the next trigger; false if there is none and the trial is over.
    fn next(&mut self, trial: &Trial) -> Result<bool, Failure> {
        let mut wait = trial.wait("a trigger to arrive", 1);
        loop {
            let over = trial.phase() == Phase::Over;
            if self.receiver.receive(1, |words| self.check.see(words)) != 0 {
                return Ok(true);
            }
            if over {
                return Ok(false);
            }
            std::hint::spin_loop();
            wait.look(0)?;
        }
    }
}
