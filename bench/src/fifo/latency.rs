//! How long a trigger is on its way, with nothing else on the way.

use portway_fifo::{Consumer, Producer};

use super::payload::{Check, trigger};
use super::queue::{self, Receiver, Sender};
use super::{NAME, REFERENCE};
use crate::args::{Args, DEPTH};
use crate::failure::Failure;
use crate::machine::Pinning;
use crate::report::Row;
use crate::round::{Round, Samples, timed};
use crate::stats::Times;
use crate::trial::{Phase, Trial};

/// The rows, with the samples of all runs; the runs of the tests alternate.
pub fn rows(args: &Args, pinning: &Pinning) -> Result<Vec<Row>, Failure> {
    let slots = args.depth(DEPTH).into_iter().max().unwrap_or(portway_fifo::MIN_SLOTS);
    let fifo = || queue::fifo(slots, 1, args.deadline());
    let mut tests = [
        (("push-pop", NAME), Samples::default()),
        (("push-pop", REFERENCE), Samples::default()),
        (("push-sync", NAME), Samples::default()),
    ];
    let mut runs = 0;
    for _ in args.runs() {
        runs += 1;
        for ((test, subject), (samples, wrong)) in &mut tests {
            let name = format!("fifo latency, {test} of {subject}");
            let refused = |source| Failure::Fifo { measurement: name.clone(), source };
            let trial = &Trial::new(&name, 2, args.deadline());
            let round = Round::new(args, pinning, trial);
            let (new, mistakes) = match (*test, *subject) {
                ("push-sync", _) => push_sync(&round, fifo().map_err(refused)?),
                (_, REFERENCE) => ping_pong(&round, queue::reference(slots, 1), queue::reference(slots, 1)),
                _ => ping_pong(&round, fifo().map_err(refused)?, fifo().map_err(refused)?),
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
        runs,
        iterations: samples.len() as u64,
        time_us: Times::of(&mut samples),
        wrong: args.check().then_some(wrong),
        ..Row::default()
    };
    Ok(tests.into_iter().map(row).collect())
}

/// A trigger goes to the other thread through one queue and comes back through another.
fn ping_pong<S: Sender, R: Receiver>(
    round: &Round,
    (mut there, far): (Vec<S>, R),
    (mut back, near): (Vec<S>, R),
) -> Result<Samples, Failure> {
    let trial = round.trial;
    let time = || {
        let mut arrivals = Arrivals::of(near);
        let (samples, sent) = round.time(|n| {
            timed(|| {
                send(&mut there, n, trial)?;
                arrivals.next(trial).map(|_| ())
            })
        })?;
        Ok((samples, sent, arrivals))
    };
    let echo = || {
        let mut arrivals = Arrivals::of(far);
        let mut n = 0;
        while arrivals.next(trial)? {
            send(&mut back, n, trial)?;
            n += 1;
        }
        Ok(arrivals)
    };
    let ((samples, sent, near), far) = round.both(time, echo)?;
    Ok((samples, near.check.finish(&[sent]) + far.check.finish(&[sent])))
}

/// A trigger goes to the other thread, and the news that it was taken comes back as the tail.
fn push_sync(round: &Round, (producers, consumer): (Vec<Producer>, Consumer)) -> Result<Samples, Failure> {
    let trial = round.trial;
    let refused = |source| Failure::Fifo { measurement: trial.name().into(), source };
    let time = || {
        round.time(|n| {
            let push_sync = |producer: &Producer| producer.sync(producer.push(trigger(0, n))?);
            timed(|| producers.iter().try_for_each(push_sync)).map_err(refused)
        })
    };
    let take = || {
        let mut arrivals = Arrivals::of(consumer);
        while arrivals.next(trial)? {}
        Ok(arrivals)
    };
    let ((samples, sent), arrivals) = round.both(time, take)?;
    Ok((samples, arrivals.check.finish(&[sent])))
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
