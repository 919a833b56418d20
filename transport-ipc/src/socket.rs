//! Questions between processes over Unix sockets: is this memory still there, may I have its descriptors, are you alive.
//!
//! A hub listens under an abstract name, so there is no file to leave behind. Messages are packets of fixed length. Both
//! sides look at the other's credentials before anything else. Every wait has an end.

use core::mem::MaybeUninit;
use core::time::Duration;
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use crate::error::Error;

/// The most descriptors that go with one reply.
pub(crate) const FDS_A_REPLY: usize = 64;

pub(crate) const REQUEST_BYTES: usize = 40;
pub(crate) const REPLY_BYTES: usize = 16;

const MAGIC: u64 = u64::from_le_bytes(*b"pw-ipc\0\x01");

/// What is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Question {
    /// Whether a memory is still registered.
    Memory,
    /// For descriptors of its pieces, from this one on.
    Descriptors { first: u32 },
    /// Whether any memory of the allocation with this number is still registered.
    Allocation { id: u64 },
    /// Whether an endpoint is there. The connection then stays, so that its end tells that of the process.
    Endpoint,
}

/// A question about a memory or endpoint of a transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) question: Question,
    pub(crate) transport: u64,
    pub(crate) index: u32,
    pub(crate) nonce: u64,
}

impl Request {
    pub(crate) fn encode(&self) -> [u8; REQUEST_BYTES] {
        let (kind, first, number) = match self.question {
            Question::Memory => (1u32, 0, self.nonce),
            Question::Descriptors { first } => (2, first, self.nonce),
            Question::Endpoint => (3, 0, self.nonce),
            Question::Allocation { id } => (4, 0, id),
        };
        let mut bytes = [0; REQUEST_BYTES];
        bytes[..8].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[8..12].copy_from_slice(&kind.to_le_bytes());
        bytes[12..16].copy_from_slice(&first.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.transport.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.index.to_le_bytes());
        bytes[32..].copy_from_slice(&number.to_le_bytes());
        bytes
    }

    /// `None` for what is not a request.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        if bytes.len() != REQUEST_BYTES {
            return None;
        }
        let u64_at = |at: usize| u64::from_le_bytes(core::array::from_fn(|i| bytes[at + i]));
        let u32_at = |at: usize| u32::from_le_bytes(core::array::from_fn(|i| bytes[at + i]));
        let (transport, index, number) = (u64_at(16), u32_at(24), u64_at(32));
        let (question, nonce) = match (u32_at(8), u32_at(12)) {
            (1, 0) => (Question::Memory, number),
            (2, first) => (Question::Descriptors { first }, number),
            (3, 0) => (Question::Endpoint, number),
            (4, 0) => (Question::Allocation { id: number }, 0),
            _ => return None,
        };
        (u64_at(0) == MAGIC && u32_at(28) == 0).then_some(Request { question, transport, index, nonce })
    }
}

/// The answer to a request, without the descriptors that go with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    Yes,
    /// It is not there, or not any more.
    No,
    /// The request makes no sense.
    Bad,
    /// The asking process is another user's.
    Refused,
}

pub(crate) fn encode_reply(status: Status, descriptors: usize) -> [u8; REPLY_BYTES] {
    let mut bytes = [0; REPLY_BYTES];
    bytes[..8].copy_from_slice(&MAGIC.to_le_bytes());
    bytes[8..12].copy_from_slice(&(status as u32).to_le_bytes());
    bytes[12..].copy_from_slice(&(descriptors as u32).to_le_bytes());
    bytes
}

fn decode_reply(bytes: &[u8], descriptors: usize) -> Option<Status> {
    let statuses = [Status::Yes, Status::No, Status::Bad, Status::Refused];
    statuses.into_iter().find(|&status| encode_reply(status, descriptors) == bytes)
}

/// The name under which a hub listens.
pub(crate) fn address(hub: u64) -> Result<SocketAddrUnix, Error> {
    SocketAddrUnix::new_abstract_name(format!("portway-ipc-{hub:016x}").as_bytes())
        .map_err(Error::system("naming a socket"))
}

pub(crate) fn new_socket() -> Result<OwnedFd, Error> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map_err(Error::system("making a socket"))
}

/// Number and user of the process at the other end; the number is 0 if it is in a PID namespace that this one does not
/// see.
///
/// Asked for directly, because rustix's type has no room for that 0.
pub(crate) fn credentials(socket: BorrowedFd<'_>) -> Result<(u32, u32), Error> {
    use core::ffi::{c_int, c_uint, c_void};
    unsafe extern "C" {
        fn getsockopt(fd: c_int, level: c_int, name: c_int, value: *mut c_void, len: *mut c_uint) -> c_int;
    }
    const SOL_SOCKET: c_int = 1;
    const SO_PEERCRED: c_int = 17;
    let mut found = [0u32; 3];
    let mut len = size_of_val(&found) as c_uint;
    // SAFETY: the descriptor is open, and `found` has the length of `struct ucred`, three numbers of four bytes.
    let status = unsafe {
        getsockopt(socket.as_raw_fd(), SOL_SOCKET, SO_PEERCRED, found.as_mut_ptr().cast(), &mut len)
    };
    if status != 0 || len as usize != size_of_val(&found) {
        let errno = std::io::Error::last_os_error().raw_os_error().unwrap_or(0);
        return Err(Error::System { operation: "reading the peer's credentials", errno });
    }
    Ok((found[0], found[1]))
}

/// This process's user.
pub(crate) fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Sends a packet, with descriptors.
pub(crate) fn send(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_A_REPLY))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::TOOBIG);
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    let sent = rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags)?;
    if sent == bytes.len() { Ok(()) } else { Err(Errno::MSGSIZE) }
}

/// Receives a packet, of no bytes at the end of the stream, and the descriptors that came with it.
pub(crate) fn receive(socket: BorrowedFd<'_>, into: &mut [u8]) -> Result<(usize, Vec<OwnedFd>), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_A_REPLY))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let received = rustix::net::recvmsg(socket, &mut [IoSliceMut::new(into)], &mut control, flags)?;
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    if received.flags.intersects(ReturnFlags::CTRUNC | ReturnFlags::TRUNC) {
        return Err(Errno::MSGSIZE);
    }
    Ok((received.bytes, fds))
}

/// Waits until a socket has something to read, or the time is over. False if it is.
pub(crate) fn readable(socket: BorrowedFd<'_>, until: Instant) -> bool {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
        match rustix::event::poll(&mut [PollFd::new(&socket, PollFlags::IN)], Some(&timeout)) {
            Ok(0) => return false,
            Ok(_) => return true,
            Err(Errno::INTR) if Instant::now() < until => {}
            Err(_) => return false,
        }
    }
}

/// A connection to another process's hub.
#[derive(Debug)]
pub(crate) struct Line {
    socket: OwnedFd,
    peer: String,
    timeout: Duration,
}

impl Line {
    /// Connects to the hub of `peer`, its name in errors. `pid` is its number, if it is in this PID namespace.
    pub(crate) fn open(hub: u64, peer: &str, pid: Option<u32>, timeout: Duration) -> Result<Self, Error> {
        let gone = |why| Error::Gone { peer: peer.to_owned(), why };
        let (socket, address) = (new_socket()?, address(hub)?);
        let until = Instant::now() + timeout;
        loop {
            match rustix::net::connect(&socket, &address) {
                Ok(()) => break,
                Err(Errno::CONNREFUSED) => {
                    return Err(gone("nobody listens, in this network namespace, on the socket it named"));
                }
                // Its queue is full.
                Err(Errno::AGAIN | Errno::INTR) if Instant::now() < until => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(Errno::AGAIN | Errno::INTR) => return Err(gone("it takes no connections")),
                Err(errno) => return Err(Error::system("connecting to the peer's socket")(errno)),
            }
        }
        let (seen_pid, seen) = credentials(socket.as_fd())?;
        let expected = user();
        if seen != expected {
            return Err(Error::Refused { peer: peer.to_owned(), expected, seen });
        }
        if pid.is_some_and(|pid| pid != seen_pid) {
            return Err(gone("another process listens on the socket it named"));
        }
        Ok(Line { socket, peer: peer.to_owned(), timeout })
    }

    /// Asks, and waits for the answer, as long as the line's timeout.
    pub(crate) fn ask(&self, request: &Request) -> Result<(Status, Vec<OwnedFd>), Error> {
        self.ask_until(request, Instant::now() + self.timeout)
    }

    /// Asks, and waits for the answer until then.
    pub(crate) fn ask_until(
        &self,
        request: &Request,
        until: Instant,
    ) -> Result<(Status, Vec<OwnedFd>), Error> {
        let gone = |why| Error::Gone { peer: self.peer.clone(), why };
        loop {
            match send(self.socket.as_fd(), &request.encode(), &[]) {
                Ok(()) => break,
                Err(Errno::AGAIN | Errno::INTR) if Instant::now() < until => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(_) => return Err(gone("it takes no requests")),
            }
        }
        let mut bytes = [0; REPLY_BYTES];
        loop {
            if !readable(self.socket.as_fd(), until) {
                return Err(Error::Silent { peer: self.peer.clone(), after: self.timeout });
            }
            match receive(self.socket.as_fd(), &mut bytes) {
                Ok((0, _)) => return Err(gone("it closed the connection")),
                Ok((len, fds)) => {
                    let status = decode_reply(&bytes[..len], fds.len());
                    return status.map(|status| (status, fds)).ok_or(gone("its answer makes no sense"));
                }
                // A reset is told once, before what the peer sent last, or its end.
                Err(Errno::AGAIN | Errno::INTR | Errno::CONNRESET) => {}
                Err(errno) => return Err(Error::system("receiving from the peer's socket")(errno)),
            }
        }
    }

    /// Whether and how the other end has ended, which it says, or the connection's end says. Does not wait.
    pub(crate) fn end(&self) -> Option<End> {
        let mut bytes = [0; REPLY_BYTES];
        match receive(self.socket.as_fd(), &mut bytes) {
            Ok((len, fds)) => match decode_reply(&bytes[..len], fds.len()) {
                Some(Status::No) => Some(End::Closed),
                _ => Some(End::Lost),
            },
            Err(Errno::AGAIN | Errno::INTR) => None,
            Err(_) => Some(End::Lost),
        }
    }
}

/// How the other end of a line that stays has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// It has closed its port.
    Closed,
    /// The connection is gone, so its process is.
    Lost,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn no_bytes_make_a_request_panic_and_what_passes_is_one(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            if let Some(request) = Request::decode(&bytes) {
                prop_assert_eq!(&request.encode()[..], &bytes[..]);
            }
        }

        #[test]
        fn requests_come_back(first in any::<u32>(), transport in any::<u64>(), index in any::<u32>(), nonce in any::<u64>()) {
            for question in [Question::Memory, Question::Descriptors { first }, Question::Endpoint] {
                let request = Request { question, transport, index, nonce };
                prop_assert_eq!(Request::decode(&request.encode()), Some(request));
            }
            let question = Question::Allocation { id: nonce };
            let request = Request { question, transport, index, nonce: 0 };
            prop_assert_eq!(Request::decode(&request.encode()), Some(request));
        }
    }

    #[test]
    fn a_reply_that_lies_about_its_descriptors_is_none() {
        let reply = encode_reply(Status::Yes, 2);
        assert_eq!(decode_reply(&reply, 2), Some(Status::Yes));
        assert_eq!(decode_reply(&reply, 1), None);
        assert_eq!(decode_reply(&reply[..8], 2), None);
    }
}
