//! How long a trigger is on its way, with nothing else on the way.

use portway_fifo::{Consumer, Producer, Trigger};

use super::payload::{Check, trigger};
use super::queue::{self, Receiver, Sender};
use super::{NAME, REFERENCE};
use crate::args::{Args, DEPTH};
use crate::failure::Failure;
use crate::machine::Pinning;
use crate::report::{Control, Row, counted_first};
use crate::round::{Round, Samples, timed};
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
        for ((test, subject), samples) in &mut tests {
            let name = format!("fifo latency, {test} of {subject}");
            let refused = |source| Failure::Fifo { measurement: name.clone(), source };
            let trial = &Trial::new(&name, 2, args.deadline());
            let round = Round::new(args, pinning, trial);
            samples.add(match (*test, *subject) {
                ("push-sync", _) => push_sync(&round, fifo().map_err(refused)?, None),
                (_, REFERENCE) => {
                    ping_pong(&round, queue::reference(slots, 1), queue::reference(slots, 1), None)
                }
                _ => ping_pong(&round, fifo().map_err(refused)?, fifo().map_err(refused)?, None),
            }?);
        }
    }
    let rows = |((test, subject), samples): ((&str, &str), Samples)| {
        let row = Row {
            layer: NAME.into(),
            test: test.into(),
            subject: subject.into(),
            shape: [("slots".to_owned(), slots)].into(),
            size_bytes: 16,
            runs,
            ..Row::default()
        };
        samples.rows(args, row)
    };
    // Rows of a test stand together.
    let [ours, theirs, sync] = tests.map(rows);
    Ok([counted_first([ours, theirs].concat()), sync].concat())
}

/// Runs in which the first trigger is corrupted.
pub fn controls(args: &Args, pinning: &Pinning) -> Result<[Control; 2], Failure> {
    let mut found = [0; 2];
    for (found, test) in found.iter_mut().zip(["push-pop", "push-sync"]) {
        let trial = &Trial::new(format!("fifo {test}, negative control"), 2, args.deadline());
        let fifo = || {
            let fifo = queue::fifo(portway_fifo::MIN_SLOTS, 1, args.deadline());
            fifo.map_err(|source| Failure::Fifo { measurement: trial.name().into(), source })
        };
        let round = Round::new(args, pinning, trial);
        let samples = match test {
            "push-pop" => ping_pong(&round, fifo()?, fifo()?, Some(0)),
            _ => push_sync(&round, fifo()?, Some(0)),
        };
        *found = samples?.wrong;
    }
    let [pop, sync] = found;
    Ok([Control::new(NAME, "push-pop", 1, pop), Control::new(NAME, "push-sync", 1, sync)])
}

/// The trigger that a thread sends, a bit of it flipped if it is the one that is corrupted.
pub fn sent(n: u64, corrupt: Option<u64>) -> Trigger {
    let sound = trigger(0, n);
    let [first, second] = sound.words();
    if corrupt == Some(n) { Trigger::new([first, second ^ 1]).unwrap_or(sound) } else { sound }
}

/// A trigger goes to the other thread through one queue and comes back through another.
fn ping_pong<S: Sender, R: Receiver>(
    round: &Round,
    (mut there, far): (Vec<S>, R),
    (mut back, near): (Vec<S>, R),
    corrupt: Option<u64>,
) -> Result<Samples, Failure> {
    let trial = round.trial;
    let time = || {
        let mut arrivals = Arrivals::of(near);
        let (samples, count) = round.time(|n| {
            timed(|| {
                send(&mut there, sent(n, corrupt), trial)?;
                arrivals.next(trial).map(|_| ())
            })
        })?;
        Ok((samples, count, arrivals))
    };
    let echo = || {
        let mut arrivals = Arrivals::of(far);
        let mut n = 0;
        while arrivals.next(trial)? {
            send(&mut back, trigger(0, n), trial)?;
            n += 1;
        }
        Ok(arrivals)
    };
    let ((samples, count, near), far) = round.both(time, echo)?;
    let wrong = near.check.finish(&[count]) + far.check.finish(&[count]);
    Ok(Samples { wrong, ..samples })
}

/// A trigger goes to the other thread, and the news that it was taken comes back as the tail.
fn push_sync(
    round: &Round,
    (producers, consumer): (Vec<Producer>, Consumer),
    corrupt: Option<u64>,
) -> Result<Samples, Failure> {
    let trial = round.trial;
    let refused = |source| Failure::Fifo { measurement: trial.name().into(), source };
    let time = || {
        round.time(|n| {
            let push_sync = |producer: &Producer| producer.sync(producer.push(sent(n, corrupt))?);
            timed(|| producers.iter().try_for_each(push_sync)).map_err(refused)
        })
    };
    let take = || {
        let mut arrivals = Arrivals::of(consumer);
        while arrivals.next(trial)? {}
        Ok(arrivals)
    };
    let ((samples, count), arrivals) = round.both(time, take)?;
    Ok(Samples { wrong: arrivals.check.finish(&[count]), ..samples })
}

fn send<S: Sender>(senders: &mut [S], trigger: Trigger, trial: &Trial) -> Result<(), Failure> {
    senders.iter_mut().try_for_each(|sender| sender.send(&[trigger], trial))
}

/// A receiver whose triggers come one by one and are checked.
pub struct Arrivals<R> {
    receiver: R,
    pub check: Check,
}

impl<R: Receiver> Arrivals<R> {
    pub fn of(receiver: R) -> Self {
        Arrivals { receiver, check: Check::new(1) }
    }

    /// Takes the next trigger; false if there is none and the trial is over.
    pub fn next(&mut self, trial: &Trial) -> Result<bool, Failure> {
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
