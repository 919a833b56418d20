//! [`Executor`]: the thread of a port that calls the driver, so that the engine does not.

use core::time::Duration;
use std::sync::Arc;
use std::time::Instant;

use portway_fifo::cuda::Entered;

use crate::error::{Error, StalledIn};
use crate::link::{Link, Stage, Work, after};
use crate::socket::{End, Line};
use crate::track::Track;
use crate::transport::Inner;

/// A completion is written after so many ops, or so many bytes, even if more are waiting and nobody waits for it: so that
/// a port gets its places back. A value between two copies costs a few microseconds, in which nothing is copied.
const OPS_A_BATCH: usize = 32;
const BYTES_A_BATCH: u64 = 512 << 20;

/// How long the executor waits for more ops before it writes a completion that nobody waits for.
const QUIET: Duration = Duration::from_micros(10);

/// Looks for work between two looks at the clock, and works between two of these.
const LOOKS: usize = 64;
const WORKS_A_LOOK: u32 = 32;

/// How often the executor looks whether the peer still lives.
const LIVENESS: Duration = Duration::from_millis(10);

/// Of the stall limit, what the stream may take to get done when the peer is gone, before that is told.
const SETTLE_PART: u32 = 100;

/// The executor's sleep between two looks once it has been idle for a while.
const NAP: Duration = Duration::from_micros(50);

/// Between two looks at what a closed port has under way; and how often the driver is asked, where the word may not come.
const QUIESCE_NAP: Duration = Duration::from_micros(200);
const QUERY_EVERY: Duration = Duration::from_millis(100);
/// When the driver is asked although nothing has failed.
const QUERY_ANYWAY: Duration = Duration::from_secs(1);

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Executor {
    link: Arc<Link>,
    track: Track,
    open: Open,
    inner: Arc<Inner>,
    peer: Peer,
}

/// The other end, as an executor watches it.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) name: String,
    pub(crate) transport: u64,
    pub(crate) nonce: u64,
    /// To its process, if that is another one.
    pub(crate) line: Option<Line>,
}

impl Peer {
    /// What shows that it is not there any more. Does not wait.
    fn gone(&self, inner: &Inner) -> Option<&'static str> {
        const CLOSED: &str = "it has closed its port or its transport";
        match &self.line {
            None if inner.hub.tables.is_present(self.transport, self.nonce) => None,
            None => Some(CLOSED),
            Some(line) => match line.end()? {
                End::Closed => Some(CLOSED),
                End::Lost => Some("its process has ended"),
            },
        }
    }
}

/// What is in the stream behind the last completion.
#[derive(Clone, Copy, Debug)]
struct Open {
    ops: usize,
    bytes: u64,
    /// The ticket of the last op that a completion follows.
    completed: u64,
    /// The last work is a copy that a value blocks behind, where all streams share one connection.
    unprimed: bool,
}

/// What there is to do.
enum Next {
    Op(Work),
    /// A completion that somebody waits for.
    Completion,
    Nothing,
}

impl Executor {
    /// Starts the thread for a port.
    pub(crate) fn start(inner: &Arc<Inner>, track: Track, peer: Peer) -> Result<Arc<Link>, Error> {
        let link = Arc::new(Link::new(&track, inner.config.depth));
        let open = Open { ops: 0, bytes: 0, completed: link.submitted(), unprimed: false };
        let executor = Executor { link: link.clone(), track, open, inner: inner.clone(), peer };
        let thread = std::thread::Builder::new().name("portway-ipc".into()).spawn(move || executor.run());
        thread.map_err(|error| Error::System {
            operation: "starting a thread",
            errno: error.raw_os_error().unwrap_or(0),
        })?;
        Ok(link)
    }

    fn run(mut self) {
        {
            let stream = self.track.stream.clone();
            match self.link.in_driver(StalledIn::Driver, || stream.enter()) {
                Ok(entered) => self.serve(&entered),
                Err(error) => self.fail(self.refused("entering the context for copies", 0)(error)),
            }
        }
        // An executor serves its port for as long as that is there, and then ends within the limit.
        while !self.link.is_closed() {
            std::thread::sleep(QUIESCE_NAP);
        }
        self.peer.line = None;
        self.quiesce();
    }

    fn serve(&mut self, stream: &Entered<'_>) {
        let mut looked = Instant::now();
        // Since when there is nothing to do.
        let mut idle_since = None;
        let mut worked = 0u32;
        while !self.link.is_stopped() {
            let result = match self.look() {
                Next::Op(work) => self.submit(stream, work).map(|()| true),
                Next::Completion => self.complete(stream).map(|()| true),
                Next::Nothing => Ok(false),
            };
            let busy = result.unwrap_or_else(|error| {
                self.fail(error);
                true
            });
            if busy {
                idle_since = None;
                worked = worked.wrapping_add(1);
                // The clock takes its time, too.
                if worked % WORKS_A_LOOK != 0 {
                    continue;
                }
            }
            let now = Instant::now();
            if now - looked >= LIVENESS {
                looked = now;
                if let Some(why) = self.peer.gone(&self.inner) {
                    if let Err(error) = self.settle(stream) {
                        self.fail(error);
                    }
                    self.fail(Error::Gone { peer: self.peer.name.clone(), why });
                }
            }
            if busy {
                continue;
            }
            let idle = now - *idle_since.get_or_insert(now);
            if self.open.ops > 0 && idle >= QUIET {
                if let Err(error) = self.complete(stream) {
                    self.fail(error);
                }
            } else if idle < self.inner.config.spin || self.open.ops > 0 {
                std::thread::yield_now();
            } else {
                std::thread::sleep(NAP);
            }
        }
        if self.open.ops > 0 && self.link.error.get().is_none() {
            if let Err(error) = self.complete(stream) {
                self.fail(error);
            }
        }
    }

    /// Looks for something to do for a moment.
    fn look(&self) -> Next {
        for _ in 0..LOOKS {
            if let Some(work) = self.link.next(self.link.submitted()) {
                return Next::Op(work);
            }
            if self.is_wanted() {
                return Next::Completion;
            }
            core::hint::spin_loop();
        }
        Next::Nothing
    }

    /// Whether somebody waits for the completion of what is in the stream.
    fn is_wanted(&self) -> bool {
        self.open.ops > 0 && {
            let wanted = self.link.wanted();
            after(wanted, self.open.completed) && !after(wanted, self.link.submitted())
        }
    }

    /// Lets what is in the stream become complete. A peer may leave as soon as it sees a signal, before the completion
    /// behind that signal is written, or even asked for.
    fn settle(&mut self, stream: &Entered<'_>) -> Result<(), Error> {
        if self.open.ops > 0 {
            self.complete(stream)?;
        }
        let (start, limit) = (Instant::now(), self.inner.config.stall_limit / SETTLE_PART);
        while !self.link.is_done() && !self.link.is_stopped() && start.elapsed() < limit {
            std::thread::sleep(NAP);
        }
        Ok(())
    }

    /// The port will see it, and everything that waits is dropped.
    fn fail(&self, error: Error) {
        // The first one stays.
        let _ = self.link.error.set(error.into());
        self.link.stop();
    }

    /// The error of a call of the driver.
    fn refused(&self, operation: &'static str, len_bytes: u64) -> impl Fn(portway_fifo::Error) -> Error {
        move |source| Error::Driver { peer: self.peer.name.clone(), operation, len_bytes, source }
    }

    /// Puts an op into the stream, and a completion behind it if one is due.
    fn submit(&mut self, stream: &Entered<'_>, work: Work) -> Result<(), Error> {
        if work.len_bytes > 0 {
            // SAFETY: the port checked the op against its lane, whose memories it has bound: they are mapped for this
            // device until the port is quiesced, and accessed atomically only (contract of `Region::new`).
            let copied = self
                .link
                .in_driver(StalledIn::Copy, || unsafe { stream.copy(work.to, work.from, work.len_bytes) });
            copied.map_err(self.refused("copy", work.len_bytes))?;
            self.open.unprimed = true;
        }
        if work.word != 0 {
            self.prime()?;
            // SAFETY: the word is the lane's, bound like its memories, 8 bytes at a multiple of 8.
            let written = self
                .link
                .in_driver(StalledIn::WriteValue, || unsafe { stream.write_value(work.word, work.value) });
            written.map_err(self.refused("signal behind a copy", work.len_bytes))?;
        }
        self.link.set_submitted(work.ticket);
        self.open.ops += 1;
        self.open.bytes += work.len_bytes;
        let full =
            self.open.ops >= OPS_A_BATCH.min(self.inner.config.depth / 2) || self.open.bytes >= BYTES_A_BATCH;
        if full || work.flush || self.is_wanted() { self.complete(stream) } else { Ok(()) }
    }

    /// Puts the completion of all that it has into the stream.
    fn complete(&mut self, stream: &Entered<'_>) -> Result<(), Error> {
        self.prime()?;
        let (done, ticket) = (self.link.done.region().address(), self.link.submitted());
        // SAFETY: the track's own word, in page-locked memory that lives as long as the track.
        let written =
            self.link.in_driver(StalledIn::WriteValue, || unsafe { stream.write_value(done, ticket) });
        written.map_err(self.refused("completion of copies", self.open.bytes))?;
        self.open = Open { ops: 0, bytes: 0, completed: ticket, unprimed: false };
        Ok(())
    }

    /// Where all streams share one connection, a value blocks behind a copy of some kinds, but not behind one from the
    /// device to the host.
    fn prime(&mut self) -> Result<(), Error> {
        if self.inner.one_connection && core::mem::take(&mut self.open.unprimed) {
            let primed = self.link.in_driver(StalledIn::Copy, || self.track.stream.prime());
            primed.map_err(self.refused("copy that primes the stream, behind copies", self.open.bytes))?;
        }
        Ok(())
    }

    /// Waits until nothing that was submitted touches memory any more, and lets go of the memory.
    fn quiesce(self) {
        let Executor { link, track, inner, peer, .. } = self;
        link.drop_waiting();
        // After a failed call there may be work in the stream that no completion follows.
        let failed = link.error.get().is_some();
        let start = Instant::now();
        let mut asked = start;
        let clean = loop {
            if !failed && link.is_done() {
                break Some(true);
            }
            if start.elapsed() >= inner.config.quiesce_limit {
                break None;
            }
            if asked.elapsed() >= QUERY_EVERY && (failed || start.elapsed() >= QUERY_ANYWAY)
                || asked == start && failed
            {
                asked = Instant::now();
                match link.in_driver(StalledIn::Driver, || track.stream.is_idle()) {
                    Ok(false) => {}
                    // Idle; or the context has failed or is gone, and nothing of it runs any more.
                    Ok(true) => break Some(link.is_done()),
                    Err(_) => break Some(false),
                }
            }
            std::thread::sleep(QUIESCE_NAP);
        };
        let bound = link.take_bound();
        let memories = 3 * bound.len() as u64;
        let set_stage = link.stage_setter();
        match clean {
            Some(clean) => {
                drop(bound);
                if clean {
                    inner.rack.give_back(track);
                } else {
                    // The stream goes to the context's quarantine.
                    drop(track);
                }
                inner.closing.ended(memories);
                drop((inner, link));
                set_stage(Stage::Quiesced);
            }
            None => {
                // The device may still reach all of it: it stays as it is, for good.
                core::mem::forget((bound, track));
                let after = inner.config.quiesce_limit;
                let _ = link.error.set(Error::Unquiesced { peer: peer.name, after }.into());
                set_stage(Stage::GivenUp);
            }
        }
    }
}
