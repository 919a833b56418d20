//! Puts with signals under an offered load, from due to seen by the peer.

use portway_fifo::Heap;

use super::NAME;
use super::side::{Channels, Place, Side, too_many};
use super::throughput::window;
use super::wired::{Wired, triggers};
use crate::args::Args;
use crate::failure::Failure;
use crate::load::software::{self, Offered};
use crate::load::{self, Pace, Run};
use crate::machine::Pinning;
use crate::report::Row;
use crate::round::Round;
use crate::trial::Trial;

/// Loads unless `--rate` says otherwise, in thousands a second.
pub const KOPS: (u64, u64, u64) = (250, 2_000, 250);

/// A row for each load, at the smallest size; the whole is run `-N` times.
pub fn rows(args: &Args, pinning: &Pinning) -> Result<Vec<Row>, Failure> {
    rows_of(args, NAME, |size, kops| offer(args, size, kops, None, pinning))
}

/// The same of whatever layer carries the puts.
pub fn rows_of(
    args: &Args,
    layer: &str,
    mut offer: impl FnMut(u64, u64) -> Result<Run, Failure>,
) -> Result<Vec<Row>, Failure> {
    let size_bytes = args.sizes().into_iter().min().unwrap_or(8);
    let row = Row { layer: layer.into(), test: "load".into(), size_bytes, ..Row::default() };
    load::rows(args, args.runs(), &[(size_bytes, row)], &args.rates_kops(KOPS), |&size, kops| {
        offer(size, kops)
    })
}

/// One run over loopback. A bit of the message `spoiled` is flipped on purpose.
pub fn offer(
    args: &Args,
    size_bytes: u64,
    kops: u64,
    spoiled: Option<u64>,
    pinning: &Pinning,
) -> Result<Run, Failure> {
    let name = name(NAME, size_bytes, kops);
    let wired = Wired::new(&Heap, size_bytes * window(size_bytes), args.deadline(), pinning.engine());
    let wired = wired.map_err(|source| Failure::proxy(&name, source))?;
    through(args, &name, wired, size_bytes, kops, spoiled, pinning)
}

/// What a run is called.
pub fn name(layer: &str, size_bytes: u64, kops: u64) -> String {
    format!("{layer} load, {size_bytes} bytes, {kops} thousand a second")
}

/// One run over ends that are wired already.
pub fn through(
    args: &Args,
    name: &str,
    wired: Wired,
    size_bytes: u64,
    kops: u64,
    spoiled: Option<u64>,
    pinning: &Pinning,
) -> Result<Run, Failure> {
    let failed = |source| Failure::proxy(name, source);
    let [a, b] = &wired.ends;
    let (from, to) = (Channels::new(a).map_err(failed)?, Channels::new(b).map_err(failed)?);
    let trial = &Trial::new(name, 1, args.deadline());
    let mut messages = Messages { from, to, size_bytes, check: args.check(), spoiled, seen: 0, wrong: 0 };
    let (run, sent) = Round::new(args, pinning, trial)
        .alone(|| software::offer(&mut messages, &Pace::new(args, kops), trial))?;
    let wrong = messages.wrong + too_many(&mut messages.to, trial)?;
    wired.stop(name, sent * triggers(size_bytes), args.deadline())?;
    Ok(Run { wrong, ..run })
}

/// Messages from one side to another, each in a place of a window.
struct Messages {
    from: Channels,
    to: Channels,
    size_bytes: u64,
    check: bool,
    spoiled: Option<u64>,
    seen: u64,
    wrong: u64,
}

impl Messages {
    fn place(&self, n: u64) -> Place {
        let len_bytes = self.size_bytes;
        Place { offset_bytes: n % window(len_bytes) * len_bytes, len_bytes }
    }
}

impl Offered for Messages {
    fn most_under_way(&self) -> u64 {
        window(self.size_bytes)
    }

    fn begin(&mut self, n: u64, trial: &Trial) -> Result<(), Failure> {
        let place = self.place(n);
        if self.check {
            self.from.memory().fill(place, n);
        }
        if self.spoiled == Some(n) {
            self.from.memory().spoil(place);
        }
        self.from.put_signal(n, place, trial)?;
        self.from.kick(trial)
    }

    fn done(&mut self, begun: u64, trial: &Trial) -> Result<u64, Failure> {
        while self.seen < begun && self.to.poll(self.seen, trial)? {
            let whole = !self.check || self.to.memory().is_whole(self.place(self.seen), self.seen);
            self.wrong += u64::from(!whole);
            self.seen += 1;
        }
        Ok(self.seen)
    }
}
