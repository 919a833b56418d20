//! Pushes under an offered load, each from due to synced.

use portway_fifo::{Position, Producer};

use super::NAME;
use super::latency::{Arrivals, sent};
use super::queue;
use crate::args::{Args, DEPTH};
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
    let shape = [("slots".to_owned(), slots(args))].into();
    let row = Row { layer: NAME.into(), test: "load".into(), shape, size_bytes: 16, ..Row::default() };
    let offer = |(): &(), kops| offer(args, kops, None, pinning);
    load::rows(args, args.runs(), &[((), row)], &args.rates_kops(KOPS), offer)
}

fn slots(args: &Args) -> u64 {
    args.depth(DEPTH).into_iter().max().unwrap_or(portway_fifo::MIN_SLOTS)
}

/// One run. A bit of the trigger `corrupt` is flipped on purpose.
pub fn offer(args: &Args, kops: u64, corrupt: Option<u64>, pinning: &Pinning) -> Result<Run, Failure> {
    let trial = &Trial::new(format!("fifo load, {kops} thousand a second"), 2, args.deadline());
    let refused = |source| Failure::Fifo { measurement: trial.name().into(), source };
    let (producers, consumer) = queue::fifo(slots(args), 1, args.deadline()).map_err(refused)?;
    let offer = || {
        let Some(producer) = producers.into_iter().next() else { return Err(trial.why()) };
        let look = producer.with_timeout(std::time::Duration::ZERO).map_err(refused)?;
        let mut pushes = Pushes { producer, look, first: None, done: 0, slots: slots(args), corrupt };
        software::offer(&mut pushes, &Pace::new(args, kops), trial)
    };
    let take = || {
        let mut arrivals = Arrivals::of(consumer);
        while arrivals.next(trial)? {}
        Ok(arrivals)
    };
    let ((run, count), arrivals) = Round::new(args, pinning, trial).both(offer, take)?;
    Ok(Run { wrong: arrivals.check.finish(&[count]), ..run })
}

/// Pushes of one producer.
struct Pushes {
    producer: Producer,
    /// The same, that does not wait.
    look: Producer,
    first: Option<Position>,
    done: u64,
    slots: u64,
    corrupt: Option<u64>,
}

impl Offered for Pushes {
    fn most_under_way(&self) -> u64 {
        self.slots
    }

    fn begin(&mut self, n: u64, trial: &Trial) -> Result<(), Failure> {
        let pushed = self.producer.push(sent(n, self.corrupt));
        let position = pushed.map_err(|source| Failure::Fifo { measurement: trial.name().into(), source })?;
        self.first.get_or_insert(position);
        Ok(())
    }

    fn done(&mut self, begun: u64, trial: &Trial) -> Result<u64, Failure> {
        let Some(first) = self.first else { return Ok(0) };
        while self.done < begun {
            match self.look.sync(first.plus(self.done)) {
                Ok(()) => self.done += 1,
                Err(portway_fifo::Error::Timeout { .. }) => break,
                Err(source) => return Err(Failure::Fifo { measurement: trial.name().into(), source }),
            }
        }
        Ok(self.done)
    }
}
