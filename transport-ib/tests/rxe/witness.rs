//! [`Witness`]: a connection that has nothing to do with a fault, over the same devices, and shows that it goes on.
//!
//! In each round its sender puts other bytes with a signal and flushes; the receiver compares every byte and signals back.
//! Each end ends by itself with an error, at a wrong byte, and when a round takes longer than [`STILL`].

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use portway_fifo::Region;
use portway_proxy::ChannelProducer;

use crate::Outcome;
use crate::conductor::Hosts;
use crate::random::pattern;

/// A round that takes longer stands still. Longer than the processor of an emulated machine is away at a time.
pub const STILL: Duration = Duration::from_secs(2);
const LEN: u64 = 8 << 10;
const SEED: u64 = 77;
/// So many rounds show that it goes: the one that was under way, and at least one whole one.
const ROUNDS: u64 = 3;

/// What the thread of a stream and its host tell each other.
#[derive(Default)]
pub struct Gauge {
    pub stop: AtomicBool,
    /// The control: the sender changes a byte of its next round.
    pub spoil: AtomicBool,
    rounds: AtomicU64,
    longest_ms: AtomicU64,
}

impl Gauge {
    /// Rounds so far, and the milliseconds of the longest.
    pub fn read(&self) -> (u64, u64) {
        (self.rounds.load(Ordering::Relaxed), self.longest_ms.load(Ordering::Relaxed))
    }

    /// Consumes the peer's signal, which ends the round that began then; false if there was a stop before it.
    fn signal(&self, channel: &ChannelProducer, begin: Instant) -> Result<bool, String> {
        while !channel.poll().map_err(|error| error.to_string())? {
            if self.stop.load(Ordering::Relaxed) {
                return Ok(false);
            }
            let (rounds, took) = (self.read().0, begin.elapsed());
            if took > STILL {
                return Err(format!("the witness stands still: round {rounds}, no signal after {took:?}"));
            }
            // The processors are few and emulated.
            std::thread::sleep(Duration::from_millis(1));
        }
        self.longest_ms.fetch_max(begin.elapsed().as_millis() as u64, Ordering::Relaxed);
        Ok(true)
    }
}

/// The sender's rounds, until an error or a stop.
pub fn send(channel: &ChannelProducer, source: &Region, gauge: &Gauge) -> Result<(), String> {
    let channel = channel.with_timeout(STILL).map_err(|error| error.to_string())?;
    while !gauge.stop.load(Ordering::Relaxed) {
        let begin = Instant::now();
        let mut bytes = pattern(SEED, gauge.read().0, LEN);
        if gauge.spoil.load(Ordering::Relaxed) {
            bytes[4321] ^= 1;
        }
        source.write(0, &bytes).map_err(|error| error.to_string())?;
        channel.put_signal_flush(0, 0, LEN).map_err(|error| error.to_string())?;
        if !gauge.signal(&channel, begin)? {
            break;
        }
        gauge.rounds.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}

/// The receiver's.
pub fn receive(channel: &ChannelProducer, destination: &Region, gauge: &Gauge) -> Result<(), String> {
    let channel = channel.with_timeout(STILL).map_err(|error| error.to_string())?;
    let mut seen = vec![0; LEN as usize];
    while gauge.signal(&channel, Instant::now())? {
        let round = gauge.read().0;
        destination.read(0, &mut seen).map_err(|error| error.to_string())?;
        let expected = pattern(SEED, round, LEN);
        if let Some(at) = seen.iter().zip(&expected).position(|(seen, expected)| seen != expected) {
            return Err(format!(
                "the witness: round {round}, byte {at} is {}, not {}",
                seen[at], expected[at]
            ));
        }
        gauge.rounds.fetch_add(1, Ordering::Relaxed);
        channel.signal(1).map_err(|error| error.to_string())?;
    }
    Ok(())
}

/// The conductor's side of it.
pub struct Witness {
    name: String,
    sender: usize,
    receiver: usize,
}

impl Witness {
    /// Connects two hosts and lets the rounds begin.
    pub fn start(hosts: &mut Hosts, sender: usize, receiver: usize) -> Result<Witness, String> {
        hosts.connect("witness", sender, receiver)?;
        Witness::over(hosts, "witness", sender, receiver)
    }

    /// Over a connection that is there.
    pub fn over(hosts: &mut Hosts, name: &str, sender: usize, receiver: usize) -> Result<Witness, String> {
        // The sender first: it waits for an answer of the receiver, as the receiver does for its first signal.
        hosts.ask(sender, &format!("witness {name} send"))?;
        hosts.ask(receiver, &format!("witness {name} receive"))?;
        let witness = Witness { name: name.to_owned(), sender, receiver };
        witness.goes_on(hosts)?;
        Ok(witness)
    }

    /// The rounds that the receiver has compared, and the milliseconds of the longest.
    pub fn rounds(&self, hosts: &mut Hosts) -> Result<(u64, u64), String> {
        let answer = hosts.ask(self.receiver, &format!("rounds {}", self.name))?;
        let numbers =
            answer.split_once(' ').and_then(|(a, b)| Some((a.parse().ok()?, b.trim().parse().ok()?)));
        numbers.ok_or_else(|| format!("rounds: {answer}"))
    }

    /// More rounds from now on.
    pub fn goes_on(&self, hosts: &mut Hosts) -> Outcome {
        let (before, begin) = (self.rounds(hosts)?.0, Instant::now());
        let limit = (ROUNDS as u32 + 1) * STILL;
        loop {
            let now = self.rounds(hosts)?.0;
            if now >= before + ROUNDS {
                return Ok(());
            }
            if begin.elapsed() > limit {
                return Err(format!("the witness went from round {before} to {now} in {limit:?}"));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// That it went on while a fault lasted that takes a time, by the rounds before and after.
    pub fn went_on(&self, before: u64, after: u64) -> Outcome {
        if after >= before + ROUNDS {
            return Ok(());
        }
        Err(format!("{} stood still during the fault: round {before} before it, {after} after it", self.name))
    }

    /// The control's: changes a byte.
    pub fn spoil(&self, hosts: &mut Hosts) -> Outcome {
        hosts.ask(self.sender, &format!("spoil {}", self.name)).map(drop)
    }

    /// The control's: the sender stops, and nobody tells the receiver.
    pub fn hold(&self, hosts: &mut Hosts) -> Outcome {
        hosts.ask(self.sender, &format!("stop {}", self.name)).map(drop)
    }

    /// More rounds after everything, and no end but by the stop.
    pub fn end(self, hosts: &mut Hosts) -> Outcome {
        if let Err(error) = self.goes_on(hosts) {
            let sender = hosts.end_of_stream(&self.name, self.sender, Instant::now(), 2 * STILL);
            return Err(format!("{error}; its sender: {sender:?}"));
        }
        let (rounds, longest_ms) = self.rounds(hosts)?;
        for host in [self.sender, self.receiver] {
            hosts.ask(host, &format!("stop {}", self.name))?;
            let (end, _) = hosts.end_of_stream(&self.name, host, Instant::now(), 2 * STILL)?;
            if end != "stopped" {
                return Err(format!("{} of host {host}: {end}", self.name));
            }
        }
        println!("  {}: {rounds} rounds, every byte right, none longer than {longest_ms} ms", self.name);
        Ok(())
    }
}
