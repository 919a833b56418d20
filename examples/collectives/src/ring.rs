//! [`Rank`]: a member of a ring, and the two collectives.
//!
//! ```text
//!            put, signal ──▶                    put, signal ──▶
//!  rank r-1 ───────────────── rank r ──────────────────────────── rank r+1
//!            ◀── ready                          ◀── ready
//! ```
//!
//! A rank's memory is one **window**: a chunk for each rank, and behind them an inbox with a place for each step of a
//! reduction. Neighbours put straight into it. A rank that enters a collective tells the one before it that its window
//! may be written to, so nothing is put into a window whose owner still works on it.

use std::error::Error;
use std::time::Duration;

use portway_fifo::{Fifo, Heap};
use portway_proxy::transport::{LocalMemory, Transport};
use portway_proxy::{ChannelConfig, ChannelProducer, Config, Engine, Idle, Proxy, RunConfig, Stop};

use crate::machine::Machine;

/// How long anything may take. A rank whose neighbour has gone returns with an error after this.
pub const LIMIT: Duration = Duration::from_secs(20);

type Result<T> = core::result::Result<T, Box<dyn Error + Send + Sync>>;

pub struct Rank {
    rank: usize,
    ranks: usize,
    chunk_words: usize,
    window: LocalMemory,
    to_next: ChannelProducer,
    to_previous: ChannelProducer,
    proxy: Proxy,
}

/// A rank before its channels are made.
struct Member {
    window: LocalMemory,
    /// The next rank says here that it is ready, the one before that bytes have come.
    ready: LocalMemory,
    arrived: LocalMemory,
    engine: Engine,
}

/// Makes a ring of these machines, all of this process. Between processes the bytes of `export` and `endpoint` travel.
pub fn connect(machines: &[Machine], chunk_words: usize) -> Result<Vec<Rank>> {
    let ranks = machines.len();
    let window_bytes = 8 * chunk_words as u64 * (2 * ranks as u64 - 1);
    let mut members = Vec::new();
    for Machine { transport, allocate } in machines {
        members.push(Member {
            window: transport.register(&allocate(window_bytes)?)?,
            ready: transport.signal_word()?,
            arrived: transport.signal_word()?,
            engine: Engine::new(&Heap, Config { deadline: LIMIT, ..Config::default() })?,
        });
    }
    let mut to_next = Vec::new();
    let mut to_previous = Vec::new();
    for rank in 0..ranks {
        let next = (rank + 1) % ranks;
        let (mine, theirs) = (&machines[rank].transport, &machines[next].transport);
        let ((my_end, my_bytes), (their_end, their_bytes)) = (mine.endpoint()?, theirs.endpoint()?);
        // Both at the same time, as one may wait for the other.
        let (my_port, their_port) = std::thread::scope(|scope| {
            let theirs = scope.spawn(|| their_end.connect(&my_bytes, LIMIT));
            (my_end.connect(&their_bytes, LIMIT), theirs.join().expect("no panic"))
        });
        let (my_port, their_port) = (my_port?, their_port?);
        let there = &members[next];
        let (window, word) = (there.window.clone(), there.arrived.clone());
        let ready = members[rank].ready.clone();
        to_next.push(channel(&mut members[rank], &**mine, my_port, (&**theirs, &window, &word), ready)?);
        let (window, word) = (members[rank].window.clone(), members[rank].ready.clone());
        let arrived = members[next].arrived.clone();
        let back = (&**mine, &window, &word);
        to_previous.push(channel(&mut members[next], &**theirs, their_port, back, arrived)?);
    }
    to_previous.rotate_right(1); // the first was made for rank 1
    let mut made = Vec::new();
    for (rank, ((member, to_next), to_previous)) in
        members.into_iter().zip(to_next).zip(to_previous).enumerate()
    {
        let run = RunConfig { idle: Idle::Yield, ..RunConfig::default() };
        let proxy = Proxy::start(member.engine, run)?;
        made.push(Rank { rank, ranks, chunk_words, window: member.window, to_next, to_previous, proxy });
    }
    Ok(made)
}

/// A channel from a member to `there`: a peer's transport, window and signal word.
fn channel(
    member: &mut Member,
    transport: &dyn Transport,
    port: Box<dyn portway_proxy::Port>,
    there: (&dyn Transport, &LocalMemory, &LocalMemory),
    inbound: LocalMemory,
) -> Result<ChannelProducer> {
    let config = portway_fifo::Config { timeout: LIMIT, ..Default::default() };
    let (fifo, consumer) = Fifo::new(&Heap, config)?;
    let (peer, window, word) = there;
    let config = ChannelConfig {
        fifo: member.engine.add_fifo(fifo, consumer)?,
        port: member.engine.add_port(port)?,
        source: member.window.clone(),
        destination: transport.import(&peer.export(window)?)?,
        outbound: transport.import(&peer.export(word)?)?,
        inbound,
    };
    Ok(member.engine.add_channel(config)?.producer()?)
}

impl Rank {
    /// Writes this rank's window, from its first chunk on.
    pub fn write(&self, chunk: usize, words: &[u64]) -> Result<()> {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        Ok(self.window.region.write(self.at(chunk), &bytes)?)
    }

    /// Reads a place of the window: a chunk, or, from `ranks` on, a place of the inbox.
    pub fn read(&self, chunk: usize) -> Result<Vec<u64>> {
        let mut bytes = vec![0; 8 * self.chunk_words];
        self.window.region.read(self.at(chunk), &mut bytes)?;
        Ok(bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("8 bytes"))).collect())
    }

    fn at(&self, place: usize) -> u64 {
        8 * (place * self.chunk_words) as u64
    }

    /// Puts a place of this window into a place of the next rank's, and waits for the same from the one before.
    fn step(&self, from: usize, to: usize) -> Result<()> {
        self.to_next.put_signal(self.at(from), self.at(to), 8 * self.chunk_words as u64)?;
        Ok(self.to_previous.wait()?)
    }

    /// Nothing is put before the next rank has entered the collective too.
    fn enter(&self) -> Result<()> {
        self.to_previous.signal(1)?;
        Ok(self.to_next.wait()?)
    }

    /// Every rank's chunk reaches every window.
    pub fn all_gather(&self) -> Result<()> {
        self.enter()?;
        self.pass_on(self.rank)
    }

    /// Every chunk of every window becomes the sum of that chunk over all ranks.
    pub fn all_reduce(&self) -> Result<()> {
        self.enter()?;
        for step in 0..self.ranks - 1 {
            let (here, inbox) = (self.ranks + self.rank - step, self.ranks + step);
            self.step(here % self.ranks, inbox)?;
            let summed = (here - 1) % self.ranks;
            let sums: Vec<u64> = self
                .read(summed)?
                .into_iter()
                .zip(self.read(inbox)?)
                .map(|(mine, theirs)| mine.wrapping_add(theirs))
                .collect();
            self.write(summed, &sums)?;
        }
        // The last chunk that came is complete.
        self.pass_on((self.rank + 1) % self.ranks)
    }

    /// Passes a chunk on, and then each that comes, until all are everywhere.
    fn pass_on(&self, first: usize) -> Result<()> {
        for step in 0..self.ranks - 1 {
            let chunk = (self.ranks + first - step) % self.ranks;
            self.step(chunk, chunk)?;
        }
        Ok(self.to_next.flush()?) // this window may be written again
    }

    /// Ends the rank; complains if something was left.
    pub fn stop(self) -> Result<()> {
        let report = self.proxy.stop(Stop::Drain { within: LIMIT });
        if report.drained { Ok(()) } else { Err(format!("rank {}: {report:?}", self.rank).into()) }
    }
}
