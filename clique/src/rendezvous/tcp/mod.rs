//! [`Tcp`]: participants that are processes, with a store inside participant 0.
//!
//! Each request is a frame, each answer another; a connection carries one request at a time, and a process opens another
//! one when it has more under way. So a post never stands behind a gather.
//!
//! The first connection of a process carries nothing but its goodbye, and is open as long as the process lives. So when the
//! last one of a process ends it has gone, and the store ends the gathers that wait for it.

mod answers;
mod connection;
mod reading;
mod seats;
mod server;
mod store;

use core::fmt;
use std::collections::HashMap;
use std::io::{ErrorKind, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::CliqueError;
use crate::rendezvous::board::Key;
use crate::rendezvous::identity::{Membership, fresh_instance, own_name, system};
use crate::rendezvous::wire::{Frame, Hello, MAX_ANSWER_BYTES, MAX_HELLO_BYTES, Wrong};
use crate::rendezvous::{
    Gathered, LINGER, Post, Rendezvous, Round, StayFor, check_message, end_of, has_ended,
};

use server::Server;

/// How much later than its limit a gather may learn what has come until then; whoever waits for it is more patient.
const ANSWER_MARGIN: Duration = Duration::from_millis(25);
/// How long a gather that is to end at once may take.
const AT_ONCE: Duration = Duration::from_millis(50);
/// How long a look waits for its answer.
const LOOK_WITHIN: Duration = Duration::from_secs(1);
/// How long before its limit a gather asks, at most, what has come until then.
const EARLY: Duration = Duration::from_millis(200);
/// How long to wait before the next try to connect to a store that is not there yet.
const RETRY: Duration = Duration::from_millis(5);

/// How a process takes part over TCP.
#[derive(Clone, Debug)]
pub struct TcpConfig {
    /// Who it is.
    pub member: Membership,
    /// Where participant 0 listens, and the others connect. An address of one interface, never that of all. Participant
    /// 0 may say port 0 and pass [`Tcp::address`] on.
    pub address: SocketAddr,
    /// The limit for coming up and for each post.
    pub within: Duration,
}

/// A participant over TCP. Participant 0's has the store, with a thread of its own, and needs a descriptor for each connection
/// there: two of each participant, and one more for each request that a process has under way beside another.
///
/// The end of a process is the end of its connections, also if it is killed: a quarter to a third of a second later the
/// gathers end that wait for it in vain, once they have waited as long. One that is stopped, whose host vanishes, or that has left a forked child behind has its connections still, and is
/// waited for to the limit.
///
/// Dropping it leaves, as [`close`](Self::close) does. But participant 0 stays for 2 s at most, and no longer than somebody
/// may need what it has: while a round is kept that not everybody has posted and gathered, and anybody is still there. After
/// that the others get an error from whatever they ask, so who goes on without participant 0 is to be waited for by `close`.
pub struct Tcp {
    member: Membership,
    address: SocketAddr,
    within: Duration,
    hello: Vec<u8>,
    /// Its end tells the store that this process has gone; there for as long as it has not.
    presence: Option<TcpStream>,
    /// Connections without a request. The lock is never held while waiting.
    idle: Mutex<Vec<TcpStream>>,
    whereabouts: Mutex<HashMap<u32, String>>,
    server: Option<Server>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Tcp {
    /// Becomes a participant: number 0 listens at the address, the others connect to it, and try again while nobody
    /// listens there.
    ///
    /// # Errors
    /// - [`CliqueError::Config`]: the membership makes no sense; the address is that of all interfaces; the store
    ///   refuses, because of the token, the number of participants, or since there is such a participant already;
    /// - [`CliqueError::Timeout`]: nobody listened, or whoever did has not answered;
    /// - [`CliqueError::Foreign`]: what listened is no store;
    /// - [`CliqueError::System`]: the system's own, such as an address that is not here, or is taken.
    pub fn start(config: TcpConfig) -> Result<Self, CliqueError> {
        let TcpConfig { member, mut address, within } = config;
        member.check()?;
        if address.ip().to_canonical().is_unspecified() {
            return Err(CliqueError::Config {
                what: "address of the store".to_owned(),
                expected: "that of one interface".to_owned(),
                seen: format!("{address}, which is all of them"),
            });
        }
        let hello = Frame::Hello(Hello {
            token: member.token.bytes().to_vec(),
            participant: member.participant,
            participants: member.participants,
            instance: fresh_instance()?,
            name: own_name(),
        });
        let server = if member.participant == 0 {
            let listening = |error| system(format!("listening at {address}"), error);
            let listener = TcpListener::bind(address).map_err(listening)?;
            let bound = listener.local_addr().map_err(listening)?;
            let server = Server::start(listener, &member)?;
            address = bound;
            Some(server)
        } else {
            None
        };
        let mut tcp = Tcp {
            member,
            address,
            within,
            hello: hello.encode(),
            presence: None,
            idle: Mutex::new(Vec::new()),
            whereabouts: Mutex::new(HashMap::new()),
            server,
        };
        tcp.presence = Some(tcp.connect(end_of(within))?);
        Ok(tcp)
    }

    /// Where the store listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Whom the store has turned away and why, the last 64 of them. Participant 0 knows, the others do not.
    pub fn turned_away(&self) -> Vec<CliqueError> {
        self.server.as_ref().map(Server::turned_away).unwrap_or_default()
    }

    /// Leaves. Participant 0 waits until the others have left too, so that none loses the store while it still needs it.
    ///
    /// # Errors
    /// [`CliqueError::Timeout`] at participant 0, naming who was still there; the store has ended nevertheless.
    pub fn close(mut self, within: Duration) -> Result<(), CliqueError> {
        self.leave(within, StayFor::Everybody)
    }

    fn leave(&mut self, within: Duration, stay_for: StayFor) -> Result<(), CliqueError> {
        // If it cannot be said, the ends of the connections say that this process has gone.
        if let Some(mut stream) = self.presence.take() {
            let _ = stream.set_nonblocking(true);
            let _ = stream.write_all(&Frame::Goodbye.encode());
        }
        lock(&self.idle).clear();
        match self.server.take() {
            Some(server) => server.close(within, stay_for),
            None => Ok(()),
        }
    }

    fn store(&self) -> String {
        format!("the store of participant 0 at {}", self.address)
    }

    fn timeout(&self, doing: &str, end: Instant, began: Instant, seen: &str) -> CliqueError {
        CliqueError::Timeout {
            what: doing.to_owned(),
            expected: format!("an answer of {}", self.store()),
            seen: seen.to_owned(),
            waited: end.saturating_duration_since(began),
        }
    }

    fn connect(&self, end: Instant) -> Result<TcpStream, CliqueError> {
        let doing = format!("connecting to {}", self.store());
        let began = Instant::now();
        let mut seen = "nothing".to_owned();
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(self.timeout(&doing, end, began, &seen));
            }
            match TcpStream::connect_timeout(&self.address, left) {
                // Nobody listens, but the system gave this end the very port that it asked for: it talks to itself.
                Ok(stream) if is_itself(&stream) => {
                    seen = "only this process itself".to_owned();
                    drop(stream);
                    std::thread::sleep(RETRY.min(left));
                }
                Ok(mut stream) => {
                    let nodelay = stream.set_nodelay(true);
                    nodelay.map_err(|error| system(doing.as_str(), error))?;
                    return match self.ask(&mut stream, &self.hello, end, MAX_HELLO_BYTES, &doing)? {
                        Frame::Welcome => Ok(stream),
                        other => Err(self.unexpected("a welcome", &other)),
                    };
                }
                // Participant 0 may not have begun; once it had, it has ended.
                Err(error) if error.kind() == ErrorKind::ConnectionRefused && self.presence.is_none() => {
                    seen = error.to_string();
                    std::thread::sleep(RETRY.min(left));
                }
                Err(error) if error.kind() == ErrorKind::TimedOut => seen = error.to_string(),
                Err(error) => return Err(system(doing, error)),
            }
        }
    }

    fn unexpected(&self, expected: &str, seen: &Frame) -> CliqueError {
        Wrong::new("answer", expected, seen.kind()).from(&self.store())
    }

    /// Sends a frame and reads the answer.
    fn ask(
        &self,
        stream: &mut TcpStream,
        frame: &[u8],
        end: Instant,
        most: usize,
        doing: &str,
    ) -> Result<Frame, CliqueError> {
        let began = Instant::now();
        let failed = |error: std::io::Error| match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => self.timeout(doing, end, began, "none"),
            _ => system(format!("{doing}: {}", self.store()), error),
        };
        reading::write_all(stream, frame, end).map_err(failed)?;
        let bytes = reading::read_frame(stream, end, most).map_err(|error| match error {
            reading::Error::Io(error) => failed(error),
            reading::Error::Wrong(wrong) => wrong.from(&self.store()),
        })?;
        match Frame::decode(&bytes, most).map_err(|wrong| wrong.from(&self.store()))? {
            Frame::Refused { what, expected, seen } => Err(CliqueError::Config { what, expected, seen }),
            frame => Ok(frame),
        }
    }

    /// What the store says of a round after a while, or at once if it is complete or has failed.
    fn gather_once(&self, key: &Key, within: Duration, end: Instant) -> Result<Gathered, CliqueError> {
        let frame = Frame::Gather { key: key.clone(), within };
        let answer = self.request(&frame, end + ANSWER_MARGIN, &format!("gather of {key}"))?;
        self.gathered(answer)
    }

    fn gathered(&self, answer: Frame) -> Result<Gathered, CliqueError> {
        let said = match answer {
            Frame::Gathered(said) if said.len() == self.member.participants as usize => said,
            other => return Err(self.unexpected("what everybody said", &other)),
        };
        let mut whereabouts = lock(&self.whereabouts);
        let said = said.into_iter().zip(0..).map(|(said, participant)| match said {
            Ok(post) => Some(post),
            Err(text) => {
                whereabouts.insert(participant, text);
                None
            }
        });
        Ok(Gathered(said.collect()))
    }

    /// One request, over a connection that nobody else uses meanwhile.
    fn request(&self, frame: &Frame, end: Instant, doing: &str) -> Result<Frame, CliqueError> {
        let idle = lock(&self.idle).pop();
        let mut stream = match idle {
            Some(stream) => stream,
            None => self.connect(end)?,
        };
        let answer = self.ask(&mut stream, &frame.encode(), end, MAX_ANSWER_BYTES, doing);
        // After a refusal the connection is as good as before; after anything else nobody knows what comes next.
        if matches!(answer, Ok(_) | Err(CliqueError::Config { .. })) {
            lock(&self.idle).push(stream);
        }
        answer
    }
}

/// Whether both ends of a connection are the same socket.
fn is_itself(stream: &TcpStream) -> bool {
    matches!((stream.local_addr(), stream.peer_addr()), (Ok(own), Ok(other)) if own == other)
}

impl Rendezvous for Tcp {
    fn participant(&self) -> u32 {
        self.member.participant
    }

    fn participants(&self) -> u32 {
        self.member.participants
    }

    fn post(&self, round: &Round, post: Post) -> Result<(), CliqueError> {
        check_message(round, &post)?;
        let key = Key::from(round);
        let doing = format!("post of {key}");
        match self.request(&Frame::Post { key, post }, end_of(self.within), &doing)? {
            Frame::Posted => Ok(()),
            other => Err(self.unexpected("that it has the post", &other)),
        }
    }

    /// Asks shortly before the limit, and again at the limit. So a store that is late with its last answer, on a busy
    /// machine, is told from one that does not answer.
    fn gather(&self, round: &Round, within: Duration) -> Result<Gathered, CliqueError> {
        let key = Key::from(round);
        // No time is a question of its own, which takes the time of an answer.
        let end = if within.is_zero() { Instant::now() + AT_ONCE } else { end_of(within) };
        let first = self.gather_once(&key, within - EARLY.min(within / 2), end)?;
        // Long before the limit the store ends a gather with gaps if it waits for somebody who has gone. No two clocks
        // differ by as much.
        let is_early = Instant::now() + 2 * EARLY < end;
        if within.is_zero() || has_ended(&first.0) || is_early {
            return Ok(first);
        }
        match self.gather_once(&key, end.saturating_duration_since(Instant::now()), end) {
            Err(CliqueError::Timeout { .. }) => Ok(first),
            other => other,
        }
    }

    fn look(&self, round: &Round) -> Result<Option<Gathered>, CliqueError> {
        let key = Key::from(round);
        let doing = format!("look at {key}");
        match self.request(&Frame::Look { key }, Instant::now() + LOOK_WITHIN, &doing)? {
            Frame::NotYet => Ok(None),
            answer => self.gathered(answer).map(Some),
        }
    }

    fn whereabouts(&self, participant: u32) -> Option<String> {
        lock(&self.whereabouts).get(&participant).cloned()
    }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        let _ = self.leave(LINGER, StayFor::Rounds);
    }
}

impl fmt::Debug for Tcp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tcp({} of {}, {})", self.member.participant, self.member.participants, self.address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_that_is_connected_to_itself_is_known() {
        use rustix::net::{AddressFamily, SocketType, bind, connect, socket};
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let other = TcpStream::connect(address).unwrap();
        assert!(!is_itself(&other));
        drop((listener, other));
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let itself = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        bind(&itself, &address).unwrap();
        connect(&itself, &address).unwrap();
        assert!(is_itself(&itself.into()));
    }
}
