//! One host: a device, a proxy, and connections by name, worked by commands that come on standard input.
//!
//! A command is a line of words, and so is its answer: `ok ...`, or `error ...` with the error's text. Bytes are written
//! in hexadecimal.

use std::collections::HashMap;
use std::io::{BufRead, Write, stdin, stdout};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use portway_fifo::{Fifo, Heap};
use portway_proxy::transport::{Endpoint, LocalMemory, Transport};
use portway_proxy::{ChannelConfig, ChannelProducer, Engine, FifoId, Idle, Proxy, RunConfig, Stop};
use portway_transport_ib::{Config, Ib};

use crate::Outcome;
use crate::immediate;
use crate::random::{self, Flow};
use crate::witness::{self, Gauge};

/// The length of each source and destination.
pub const MEMORY_BYTES: u64 = 16 << 20;
/// How long the engine lets an op be under way: longer than any settings of the transport take to give up here.
const DEADLINE: Duration = Duration::from_secs(20);

/// A connection in the making, and once it is made.
struct Connection {
    end: Option<Box<dyn Endpoint>>,
    source: LocalMemory,
    destination: LocalMemory,
    signal: LocalMemory,
    channel: Option<ChannelProducer>,
    stream: Option<Stream>,
}

/// A thread that puts without end, or is an end of a witness, until an error or a stop.
struct Stream {
    gauge: Arc<Gauge>,
    outcome: mpsc::Receiver<String>,
}

impl Stream {
    fn start(work: impl FnOnce(&Gauge) -> Outcome + Send + 'static) -> Stream {
        let (gauge, (sender, outcome)) = (Arc::new(Gauge::default()), mpsc::channel());
        let shared = gauge.clone();
        std::thread::spawn(move || {
            let result = work(&shared);
            let _ = sender.send(result.err().unwrap_or_else(|| "stopped".into()));
        });
        Stream { gauge, outcome }
    }
}

struct Host {
    ib: Ib,
    proxy: Proxy,
    fifo: FifoId,
    connections: HashMap<String, Connection>,
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub fn unhex(text: &str) -> Result<Vec<u8>, String> {
    let byte = |at| text.get(at..at + 2).and_then(|pair| u8::from_str_radix(pair, 16).ok());
    (0..text.len()).step_by(2).map(|at| byte(at).ok_or_else(|| "not hexadecimal".to_owned())).collect()
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string().replace('\n', " ")
}

/// Works until standard input ends, or for `life` at most.
pub fn run(device: &str, life: Duration) -> Outcome {
    // Whoever gave this host its work may be gone without closing the pipe.
    std::thread::spawn(move || {
        std::thread::sleep(life);
        eprintln!("a host of the test lived for {life:?} and ends");
        std::process::exit(3);
    });
    let mut host: Option<Host> = None;
    for line in stdin().lock().lines() {
        let line = line.map_err(text)?;
        let words: Vec<&str> = line.split_whitespace().collect();
        let answer = match (&words[..], &mut host) {
            (["open", timeout, retries, how], none) => {
                let config = Config {
                    device: Some(device.into()),
                    timeout: timeout.parse().unwrap_or(0),
                    retries: retries.parse().unwrap_or(0),
                    ..Config::default()
                };
                open(config, how).map(|opened| {
                    *none = Some(opened);
                    String::new()
                })
            }
            (words, Some(host)) => host.work(words),
            _ => Err("not open".into()),
        };
        let line = match answer {
            Ok(answer) => format!("ok {answer}\n"),
            Err(error) => format!("error {}\n", text(error)),
        };
        stdout().write_all(line.as_bytes()).map_err(text)?;
    }
    if let Some(host) = host {
        host.proxy.stop(Stop::Cancel);
    }
    Ok(())
}

/// `how`: `plain`, or `immediate` for writes that take a receive at the peer.
fn open(config: Config, how: &str) -> Result<Host, String> {
    let ib = match how {
        "immediate" => immediate::verbs().and_then(|verbs| Ib::open_with(&verbs, config)),
        _ => Ib::open(config),
    };
    let ib = ib.map_err(text)?;
    let mut engine = Engine::new(&Heap, portway_proxy::Config { deadline: DEADLINE, ..Default::default() })
        .map_err(text)?;
    let timeout = 2 * DEADLINE;
    let (fifo, consumer) =
        Fifo::new(&Heap, portway_fifo::Config { timeout, ..Default::default() }).map_err(text)?;
    let fifo = engine.add_fifo(fifo, consumer).map_err(text)?;
    let proxy =
        Proxy::start(engine, RunConfig { idle: Idle::Yield, ..RunConfig::default() }).map_err(text)?;
    Ok(Host { ib, proxy, fifo, connections: HashMap::new() })
}

impl Host {
    fn work(&mut self, words: &[&str]) -> Result<String, String> {
        match words {
            ["endpoint", name] => self.endpoint(name),
            ["connect", name, end, destination, signal] => {
                self.connect(name, unhex(end)?, unhex(destination)?, unhex(signal)?)
            }
            ["put", name, len, count] => {
                let (len, count) = (len.parse().map_err(text)?, count.parse().map_err(text)?);
                let start = Instant::now();
                puts(self.channel(name)?, len, count, &AtomicBool::new(false))?;
                Ok(format!("{:.3}", start.elapsed().as_secs_f64()))
            }
            ["stream", name, len] => {
                let (channel, len) = (self.channel(name)?.clone(), len.parse().map_err(text)?);
                self.connection(name)?.stream =
                    Some(Stream::start(move |gauge| puts(&channel, len, u64::MAX, &gauge.stop)));
                Ok(String::new())
            }
            ["witness", name, end] => {
                let (channel, sends) = (self.channel(name)?.clone(), *end == "send");
                let connection = self.connection(name)?;
                let memory = if sends { &connection.source } else { &connection.destination };
                let region = memory.region.clone();
                connection.stream = Some(Stream::start(move |gauge| match sends {
                    true => witness::send(&channel, &region, gauge),
                    false => witness::receive(&channel, &region, gauge),
                }));
                Ok(String::new())
            }
            ["rounds", name] => {
                let stream = self.stream(name)?;
                let (rounds, longest_ms) = stream.gauge.read();
                match stream.outcome.try_recv() {
                    Ok(end) => Err(end),
                    Err(_) => Ok(format!("{rounds} {longest_ms}")),
                }
            }
            ["spoil", name] => {
                self.stream(name)?.gauge.spoil.store(true, Ordering::Relaxed);
                Ok(String::new())
            }
            ["stop", name] => {
                self.stream(name)?.gauge.stop.store(true, Ordering::Relaxed);
                Ok(String::new())
            }
            ["outcome", name, millis] => {
                let within = Duration::from_millis(millis.parse().map_err(text)?);
                self.stream(name)?
                    .outcome
                    .recv_timeout(within)
                    .map_err(|_| format!("no end of the stream within {within:?}"))
            }
            ["wait", name, millis] => {
                let within = Duration::from_millis(millis.parse().map_err(text)?);
                let start = Instant::now();
                let channel = self.channel(name)?.with_timeout(within).map_err(text)?;
                // As many signals as come, until one does not.
                let error = loop {
                    if let Err(error) = channel.wait() {
                        break error;
                    }
                };
                Ok(format!("{:.3} {}", start.elapsed().as_secs_f64(), text(error)))
            }
            ["verify", name, len] => {
                let len: u64 = len.parse().map_err(text)?;
                let mut seen = vec![0; len as usize];
                self.connection(name)?.destination.region.read(0, &mut seen).map_err(text)?;
                match seen.iter().enumerate().position(|(at, &byte)| byte != stamp(at)) {
                    None => Ok(String::new()),
                    Some(at) => Err(format!("byte {at} is {}, not {}", seen[at], stamp(at))),
                }
            }
            ["release", name] => {
                let memory = self.connection(name)?.destination.clone();
                self.ib.release(&memory).map(|()| String::new()).map_err(text)
            }
            ["flows", name, seed, batches, of_host, control] => {
                let (seed, batches): (u64, u64) =
                    (seed.parse().map_err(text)?, batches.parse().map_err(text)?);
                let mut flows = Vec::new();
                for flow in 0..2u64 {
                    let connection = self.connection(&format!("{name}{flow}"))?;
                    let channel = connection.channel.clone().ok_or("not connected")?;
                    let memory = (connection.source.region.clone(), connection.destination.region.clone());
                    let sends = flow.to_string() == *of_host;
                    let spoils = sends && flow == 0 && *control == "spoilt";
                    flows.push(Flow { channel, memory, seed: seed + flow, batches, sends, spoils });
                }
                random::run(flows)
            }
            ["events"] => Ok(format!("{} {}", self.ib.events(), self.ib.link_is_up())),
            other => Err(format!("no command {other:?}")),
        }
    }

    fn connection(&mut self, name: &str) -> Result<&mut Connection, String> {
        self.connections.get_mut(name).ok_or_else(|| format!("no connection {name}"))
    }

    fn stream(&mut self, name: &str) -> Result<&Stream, String> {
        self.connection(name)?.stream.as_ref().ok_or_else(|| format!("{name} has no stream"))
    }

    fn channel(&mut self, name: &str) -> Result<&ChannelProducer, String> {
        self.connection(name)?.channel.as_ref().ok_or_else(|| format!("{name} is not connected"))
    }

    fn endpoint(&mut self, name: &str) -> Result<String, String> {
        let ib = &self.ib;
        let memory = || ib.register(&Heap.allocate(MEMORY_BYTES)?);
        let (source, destination) = (memory().map_err(text)?, memory().map_err(text)?);
        let signal = ib.signal_word().map_err(text)?;
        let (end, bytes) = ib.endpoint().map_err(text)?;
        let stamps: Vec<u8> = (0..1 << 20).map(stamp).collect();
        source.region.write(0, &stamps).map_err(text)?;
        let export = |memory| ib.export(memory).map(|bytes| hex(&bytes)).map_err(text);
        let answer = format!("{} {} {}", hex(&bytes), export(&destination)?, export(&signal)?);
        let connection =
            Connection { end: Some(end), source, destination, signal, channel: None, stream: None };
        self.connections.insert(name.into(), connection);
        Ok(answer)
    }

    fn connect(
        &mut self,
        name: &str,
        end: Vec<u8>,
        destination: Vec<u8>,
        signal: Vec<u8>,
    ) -> Result<String, String> {
        let destination = self.ib.import(&destination).map_err(text)?;
        let outbound = self.ib.import(&signal).map_err(text)?;
        let fifo = self.fifo;
        let connection = self.connections.get_mut(name).ok_or("no such endpoint")?;
        let port = connection.end.take().ok_or("connected before")?;
        let port = port.connect(&end, DEADLINE).map_err(text)?;
        let port = self.proxy.add_port(port).map_err(text)?;
        let channel = ChannelConfig {
            fifo,
            port,
            source: connection.source.clone(),
            destination,
            outbound,
            inbound: connection.signal.clone(),
        };
        let channel = self.proxy.add_channel(channel).map_err(text)?;
        connection.channel = Some(channel.producer().map_err(text)?);
        Ok(String::new())
    }
}

/// The byte at an offset of a source.
fn stamp(at: usize) -> u8 {
    (at as u32).wrapping_mul(2_654_435_761).to_be_bytes()[0]
}

/// So many puts with signals, a flush after every sixteenth and at the end.
fn puts(channel: &ChannelProducer, len: u64, count: u64, stop: &AtomicBool) -> Result<(), String> {
    let mut done = 0;
    while done < count && !stop.load(Ordering::Relaxed) {
        channel.put_signal(0, 0, len).map_err(text)?;
        done += 1;
        if done % 16 == 0 {
            channel.flush().map_err(text)?;
        }
    }
    channel.flush().map_err(text)
}
