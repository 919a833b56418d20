//! An episode: two proxies are started, connected, used and ended as a [`Plan`] says, and leave nothing.
//!
//! Who makes the calls is either this process (a thread a caller) or a kernel (a block a caller): see [`crate::gpu`].

use std::error::Error;
use std::thread;
use std::time::{Duration, Instant};

use portway_fifo::{Fifo, Heap, Platform, Region};
use portway_proxy::transport::{LocalMemory, Transport};
use portway_proxy::{
    ChannelConfig, ChannelProducer, Config, Engine, FifoId, Idle, PortChannel, PortId, Proxy, RunConfig, Stop,
};

use crate::gpu::{Gpu, Prepared, Running};
use crate::plan::{Call, Dialogue, Ending, MAX_CALLS, PLACE_BYTES, Plan};

pub type Result<T> = core::result::Result<T, Box<dyn Error + Send + Sync>>;

/// No wait is longer.
pub const LIMIT: Duration = Duration::from_secs(20);
const LEN_BYTES: u64 = PLACE_BYTES * MAX_CALLS;

/// What a side stands on.
pub struct Ground<'a> {
    pub transport: &'a dyn Transport,
    /// Whose kernels make the calls, if not threads of this process.
    pub gpu: Option<&'a Gpu>,
    /// Data lies in the GPU's own memory; otherwise where the processor reaches it.
    pub in_device_memory: bool,
}

impl Ground<'_> {
    fn platform(&self) -> &dyn Platform {
        self.gpu.map_or(&Heap, |gpu| &gpu.context)
    }

    fn memory(&self) -> core::result::Result<Region, portway_fifo::Error> {
        match self.in_device_memory {
            true => self.platform().device_memory(LEN_BYTES),
            false => self.platform().host_memory(LEN_BYTES),
        }
    }

    /// Loopback takes any memory that both sides reach for a signal word; others make their own.
    fn word(&self) -> Result<LocalMemory> {
        match self.gpu {
            Some(gpu) if !self.in_device_memory => {
                Ok(self.transport.register(&gpu.context.host_memory(8)?)?)
            }
            _ => Ok(self.transport.signal_word()?),
        }
    }
}

/// One end of a connection.
struct End {
    memory: LocalMemory,
    word: LocalMemory,
}

/// A proxy to be, and what belongs to it.
struct Side<'a> {
    ground: &'a Ground<'a>,
    engine: Engine,
    ends: Vec<End>,
    fifos: Vec<(FifoId, Fifo)>,
    ports: Vec<PortId>,
    channels: Vec<PortChannel>,
}

impl<'a> Side<'a> {
    fn new(ground: &'a Ground<'a>, plan: &Plan) -> Result<Self> {
        // A lost op is found by the deadline, so then it is short.
        let deadline = if plan.ending == Ending::Lost { Duration::from_millis(100) } else { LIMIT };
        let config = Config { deadline, window: 32, ..Config::default() };
        let engine = Engine::new(ground.platform(), config)?;
        let (ends, fifos, ports, channels) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Ok(Side { ground, engine, ends, fifos, ports, channels })
    }

    fn add_end(&mut self) -> Result<()> {
        let memory = self.ground.transport.register(&self.ground.memory()?)?;
        self.ends.push(End { memory, word: self.ground.word()? });
        Ok(())
    }

    /// The configuration of a channel from the latest end to a peer's.
    fn channel(&self, fifo: FifoId, port: PortId, peer: (&dyn Transport, &End)) -> Result<ChannelConfig> {
        let end = self.ends.last().ok_or("no end")?;
        Ok(ChannelConfig {
            fifo,
            port,
            source: end.memory.clone(),
            destination: self.ground.transport.import(&peer.0.export(&peer.1.memory)?)?,
            outbound: self.ground.transport.import(&peer.0.export(&peer.1.word)?)?,
            inbound: end.word.clone(),
        })
    }

    fn add_channel(
        &mut self,
        slots: u64,
        port: Box<dyn portway_proxy::Port>,
        peer: (&dyn Transport, &End),
    ) -> Result<()> {
        let config = portway_fifo::Config { slots, timeout: LIMIT, ..Default::default() };
        let (fifo, consumer) = Fifo::new(self.ground.platform(), config)?;
        let id = self.engine.add_fifo(fifo.clone(), consumer)?;
        let port = self.engine.add_port(port)?;
        let config = self.channel(id, port, peer)?;
        self.channels.push(self.engine.add_channel(config)?);
        self.fifos.push((id, fifo));
        self.ports.push(port);
        Ok(())
    }
}

/// The byte of a source at an offset.
fn byte(dialogue: usize, offset: u64) -> u8 {
    (offset.wrapping_mul(31) >> 2) as u8 ^ (offset >> 9) as u8 ^ dialogue as u8 | 1
}

fn send(channel: &ChannelProducer, dialogue: &Dialogue) -> core::result::Result<(), portway_proxy::Error> {
    for (place, call) in dialogue.calls.iter().enumerate() {
        let at = place as u64 * PLACE_BYTES;
        match *call {
            Call::Put { len_bytes, signal: false } => drop(channel.put(at, at, len_bytes)?),
            Call::Put { len_bytes, signal: true } => drop(channel.put_signal(at, at, len_bytes)?),
            Call::Signal => drop(channel.signal(1)?),
            Call::Flush => channel.flush()?,
        }
    }
    channel.flush()?;
    channel.wait() // the receiver has them all
}

fn receive(channel: &ChannelProducer, dialogue: &Dialogue) -> core::result::Result<(), portway_proxy::Error> {
    for _ in 0..dialogue.signals() {
        channel.wait()?;
    }
    channel.signal(1)?;
    channel.flush()
}

/// Whether the destination has exactly what the puts of the dialogue wrote; if it was cut off, no other bytes than
/// those.
fn check(number: usize, dialogue: &Dialogue, destination: &LocalMemory, whole: bool) -> Result<()> {
    let mut seen = vec![0; LEN_BYTES as usize];
    destination.region.read(0, &mut seen)?;
    for (at, seen) in seen.iter().enumerate() {
        let (place, within) = (at / PLACE_BYTES as usize, at as u64 % PLACE_BYTES);
        let put =
            matches!(dialogue.calls.get(place), Some(Call::Put { len_bytes, .. }) if within < *len_bytes);
        let expected = if put { byte(number, at as u64) } else { 0 };
        if *seen != expected && (whole || *seen != 0) {
            let text = format!("dialogue {number}, byte {at}: expected {expected:#x}, seen {seen:#x}");
            return Err(text.into());
        }
    }
    Ok(())
}

/// Connects all dialogues between the two sides.
fn connect<'a>(plan: &Plan, grounds: &'a [Ground<'a>; 2]) -> Result<[Side<'a>; 2]> {
    let (mut a, mut b) = (Side::new(&grounds[0], plan)?, Side::new(&grounds[1], plan)?);
    let transports = [grounds[0].transport, grounds[1].transport];
    for number in 0..plan.dialogues.len() {
        a.add_end()?;
        b.add_end()?;
        let bytes: Vec<u8> = (0..LEN_BYTES).map(|at| byte(number, at)).collect();
        a.ends[number].memory.region.write(0, &bytes)?;
        let ((a_end, a_bytes), (b_end, b_bytes)) = (transports[0].endpoint()?, transports[1].endpoint()?);
        let (a_port, b_port) = thread::scope(|scope| {
            let other = scope.spawn(|| b_end.connect(&a_bytes, LIMIT));
            (a_end.connect(&b_bytes, LIMIT), other.join().expect("no panic"))
        });
        a.add_channel(plan.slots, a_port?, (transports[1], &b.ends[number]))?;
        b.add_channel(plan.slots, b_port?, (transports[0], &a.ends[number]))?;
    }
    Ok([a, b])
}

/// A new channel on a FIFO that was aborted, and one put over it.
fn after_abort(a: &mut Side<'_>, b: &mut Side<'_>, proxies: &[Option<Proxy>; 2]) -> Result<()> {
    let Some(proxy) = &proxies[0] else { return Err("the proxy is gone".into()) };
    let fifo = a.fifos[0].0;
    proxy.reset_fifo(fifo)?;
    a.add_end()?;
    b.add_end()?; // a signal word has one writer for good
    // The other channels of the port go on, and so does the port.
    let config = a.channel(fifo, a.ports[0], (b.ground.transport, b.ends.last().ok_or("no end")?))?;
    let channel = proxy.add_channel(config)?;
    match a.ground.gpu {
        None => Ok(channel.producer()?.put_signal_flush(0, 0, 1)?),
        Some(gpu) => {
            let put = Dialogue { calls: vec![Call::Put { len_bytes: 1, signal: true }] };
            let running = gpu.launch(gpu.prepare(&[(&channel, Role::Once(&put))])?)?;
            let result = running.result(0);
            running.end()?;
            result
        }
    }
}

/// What a caller does.
#[derive(Clone, Copy)]
pub enum Role<'a> {
    /// All calls, and then a wait for the receiver's answer.
    Send(&'a Dialogue),
    /// Waits for all signals of the sender, and answers.
    Receive(&'a Dialogue),
    /// All calls, and a flush.
    Once(&'a Dialogue),
}

/// The callers of one side: a producer each, for a thread each, or a kernel.
enum Callers {
    Threads(Vec<ChannelProducer>),
    Kernel(Running),
}

/// Callers of a kernel that is not launched yet.
type Ready<'a> = Option<(&'a Gpu, Prepared)>;

fn prepare<'a, 'b>(side: &Side<'a>, roles: impl Iterator<Item = Role<'b>>) -> Result<Ready<'a>> {
    let callers: Vec<_> = side.channels.iter().zip(roles).collect();
    side.ground.gpu.map(|gpu| Ok((gpu, gpu.prepare(&callers)?))).transpose()
}

impl Callers {
    fn begin(side: &Side<'_>, ready: Ready<'_>) -> Result<Self> {
        match ready {
            None => {
                let producers: core::result::Result<_, _> =
                    side.channels.iter().map(PortChannel::producer).collect();
                Ok(Callers::Threads(producers?))
            }
            Some((gpu, prepared)) => Ok(Callers::Kernel(gpu.launch(prepared)?)),
        }
    }

    /// Plays a role, or waits for the block that does.
    fn play(&self, number: usize, role: Role<'_>) -> Result<()> {
        match (self, role) {
            (Callers::Kernel(running), _) => running.result(number),
            (Callers::Threads(channels), Role::Receive(dialogue)) => {
                Ok(receive(&channels[number], dialogue)?)
            }
            (Callers::Threads(channels), Role::Send(dialogue) | Role::Once(dialogue)) => {
                Ok(send(&channels[number], dialogue)?)
            }
        }
    }

    fn end(self) -> Result<()> {
        match self {
            Callers::Threads(_) => Ok(()),
            Callers::Kernel(running) => running.end(),
        }
    }
}

/// Whether a caller gave up by itself. It must not: whatever ends an episode tells all.
fn timed_out(error: &(dyn Error + Send + Sync + 'static)) -> bool {
    use portway_proxy::Error::Fifo;
    let host = error.downcast_ref::<portway_proxy::Error>();
    matches!(host, Some(Fifo(portway_fifo::Error::Timeout { .. })))
        || error.downcast_ref::<crate::gpu::Refused>().is_some_and(|refused| refused.timed_out())
}

/// Carries the plan out.
pub fn run(plan: &Plan, grounds: &[Ground<'_>; 2]) -> Result<()> {
    let [mut a, mut b] = connect(plan, grounds)?;
    let engines = [&mut a, &mut b].map(|side| {
        let empty = Engine::new(&Heap, Config { max_channels: 1, ..Config::default() });
        empty.map(|empty| core::mem::replace(&mut side.engine, empty))
    });
    let mut proxies = [None, None];
    for (proxy, engine) in proxies.iter_mut().zip(engines) {
        let run = RunConfig { idle: Idle::Yield, ..RunConfig::default() };
        *proxy = Some(Proxy::start(engine?, run)?);
    }
    let whole = plan.ending == Ending::Drained;
    // All is allocated before the first kernel runs: an allocation may wait for it.
    let (to_receive, to_send) = (
        prepare(&b, plan.dialogues.iter().map(Role::Receive))?,
        prepare(&a, plan.dialogues.iter().map(Role::Send))?,
    );
    let (receivers, senders) = (Callers::begin(&b, to_receive)?, Callers::begin(&a, to_send)?);
    let (sent, reports) = thread::scope(|scope| {
        let mut threads = Vec::new();
        for (number, dialogue) in plan.dialogues.iter().enumerate() {
            let (senders, receivers) = (&senders, &receivers);
            threads.push(scope.spawn(move || senders.play(number, Role::Send(dialogue))));
            threads.push(scope.spawn(move || receivers.play(number, Role::Receive(dialogue))));
        }
        let stop = |proxies: &mut [Option<Proxy>; 2], how| {
            proxies.each_mut().map(|proxy| proxy.take().map(|proxy| proxy.stop(how)))
        };
        let mut reports = [None, None];
        if !whole {
            let started = Instant::now();
            while started.elapsed() < Duration::from_micros(plan.after_us) {
                thread::yield_now();
            }
        }
        match plan.ending {
            Ending::Aborted => [&a, &b].iter().for_each(|side| side.fifos[0].1.abort()),
            Ending::Cancelled => reports = stop(&mut proxies, Stop::Cancel),
            Ending::Closed => {
                for (proxy, side) in proxies.iter().zip([&a, &b]) {
                    if let Some(proxy) = proxy {
                        let _ = proxy.close_port(side.ports[0]); // ended already, or ends now
                    }
                }
            }
            Ending::Drained | Ending::Failed | Ending::Lost => {}
        }
        // A dialogue that goes on alone would wait for a peer that has ended: so those that ended end the others.
        let mut sent = Vec::new();
        for thread in threads {
            let result = thread.join().expect("no panic");
            if result.is_err() && reports[0].is_none() && plan.ending != Ending::Aborted {
                reports = stop(&mut proxies, Stop::Cancel);
            } else if result.is_err() {
                [&a, &b].iter().for_each(|side| side.fifos.iter().for_each(|(_, fifo)| fifo.abort()));
            }
            sent.push(result);
        }
        (sent, reports)
    });
    senders.end()?;
    receivers.end()?;
    for (at, result) in sent.iter().enumerate() {
        match result {
            Err(error) if whole => return Err(format!("call of caller {at}: {error}").into()),
            Err(error) if timed_out(&**error) => {
                return Err(
                    format!("caller {at} was told nothing of the end ({:?}): {error}", plan.ending).into()
                );
            }
            _ => {}
        }
    }
    for (number, dialogue) in plan.dialogues.iter().enumerate() {
        check(number, dialogue, &b.ends[number].memory, whole)?;
    }
    if plan.ending == Ending::Aborted {
        after_abort(&mut a, &mut b, &proxies)?;
    }
    let how = if whole { Stop::Drain { within: LIMIT } } else { Stop::Cancel };
    for (proxy, report) in proxies.into_iter().zip(reports) {
        let report = match (proxy, report) {
            (Some(proxy), _) => proxy.stop(how),
            (None, Some(report)) => report,
            (None, None) => return Err("a proxy without a report".into()),
        };
        // Loopback quiesces at once. An adapter may need longer than a stop waits: then the release below does.
        let late = plan.quiesces_at_once && !report.quiesced;
        if late || !report.quarantined.is_empty() || (whole && !report.drained) {
            return Err(format!("after {:?}: {report:?}", plan.ending).into());
        }
    }
    for side in [a, b] {
        for end in &side.ends {
            release(side.ground.transport, &end.memory)?;
            release(side.ground.transport, &end.word)?;
        }
    }
    Ok(())
}

/// What quiesced ports had bound is free, at once or as soon as the port is gone.
fn release(transport: &dyn Transport, memory: &LocalMemory) -> Result<()> {
    let started = Instant::now();
    loop {
        match transport.release(memory) {
            Ok(()) => return Ok(()),
            Err(error) if started.elapsed() > LIMIT => return Err(error.into()),
            Err(_) => thread::sleep(Duration::from_millis(1)),
        }
    }
}
