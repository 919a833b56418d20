//! Memories of peers: how they are reached, and the cache of what is open.

use core::fmt;
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use core::time::Duration;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

use portway_fifo::cuda::Context;
use portway_fifo::memory::IpcHandle;
use portway_fifo::{Region, Words};
use portway_proxy::TransportError;

use crate::config::Way;
use crate::error::{Error, uuid};
use crate::memory::{Held, Hub, Local, lock};
use crate::message::{Memory, Place};
use crate::socket::{Line, Question, Request, Status};
use crate::word;

/// How an imported memory is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    /// The way that was open.
    pub way: Way,
    /// How many physical pieces its allocation has.
    pub pieces: usize,
    /// Whose it is.
    pub peer: String,
    /// The UUID of the peer's device.
    pub device: [u8; 16],
    /// Its length.
    pub len_bytes: u64,
}

impl fmt::Display for Description {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Description { way, pieces, peer, device, len_bytes } = self;
        write!(f, "{len_bytes} bytes of {peer} on {}, {way:?}, pieces: {pieces}", uuid(device))
    }
}

/// An allocation of another process, mapped here. Its mapping goes to the context's quarantine with the last share.
#[derive(Debug)]
struct Opened {
    region: Region,
    way: Way,
    /// Where it begins over there.
    base: u64,
    /// Something else lies at its addresses over there, so it was freed.
    stale: AtomicBool,
}

/// What keeps the memory.
#[derive(Debug)]
enum Kept {
    /// Of this process: where it is registered. Nothing is kept while no port has it bound.
    Here {
        transport: u64,
        index: u32,
        nonce: u64,
    },
    Opened(Arc<Opened>),
}

/// A memory of a peer.
#[derive(Debug)]
pub(crate) struct Remote {
    pub(crate) transport: u64,
    /// Where this device and, if it is host memory, this processor reach it.
    pub(crate) address: u64,
    pub(crate) len_bytes: u64,
    /// Whether it is host memory.
    pub(crate) host: bool,
    pub(crate) description: Description,
    kept: Kept,
    bound: AtomicUsize,
}

/// A share in a memory of a peer that a port has bound.
#[derive(Debug)]
pub(crate) struct HeldRemote {
    pub(crate) remote: Arc<Remote>,
    here: Option<Held>,
}

impl HeldRemote {
    /// Host memory as words, 8 bytes each.
    pub(crate) fn words(&self) -> Result<Words, TransportError> {
        let Remote { address, len_bytes, .. } = *self.remote;
        let around = match (&self.here, &self.remote.kept) {
            (Some(held), _) => held.region(),
            (None, Kept::Opened(opened)) => &opened.region,
            (None, Kept::Here { index, .. }) => {
                return Err(TransportError::Unknown { what: "signal word", index: *index });
            }
        };
        Ok(Words::new(around.slice(address - around.address(), len_bytes)?)?)
    }
}

impl Drop for HeldRemote {
    fn drop(&mut self) {
        self.remote.bound.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Every memory of a peer that a transport knows.
#[derive(Debug, Default)]
pub(crate) struct Imports {
    known: Mutex<HashMap<u32, Arc<Remote>>>,
    /// Of which hub, with which allocation number: a generation of its own for each use of an address.
    open: Mutex<HashMap<(u64, u64), Weak<Opened>>>,
}

impl Imports {
    pub(crate) fn add(&self, index: u32, remote: Remote) {
        lock(&self.known).insert(index, Arc::new(remote));
    }

    pub(crate) fn get(&self, index: u32) -> Option<Arc<Remote>> {
        lock(&self.known).get(&index).cloned()
    }

    /// The memory, which cannot be forgotten while the share lives.
    pub(crate) fn hold(
        &self,
        what: &'static str,
        index: u32,
        hub: &Hub,
    ) -> Result<HeldRemote, TransportError> {
        let unknown = || TransportError::Unknown { what, index };
        let known = lock(&self.known);
        let remote = known.get(&index).ok_or_else(unknown)?;
        let here = match &remote.kept {
            Kept::Here { transport, index, nonce } => {
                let held = hub.tables.hold(*transport, *index).filter(|held| held.nonce() == *nonce);
                Some(held.ok_or_else(unknown)?)
            }
            Kept::Opened(opened) if opened.stale.load(Ordering::Acquire) => {
                return Err(Error::Stale { peer: remote.description.peer.clone() }.into());
            }
            Kept::Opened(_) => None,
        };
        remote.bound.fetch_add(1, Ordering::AcqRel);
        Ok(HeldRemote { remote: remote.clone(), here })
    }

    /// Lets go of a memory that no port has bound.
    pub(crate) fn forget(&self, index: u32) -> Result<(), TransportError> {
        let mut known = lock(&self.known);
        let Some(remote) = known.get(&index) else {
            return Err(TransportError::Unknown { what: "imported memory", index });
        };
        let ports = remote.bound.load(Ordering::Acquire);
        if ports != 0 {
            return Err(TransportError::Busy { address: remote.address, ports });
        }
        known.remove(&index);
        Ok(())
    }

    /// Something that is open of the allocation.
    fn opened(&self, memory: &Memory) -> Option<Arc<Opened>> {
        lock(&self.open).get(&(memory.author.hub, memory.allocation))?.upgrade()
    }

    /// What is open of other allocations of the same hub that lie, or lay, at the same addresses.
    fn beside(&self, memory: &Memory) -> Vec<(u64, Arc<Opened>)> {
        let open = lock(&self.open);
        let end = |base: u64, len: u64| base.saturating_add(len);
        let others = open
            .iter()
            .filter(|((hub, allocation), _)| *hub == memory.author.hub && *allocation != memory.allocation);
        let live = others.filter_map(|(&(_, allocation), known)| Some((allocation, known.upgrade()?)));
        let meets = |known: &Opened| {
            known.base < end(memory.base, memory.allocation_len_bytes())
                && memory.base < end(known.base, known.region.len_bytes())
        };
        live.filter(|(_, known)| meets(known)).collect()
    }

    /// Takes note of what was opened.
    fn note(&self, memory: &Memory, opened: &Arc<Opened>) {
        let mut open = lock(&self.open);
        open.retain(|_, known| known.strong_count() > 0);
        open.insert((memory.author.hub, memory.allocation), Arc::downgrade(opened));
    }
}

/// What an import needs of the transport.
pub(crate) struct Importer<'a> {
    pub(crate) context: &'a Context,
    pub(crate) hub: &'a Hub,
    pub(crate) imports: &'a Imports,
    pub(crate) ways: &'a [Way],
    pub(crate) ask_timeout: Duration,
}

impl Importer<'_> {
    pub(crate) fn import(&self, bytes: &[u8]) -> Result<Remote, TransportError> {
        let memory = Memory::decode(bytes)?;
        let process = &memory.author.process;
        let peer = process.name(&self.hub.process);
        if !process.same_machine(&self.hub.process) {
            return Err(Error::OtherMachine { peer }.into());
        }
        if memory.author.hub == self.hub.id && self.ways.contains(&Way::SameProcess) {
            return self.here(&memory, peer);
        }
        let line = open_line(&memory.author, self.hub, self.ask_timeout)?;
        let request = Request {
            question: Question::Memory,
            transport: memory.author.transport,
            index: memory.index,
            nonce: memory.nonce,
        };
        self.granted(line.ask(&request)?.0, &memory, &peer)?;
        let opened = match self.imports.opened(&memory) {
            Some(opened) => opened,
            None => {
                let (region, way) = self.open(&memory, &line, request, &peer)?;
                let stale = AtomicBool::new(false);
                let opened = Arc::new(Opened { region, way, base: memory.base, stale });
                // Two allocations that are both live may share pieces; one that is not has been freed.
                for (id, other) in self.imports.beside(&memory) {
                    let question = Question::Allocation { id };
                    if line.ask(&Request { question, ..request })?.0 == Status::No {
                        other.stale.store(true, Ordering::Release);
                    }
                }
                self.imports.note(&memory, &opened);
                opened
            }
        };
        let region = opened.region.slice(memory.offset_bytes, memory.len_bytes)?;
        Ok(remote(&memory, peer, &region, opened.way, Kept::Opened(opened)))
    }

    /// Memory of a transport that this one knows.
    fn here(&self, memory: &Memory, peer: String) -> Result<Remote, TransportError> {
        let (transport, index, nonce) = (memory.author.transport, memory.index, memory.nonce);
        let local: Option<Arc<Local>> = self.hub.tables.get(transport, index);
        let Some(local) = local.filter(|local| local.nonce == nonce) else {
            return Err(Error::Released { peer, index }.into());
        };
        let region = &local.region;
        if region.len_bytes() != memory.len_bytes {
            return Err(TransportError::Malformed {
                what: "memory export",
                expected: format!("{} bytes", region.len_bytes()),
                seen: format!("{} bytes", memory.len_bytes),
            });
        }
        let owner = &local.allocation.context;
        if !self.context.can_reach(owner.ordinal())? {
            return Err(self.no_peer_access(memory).into());
        }
        self.context.reach(owner, region)?;
        Ok(remote(memory, peer, region, Way::SameProcess, Kept::Here { transport, index, nonce }))
    }

    fn no_peer_access(&self, memory: &Memory) -> Error {
        Error::NoPeerAccess { ours: self.context.attributes().uuid, theirs: memory.author.device }
    }

    fn granted(&self, status: Status, memory: &Memory, peer: &str) -> Result<(), Error> {
        let peer = peer.to_owned();
        match status {
            Status::Yes => Ok(()),
            Status::No => Err(Error::Released { peer, index: memory.index }),
            Status::Refused => Err(Error::Gone { peer, why: "it answers processes of its own user only" }),
            Status::Bad => Err(Error::Gone { peer, why: "it does not understand this version's requests" }),
        }
    }

    /// Opens the allocation in the first way that is open.
    fn open(
        &self,
        memory: &Memory,
        line: &Line,
        request: Request,
        peer: &str,
    ) -> Result<(Region, Way), TransportError> {
        if memory.place == Place::Shared {
            let mut handles = self.descriptors(memory, line, request, peer)?;
            let (Some((IpcHandle::Fd(descriptor), len_bytes)), true) = (handles.pop(), handles.is_empty())
            else {
                return Err(TransportError::Malformed {
                    what: "shared memory of the peer",
                    expected: "one descriptor".into(),
                    seen: format!("{} pieces", memory.pieces.len()),
                });
            };
            return Ok((word::open_shared(self.context, &descriptor, len_bytes)?, Way::Descriptor));
        }
        let device = self.context.driver().ordinal_of(&memory.author.device)?;
        if let Some(ordinal) = device {
            if !self.context.can_reach(ordinal)? {
                return Err(self.no_peer_access(memory).into());
            }
        }
        let mut tried = Vec::new();
        for &way in self.ways {
            let opened = match way {
                Way::SameProcess => continue,
                Way::Descriptor if memory.descriptors => self
                    .descriptors(memory, line, request, peer)
                    .map_err(|error| error.to_string())
                    .and_then(|handles| self.context.open_pieces(&handles).map_err(|e| e.to_string())),
                Way::Fabric if memory.pieces[0].fabric.is_some() => {
                    self.context.open_pieces(&fabric_handles(memory)).map_err(|error| error.to_string())
                }
                Way::Legacy => match &memory.legacy {
                    Some(_) if memory.author.process == self.hub.process => {
                        Err(Error::SameProcess.to_string())
                    }
                    Some(handle) => {
                        let len_bytes = memory.allocation_len_bytes();
                        self.context.open_legacy(handle, len_bytes).map_err(|error| error.to_string())
                    }
                    None => Err("it was not exported so".to_owned()),
                },
                _ => Err("it was not exported so".to_owned()),
            };
            match opened {
                Ok(region) => return Ok((region, way)),
                Err(why) => tried.push((way, why)),
            }
        }
        Err(self.diagnose(memory, device, tried, peer).into())
    }

    /// What is most probably behind it that no way was open.
    fn diagnose(&self, memory: &Memory, device: Option<u32>, tried: Vec<(Way, String)>, peer: &str) -> Error {
        let peer = peer.to_owned();
        if memory.author.process.has_ended(&self.hub.process) {
            return Error::Gone { peer, why: "its process has ended" };
        }
        let only_legacy = memory.legacy.is_some() && tried.iter().any(|(way, _)| *way == Way::Legacy);
        if memory.author.process == self.hub.process && only_legacy {
            return Error::SameProcess;
        }
        let error = Error::NoWay { peer, tried };
        match device {
            None => Error::Hidden {
                device: memory.author.device,
                visible: std::env::var("CUDA_VISIBLE_DEVICES").ok(),
                why: error.to_string(),
            },
            Some(_) => error,
        }
    }

    /// The descriptor of every piece, with the piece's length.
    fn descriptors(
        &self,
        memory: &Memory,
        line: &Line,
        request: Request,
        peer: &str,
    ) -> Result<Vec<(IpcHandle, u64)>, Error> {
        let mut handles: Vec<(IpcHandle, u64)> = Vec::new();
        while handles.len() < memory.pieces.len() {
            let question = Question::Descriptors { first: handles.len() as u32 };
            let (status, descriptors) = line.ask(&Request { question, ..request })?;
            self.granted(status, memory, peer)?;
            let missing = memory.pieces.len() - handles.len();
            if descriptors.is_empty() || descriptors.len() > missing {
                let why = "it sent another number of descriptors than its memory has pieces";
                return Err(Error::Gone { peer: peer.to_owned(), why });
            }
            for descriptor in descriptors {
                handles.push((IpcHandle::Fd(descriptor), memory.pieces[handles.len()].len_bytes));
            }
        }
        Ok(handles)
    }
}

fn fabric_handles(memory: &Memory) -> Vec<(IpcHandle, u64)> {
    let handle = |piece: &crate::message::Piece| Some((IpcHandle::Fabric(piece.fabric?), piece.len_bytes));
    memory.pieces.iter().filter_map(handle).collect()
}

fn remote(memory: &Memory, peer: String, region: &Region, way: Way, kept: Kept) -> Remote {
    Remote {
        transport: memory.author.transport,
        address: region.address(),
        len_bytes: region.len_bytes(),
        host: region.place().is_host(),
        description: Description {
            way,
            pieces: memory.pieces.len(),
            peer,
            device: memory.author.device,
            len_bytes: memory.len_bytes,
        },
        kept,
        bound: AtomicUsize::new(0),
    }
}

/// Connects to the hub of whoever wrote a message.
pub(crate) fn open_line(
    author: &crate::message::Author,
    hub: &Hub,
    timeout: Duration,
) -> Result<Line, Error> {
    let peer = author.process.name(&hub.process);
    if author.process.has_ended(&hub.process) {
        return Err(Error::Gone { peer, why: "its process has ended" });
    }
    let seen = author.process.namespace == hub.process.namespace;
    Line::open(author.hub, &peer, seen.then_some(author.process.pid), timeout)
}
