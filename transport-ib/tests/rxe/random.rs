//! Random puts, signals and flushes between two hosts, both ways at a time, every byte checked.
//!
//! A flow is one direction. Sender and receiver draw the same numbers from the same seed. In each batch the sender fills
//! its source, puts pieces of it to places of the destination with gaps between them, and ends with a signal; the receiver
//! keeps an image of what its whole destination has to hold, compares, and signals back.

use std::time::{Duration, Instant};

use portway_fifo::Region;
use portway_proxy::ChannelProducer;

use crate::Outcome;
use crate::conductor::{Hosts, Spoiled};
use crate::host::MEMORY_BYTES;

/// One direction, on one of its hosts.
pub struct Flow {
    pub channel: ChannelProducer,
    /// Source and destination.
    pub memory: (Region, Region),
    pub seed: u64,
    pub batches: u64,
    pub sends: bool,
    /// The control: the sender changes one byte in its last batch.
    pub spoils: bool,
}

/// A small generator, so that a run can be repeated from its seed.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x2545_f491_4f6c_dd1d);
        (0..8).for_each(|_| {
            random.next();
        });
        random
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, limit: u64) -> u64 {
        (self.next() >> 11) % limit
    }

    /// A length, weighted so that 100,000 of them stay under 2 GiB.
    fn len_bytes(&mut self) -> u64 {
        let longest = match self.below(10_000) {
            0..5_000 => 64,
            5_000..8_500 => 4 << 10,
            8_500..9_920 => 64 << 10,
            9_920..9_996 => 1 << 20,
            _ => 8 << 20,
        };
        1 + self.below(longest)
    }
}

/// The puts of one batch on average.
const PUTS_A_BATCH: u64 = 16;

/// A put of a batch.
struct Put {
    source: u64,
    destination: u64,
    len_bytes: u64,
    /// A signal, a flush, both or none, with the put or after it.
    extras: u64,
}

/// What the sender does and the receiver expects in one batch. At least one put; they fit the memories.
fn batch(random: &mut Random) -> Vec<Put> {
    let count = 1 + random.below(2 * PUTS_A_BATCH - 1);
    let mut puts = Vec::new();
    let (mut source, mut destination) = (0, 0);
    for _ in 0..count {
        let (from, to) = (random.below(70), random.below(70));
        let (len_bytes, extras) = (random.len_bytes(), random.below(16));
        if source + from + len_bytes > MEMORY_BYTES || destination + to + len_bytes > MEMORY_BYTES {
            break;
        }
        puts.push(Put { source: source + from, destination: destination + to, len_bytes, extras });
        source += from + len_bytes;
        destination += to + len_bytes;
    }
    puts
}

/// The bytes of a source in one batch, up to `len`.
pub fn pattern(seed: u64, batch: u64, len: u64) -> Vec<u8> {
    let key = Random::new(seed ^ batch << 20).next() | 1;
    let mut bytes = Vec::with_capacity(len as usize + 8);
    let mut word = key;
    while (bytes.len() as u64) < len {
        word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(key);
        bytes.extend_from_slice(&word.to_be_bytes());
    }
    bytes.truncate(len as usize);
    bytes
}

fn end_of(puts: &[Put], end: impl Fn(&Put) -> u64) -> u64 {
    puts.iter().map(|put| end(put) + put.len_bytes).max().unwrap_or(0)
}

/// Puts of the flow, and their bytes.
type Total = (u64, u64);

impl Flow {
    fn run(&self) -> Result<Total, String> {
        let mut random = Random::new(self.seed);
        let (mut puts, mut bytes) = (0, 0);
        let mut image = vec![0u8; if self.sends { 0 } else { MEMORY_BYTES as usize }];
        for number in 0..self.batches {
            let plan = batch(&mut random);
            let done =
                if self.sends { self.send(number, &plan) } else { self.receive(number, &plan, &mut image) };
            done.map_err(|error| format!("flow of seed {}, batch {number}: {error}", self.seed))?;
            puts += plan.len() as u64;
            bytes += plan.iter().map(|put| put.len_bytes).sum::<u64>();
        }
        Ok((puts, bytes))
    }

    fn send(&self, number: u64, plan: &[Put]) -> Result<(), String> {
        let text = |error: portway_proxy::Error| error.to_string();
        let mut source = pattern(self.seed, number, end_of(plan, |put| put.source));
        if self.spoils && number + 1 == self.batches {
            source[plan[0].source as usize] ^= 1;
        }
        self.memory.0.write(0, &source).map_err(|error| error.to_string())?;
        for put in plan {
            let (from, to, len_bytes) = (put.source, put.destination, put.len_bytes);
            match put.extras {
                0 => self.channel.put_signal_flush(from, to, len_bytes).map_err(text)?,
                1 | 2 => self.channel.put_signal(from, to, len_bytes).map(drop).map_err(text)?,
                _ => self.channel.put(from, to, len_bytes).map(drop).map_err(text)?,
            }
            match put.extras {
                3 => self.channel.signal(2).map(drop).map_err(text)?,
                4 => self.channel.flush().map_err(text)?,
                _ => {}
            }
        }
        self.channel.signal(1).map_err(text)?;
        // The source may be written again once this is back.
        self.channel.flush().map_err(text)?;
        self.channel.wait().map_err(text)
    }

    fn receive(&self, number: u64, plan: &[Put], image: &mut [u8]) -> Result<(), String> {
        let signals: u64 = 1 + plan
            .iter()
            .map(|put| match put.extras {
                0..=2 => 1,
                3 => 2,
                _ => 0,
            })
            .sum::<u64>();
        for _ in 0..signals {
            self.channel.wait().map_err(|error| error.to_string())?;
        }
        let source = pattern(self.seed, number, end_of(plan, |put| put.source));
        for put in plan {
            let from = &source[put.source as usize..(put.source + put.len_bytes) as usize];
            image[put.destination as usize..(put.destination + put.len_bytes) as usize].copy_from_slice(from);
        }
        // A little past the last put as well: nothing else may have been written.
        let end = (end_of(plan, |put| put.destination) + 4096).min(MEMORY_BYTES) as usize;
        let mut seen = vec![0; end];
        self.memory.1.read(0, &mut seen).map_err(|error| error.to_string())?;
        if seen[..] != image[..end] {
            let at =
                seen.iter().zip(&image[..end]).position(|(seen, expected)| seen != expected).unwrap_or(0);
            let put =
                plan.iter().position(|p| (p.destination..p.destination + p.len_bytes).contains(&(at as u64)));
            return Err(format!(
                "byte {at} is {}, not {} (put {put:?} of {})",
                seen[at],
                image[at],
                plan.len()
            ));
        }
        if self.channel.poll().map_err(|error| error.to_string())? {
            return Err("a signal too many".into());
        }
        self.channel.signal(1).map(drop).map_err(|error| error.to_string())
    }
}

/// Runs the flows at the same time, a thread each.
pub fn run(flows: Vec<Flow>) -> Result<String, String> {
    let threads: Vec<_> = flows.into_iter().map(|flow| std::thread::spawn(move || flow.run())).collect();
    let (mut puts, mut bytes) = (0, 0);
    for thread in threads {
        let total = thread.join().map_err(|_| "a flow panicked".to_owned())??;
        puts += total.0;
        bytes += total.1;
    }
    Ok(format!("{puts} {bytes}"))
}

/// The batches of a flow that come to so many puts, and their bytes.
fn batches_for(seed: u64, puts: u64) -> (u64, Total) {
    let mut random = Random::new(seed);
    let (mut count, mut total) = (0, (0, 0));
    while total.0 < puts {
        let plan = batch(&mut random);
        total.0 += plan.len() as u64;
        total.1 += plan.iter().map(|put| put.len_bytes).sum::<u64>();
        count += 1;
    }
    (count, total)
}

/// So many puts between host 0 and host 1, half of them each way; over a wire that is spoilt, if told so.
pub fn two_hosts(seed: u64, puts: u64, netem: Option<&str>) -> Outcome {
    let mut hosts = Hosts::start(2, if netem.is_some() { 16 } else { 14 }, 6)?;
    for flow in 0..2 {
        hosts.connect(&format!("flow{flow}"), 0, 1)?;
    }
    let _spoiled = netem.map(|how| Spoiled::netem(&[0, 1], how)).transpose()?;
    between(&mut hosts, seed, puts)
}

/// The same over connections `flow0` and `flow1` that are there.
pub fn between(hosts: &mut Hosts, seed: u64, puts: u64) -> Outcome {
    flows(hosts, seed, puts, "whole")
}

/// The control of all runs: one byte that the sender changes is found.
pub fn a_changed_byte_is_found() -> Outcome {
    let mut hosts = Hosts::start(2, 14, 6)?;
    for flow in 0..2 {
        hosts.connect(&format!("flow{flow}"), 0, 1)?;
    }
    match flows(&mut hosts, 3, 200, "spoilt") {
        Err(error) if error.contains("byte") => Ok(()),
        other => Err(format!("a changed byte went unseen: {other:?}")),
    }
}

fn flows(hosts: &mut Hosts, seed: u64, puts: u64, control: &str) -> Outcome {
    let (a, b) = (batches_for(seed, puts / 2), batches_for(seed + 1, puts / 2));
    // Both flows run as many batches.
    let batches = a.0.max(b.0);
    println!(
        "random puts: seed {seed}, {batches} batches each way, about {} puts of {} MiB",
        a.1.0 + b.1.0,
        (a.1.1 + b.1.1) >> 20
    );
    let start = Instant::now();
    for host in 0..2 {
        hosts.tell(host, &format!("flows flow {seed} {batches} {host} {control}"))?;
    }
    let within = Duration::from_secs(60 + puts / 20);
    // The receiver of a changed byte says so at once; its sender waits for it in vain.
    for host in if control == "spoilt" { [1, 0] } else { [0, 1] } {
        let answer = hosts.answer(host, within)?;
        println!("random puts: host {host} has sent and checked {answer} (puts, bytes)");
    }
    println!("random puts: every byte right after {:.1} s", start.elapsed().as_secs_f64());
    Ok(())
}
