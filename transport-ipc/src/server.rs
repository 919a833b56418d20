//! [`Server`]: the thread of a hub that answers other processes. It makes no call of the driver.

use core::sync::atomic::{AtomicBool, Ordering};
use core::time::Duration;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::net::SocketFlags;

use crate::error::Error;
use crate::socket::{self, FDS_A_REPLY, Question, REQUEST_BYTES, Request, Status};

/// The most connections at a time. A new one beyond them is closed at once.
const MAX_CONNECTIONS: usize = 4096;

/// How long a connection may stay without an endpoint that keeps it.
const PATIENCE: Duration = Duration::from_secs(30);

/// Who knows the answers.
pub(crate) trait Answers: Send + Sync {
    /// Whether the memory is registered.
    fn memory(&self, request: &Request) -> bool;
    /// Descriptors of its pieces, from the first that is asked for, at most so many.
    fn descriptors(&self, request: &Request, first: usize, most: usize) -> Option<Vec<Arc<OwnedFd>>>;
    /// Whether a memory of the allocation with this number is registered.
    fn allocation(&self, id: u64) -> bool;
    /// Whether the endpoint is there.
    fn endpoint(&self, request: &Request) -> bool;
}

/// The thread ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Server {
    stopping: Arc<AtomicBool>,
    wake: Arc<OwnedFd>,
}

struct Connection {
    socket: OwnedFd,
    opened: Instant,
    /// The endpoint that keeps it, and whose end is told.
    endpoint: Option<Request>,
}

/// How often endpoints are looked after that somebody wants to know the end of: closing a port is a store that wakes nobody.
const ATTENTION: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };
const LONGEST: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

impl Server {
    /// Listens under the name of the hub with this number.
    pub(crate) fn start(hub: u64, answers: Arc<dyn Answers>) -> Result<Self, Error> {
        let listener = socket::new_socket()?;
        rustix::net::bind(&listener, &socket::address(hub)?).map_err(Error::system("naming a socket"))?;
        rustix::net::listen(&listener, 128).map_err(Error::system("listening on a socket"))?;
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let wake = rustix::event::eventfd(0, flags).map_err(Error::system("making an event descriptor"))?;
        let (stopping, wake) = (Arc::new(AtomicBool::new(false)), Arc::new(wake));
        let (stop, woken) = (stopping.clone(), wake.clone());
        let body = move || serve(&listener, &woken, &stop, &*answers);
        let thread = std::thread::Builder::new().name("portway-ipc-hub".into()).spawn(body);
        thread.map_err(|error| Error::System {
            operation: "starting a thread",
            errno: error.raw_os_error().unwrap_or(0),
        })?;
        Ok(Server { stopping, wake })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::Release);
        // If that fails, the thread sees it within its longest wait.
        let _ = rustix::io::write(&*self.wake, &1u64.to_ne_bytes());
    }
}

fn serve(listener: &OwnedFd, woken: &OwnedFd, stopping: &AtomicBool, answers: &dyn Answers) {
    let mut connections: Vec<Connection> = Vec::new();
    while !stopping.load(Ordering::Acquire) {
        let mut waits = vec![PollFd::new(woken, PollFlags::IN), PollFd::new(listener, PollFlags::IN)];
        waits.extend(connections.iter().map(|c| PollFd::new(&c.socket, PollFlags::IN)));
        let watches = connections.iter().any(|connection| connection.endpoint.is_some());
        let _ = rustix::event::poll(&mut waits, Some(if watches { &ATTENTION } else { &LONGEST }));
        let ready: Vec<bool> = waits.iter().map(|wait| !wait.revents().is_empty()).collect();
        drop(waits);
        let mut of_connections = ready[2..].iter();
        connections.retain_mut(|connection| {
            let ready = of_connections.next().copied().unwrap_or(false);
            let late = connection.endpoint.is_none() && connection.opened.elapsed() > PATIENCE;
            !late && (!ready || answer(connection, answers)) && !tell_end(connection, answers)
        });
        let mut accepted = 0;
        while let Ok(socket) =
            rustix::net::accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)
        {
            accepted += 1;
            if !is_ours(socket.as_fd()) {
                // Told, and closed at once: other users cannot use up our descriptors.
                let _ = socket::send(socket.as_fd(), &socket::encode_reply(Status::Refused, 0), &[]);
            } else if connections.len() < MAX_CONNECTIONS {
                connections.push(Connection { socket, opened: Instant::now(), endpoint: None });
            }
        }
        if ready[1] && accepted == 0 {
            // Out of descriptors, for example: what waits is seen again, but not at full speed.
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    // All that the hub had is gone.
    for connection in connections.iter().filter(|connection| connection.endpoint.is_some()) {
        let _ = socket::send(connection.socket.as_fd(), &socket::encode_reply(Status::No, 0), &[]);
    }
}

/// Tells whoever keeps the connection for an endpoint that this has ended. False if it has not.
fn tell_end(connection: &Connection, answers: &dyn Answers) -> bool {
    let ended = connection.endpoint.is_some_and(|endpoint| !answers.endpoint(&endpoint));
    if ended {
        // If that fails, the connection's end tells that something has ended.
        let _ = socket::send(connection.socket.as_fd(), &socket::encode_reply(Status::No, 0), &[]);
    }
    ended
}

/// Whether the process at the other end is this one's user's.
fn is_ours(socket: BorrowedFd<'_>) -> bool {
    socket::credentials(socket).is_ok_and(|(_, user)| user == socket::user())
}

/// Answers one request. False if the connection is to be closed.
fn answer(connection: &mut Connection, answers: &dyn Answers) -> bool {
    let socket = connection.socket.as_fd();
    // One byte more, so that a longer packet is seen to be one.
    let mut bytes = [0; REQUEST_BYTES + 1];
    let request = match socket::receive(socket, &mut bytes) {
        Ok((0, _)) => return false,
        // Descriptors that somebody sends are closed here.
        Ok((len, _)) => Request::decode(&bytes[..len]),
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return true,
        Err(rustix::io::Errno::MSGSIZE) => None,
        Err(_) => return false,
    };
    let mut fds = Vec::new();
    let status = match request {
        None => Status::Bad,
        Some(request) => {
            let known = match request.question {
                Question::Memory => answers.memory(&request),
                Question::Descriptors { first } => {
                    match answers.descriptors(&request, first as usize, FDS_A_REPLY) {
                        Some(found) => {
                            fds = found;
                            true
                        }
                        None => false,
                    }
                }
                Question::Allocation { id } => answers.allocation(id),
                Question::Endpoint => {
                    connection.endpoint = Some(request).filter(|request| answers.endpoint(request));
                    connection.endpoint.is_some()
                }
            };
            if known { Status::Yes } else { Status::No }
        }
    };
    let borrowed: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
    let sent = socket::send(socket, &socket::encode_reply(status, fds.len()), &borrowed);
    sent.is_ok() && matches!(status, Status::Yes | Status::No)
}
