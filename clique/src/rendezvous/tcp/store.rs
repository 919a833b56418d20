//! [`Store`]: one thread that serves all connections and waits in one place.

use std::collections::{BTreeSet, HashMap};
use std::io::{self, ErrorKind};
use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{Timespec, epoll};

use crate::CliqueError;
use crate::rendezvous::board::{Board, Key};
use crate::rendezvous::identity::{JobToken, Membership, system};
use crate::rendezvous::tcp::answers::Answers;
use crate::rendezvous::tcp::connection::{Connection, Read1};
use crate::rendezvous::tcp::seats::Seats;
use crate::rendezvous::tcp::server::Shared;
use crate::rendezvous::wire::{Frame, Hello, Wrong};
use crate::rendezvous::{StayFor, end_of};

/// How long a connection may take to say whose it is.
const HELLO_WITHIN: Duration = Duration::from_secs(5);
/// How long a frame may take from its first byte to its last.
const FRAME_WITHIN: Duration = Duration::from_secs(10);
/// How long a peer may take none of an answer.
const WRITE_WITHIN: Duration = Duration::from_secs(60);
/// How long nothing is accepted when the system has no descriptor for it.
const ACCEPT_AGAIN: Duration = Duration::from_millis(50);
/// How many connections, beyond one a participant, may be there without having said whose they are. The oldest goes.
const MAX_STRANGERS: usize = 256;
/// How long a participant has to have gone, and a gather to have waited, before the gather ends because it waits in vain:
/// one whose connection broke may come back, and a short gather that is repeated keeps its pace.
const GONE_FOR: Duration = Duration::from_millis(250);
/// How often it is looked for gathers that wait in vain, while somebody has gone.
const LOOK_EVERY: Duration = Duration::from_millis(100);
const BACKLOG: i32 = 4096;
const EVENTS: usize = 256;

const LISTENER: u64 = 0;
const WAKE: u64 = 1;
const FIRST_CONNECTION: u64 = 2;

#[derive(Debug)]
pub(super) struct Store {
    epoll: rustix::fd::OwnedFd,
    listener: TcpListener,
    /// When to listen again, if not now.
    accept_again: Option<Instant>,
    shared: Arc<Shared>,
    token: JobToken,
    seats: Seats,
    board: Board,
    /// By number; none is used twice, so an event of one that is gone finds nothing.
    connections: HashMap<u64, Connection>,
    next: u64,
    due: BTreeSet<(Instant, u64)>,
    strangers: BTreeSet<u64>,
    gathering: HashMap<Key, BTreeSet<u64>>,
    /// When it was last looked for gathers that wait in vain.
    looked: Instant,
    answers: Answers,
}

impl Store {
    pub(super) fn new(listener: TcpListener, member: &Membership, shared: Arc<Shared>) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        rustix::net::listen(&listener, BACKLOG)?; // the standard library's is too short for a job that starts at once
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &listener, epoll::EventData::new_u64(LISTENER), epoll::EventFlags::IN)?;
        epoll::add(&epoll, &shared.wake, epoll::EventData::new_u64(WAKE), epoll::EventFlags::IN)?;
        Ok(Store {
            epoll,
            listener,
            accept_again: None,
            shared,
            token: member.token.clone(),
            seats: Seats::new(member.participants),
            board: Board::new(member.participants),
            connections: HashMap::new(),
            next: FIRST_CONNECTION,
            due: BTreeSet::new(),
            strangers: BTreeSet::new(),
            gathering: HashMap::new(),
            looked: Instant::now(),
            answers: Answers::default(),
        })
    }

    /// Serves until its owner closes it, and then while it has to stay, to the owner's limit at most.
    pub(super) fn run(mut self) -> Result<(), CliqueError> {
        let mut events = Vec::with_capacity(EVENTS);
        let mut closing_since = None;
        loop {
            let closing = self.shared.closing();
            if let Some((end, stay_for)) = closing {
                let since = *closing_since.get_or_insert_with(Instant::now);
                if self.seats.nobody_is_here() || stay_for == StayFor::Rounds && self.has_nothing_to_do() {
                    return Ok(());
                }
                if Instant::now() >= end {
                    return Err(CliqueError::Timeout {
                        what: "closing the store".to_owned(),
                        expected: "every participant to leave".to_owned(),
                        seen: self.seats.who_is_here(),
                        waited: since.elapsed(),
                    });
                }
            }
            let first_due = self.due.first().map(|(at, _)| *at);
            let times = [first_due, closing.map(|(end, _)| end), self.accept_again, self.look_at()];
            let next = times.into_iter().flatten().min();
            self.wait(&mut events, next).map_err(|error| system("the store", error))?;
            for event in events.drain(..) {
                let (flags, data): (epoll::EventFlags, epoll::EventData) = (event.flags, event.data);
                match data.u64() {
                    LISTENER => self.accept(),
                    WAKE => drop(rustix::io::read(&self.shared.wake, &mut [0; 8])),
                    id => self.ready(id, flags),
                }
            }
            self.expire(Instant::now());
        }
    }

    /// Every round is over, and whoever asked has its answer.
    fn has_nothing_to_do(&self) -> bool {
        let is_busy = |connection: &Connection| connection.has_to_write() || connection.has_part_of_a_frame();
        self.board.open_rounds() == 0 && self.gathering.is_empty() && !self.connections.values().any(is_busy)
    }

    /// Waits for events until `next`.
    fn wait(&self, events: &mut Vec<epoll::Event>, next: Option<Instant>) -> io::Result<()> {
        let wait = next.map(|next| next.saturating_duration_since(Instant::now()));
        let wait = wait.map(|wait| Timespec {
            tv_sec: i64::try_from(wait.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: wait.subsec_nanos().into(),
        });
        match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(events), wait.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Takes in some of those who wait to be; the rest is another event.
    fn accept(&mut self) {
        for _ in 0..EVENTS {
            match self.listener.accept() {
                Ok((stream, from)) => {
                    let id = self.next;
                    self.next += 1;
                    let data = epoll::EventData::new_u64(id);
                    let made = stream
                        .set_nonblocking(true)
                        .and_then(|()| stream.set_nodelay(true))
                        .and_then(|()| Ok(epoll::add(&self.epoll, &stream, data, epoll::EventFlags::IN)?));
                    if made.is_err() {
                        continue; // the connection is closed with `stream`
                    }
                    self.connections.insert(id, Connection::new(stream, from));
                    self.set_due(id, Some(Instant::now() + HELLO_WITHIN));
                    self.strangers.insert(id);
                    if self.strangers.len() > MAX_STRANGERS + self.seats.len() {
                        let oldest = self.strangers.first().copied().unwrap_or(id);
                        self.turn_away(oldest, Wrong::new("greeting", "before many others", "none"), false);
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    // No descriptor is left, for example. Looking again at once would find the same.
                    let _ = epoll::delete(&self.epoll, &self.listener);
                    self.accept_again = Some(Instant::now() + ACCEPT_AGAIN);
                    self.shared.turn_away(system("accepting a connection", error));
                    return;
                }
            }
        }
    }

    fn ready(&mut self, id: u64, flags: epoll::EventFlags) {
        if flags.contains(epoll::EventFlags::OUT) {
            self.flush(id);
        }
        let Some(connection) = self.connections.get_mut(&id) else { return };
        if connection.has_to_write() {
            // A peer that is gone is seen by writing to it.
            if flags.intersects(epoll::EventFlags::ERR | epoll::EventFlags::HUP) {
                self.drop_connection(id);
            }
            return;
        }
        match connection.read() {
            Ok(Read1::Nothing) => {
                if connection.has_part_of_a_frame()
                    && connection.participant.is_some()
                    && connection.due.is_none()
                {
                    self.set_due(id, Some(Instant::now() + FRAME_WITHIN));
                }
            }
            Ok(Read1::End) | Err(_) => self.drop_connection(id),
            Ok(Read1::Wrong(wrong)) => self.turn_away(id, wrong, true),
            Ok(Read1::Frame(frame)) => {
                self.set_due(id, None);
                self.serve(id, frame);
            }
        }
    }

    fn serve(&mut self, id: u64, frame: Frame) {
        let participant = self.connections.get(&id).and_then(|connection| connection.participant);
        match (participant, frame) {
            (None, Frame::Hello(hello)) => self.greet(id, hello),
            (Some(participant), Frame::Post { key, post }) => {
                let ended = match self.board.post(participant, &key, post) {
                    Ok(ended) => {
                        self.send(id, Arc::new(Frame::Posted.encode()));
                        ended
                    }
                    Err(error) => {
                        self.refuse(id, error);
                        false
                    }
                };
                self.answers.forget_gaps();
                if ended {
                    self.wake(&key);
                }
            }
            (Some(_), Frame::Gather { key, within }) => {
                self.set_due(id, Some(end_of(within)));
                self.gathering.entry(key.clone()).or_default().insert(id);
                self.board.begin_wait(&key);
                if let Some(connection) = self.connections.get_mut(&id) {
                    connection.gathering = Some((key, Instant::now()));
                }
                self.answer_gather(id, within.is_zero());
            }
            (Some(_), Frame::Look { key }) => match self.board.look(&key) {
                Ok(None) => self.send(id, Arc::new(Frame::NotYet.encode())),
                Ok(Some(said)) => {
                    let bytes = self.answers.encode(said, &self.seats);
                    self.send(id, bytes);
                }
                Err(error) => self.refuse(id, error),
            },
            (Some(participant), Frame::Goodbye) => {
                self.seats.goodbye(participant);
                self.drop_connection(id);
            }
            (participant, frame) => {
                let expected =
                    if participant.is_some() { "post, gather, look or goodbye" } else { "greeting" };
                self.turn_away(id, Wrong::new("frame", expected, frame.kind()), true);
            }
        }
    }

    fn greet(&mut self, id: u64, hello: Hello) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let from = connection.from;
        let wrong = if hello.token != self.token.bytes() {
            Err(Wrong::new(
                "job token",
                "that of this job",
                format!("another one, of {} bytes", hello.token.len()),
            ))
        } else {
            self.seats.sit(&hello, from)
        };
        match wrong {
            Ok(()) => {
                connection.participant = Some(hello.participant);
                self.strangers.remove(&id);
                self.send(id, Arc::new(Frame::Welcome.encode()));
            }
            Err(wrong) => {
                let peer = format!("participant {}, {}, from {from}", hello.participant, hello.name);
                self.turn_away_as(id, wrong, true, peer);
            }
        }
    }

    /// Answers whoever waits in this round, or in those that it has ended.
    fn wake(&mut self, key: &Key) {
        let of_key = |other: &Key| other.clique == key.clique && other.attempt <= key.attempt;
        let ids = self.gathering.iter().filter(|(other, _)| of_key(other)).flat_map(|(_, ids)| ids).copied();
        for id in ids.collect::<Vec<_>>() {
            self.answer_gather(id, false);
        }
    }

    /// Answers a gather if it may end now, and if it is `over` in any case.
    fn answer_gather(&mut self, id: u64, over: bool) {
        let Some(connection) = self.connections.get(&id) else { return };
        let (Some((key, _)), Some(participant)) = (&connection.gathering, connection.participant) else {
            return;
        };
        match self.board.gather(participant, key, over) {
            Ok(None) => {}
            Ok(Some(said)) => {
                self.gathered(id);
                let bytes = self.answers.encode(said, &self.seats);
                self.send(id, bytes);
            }
            Err(error) => {
                self.gathered(id);
                self.refuse(id, error);
            }
        }
    }

    /// A connection does not wait in its round any more.
    fn gathered(&mut self, id: u64) {
        self.set_due(id, None);
        let gathering = self.connections.get_mut(&id).and_then(|connection| connection.gathering.take());
        let Some((key, _)) = gathering else { return };
        self.board.end_wait(&key);
        if let Some(ids) = self.gathering.get_mut(&key) {
            ids.remove(&id);
            if ids.is_empty() {
                self.gathering.remove(&key);
            }
        }
    }

    fn refuse(&mut self, id: u64, error: CliqueError) {
        let refused = match error {
            CliqueError::Config { what, expected, seen } => Frame::Refused { what, expected, seen },
            other => Frame::Refused { what: other.to_string(), expected: String::new(), seen: String::new() },
        };
        self.send(id, Arc::new(refused.encode()));
    }

    fn turn_away(&mut self, id: u64, wrong: Wrong, say_so: bool) {
        let Some(connection) = self.connections.get(&id) else { return };
        let peer = match connection.participant {
            Some(participant) => self.seats.name(participant),
            None => format!("somebody at {}", connection.from),
        };
        self.turn_away_as(id, wrong, say_so, peer);
    }

    fn turn_away_as(&mut self, id: u64, wrong: Wrong, say_so: bool, peer: String) {
        self.shared.turn_away(wrong.clone().from(&peer));
        if !say_so {
            return self.drop_connection(id);
        }
        self.gathered(id);
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.last_words = true;
            let Wrong { what, expected, seen } = wrong;
            let what = format!("the store turns away {peer}: {what}");
            self.send(id, Arc::new(Frame::Refused { what, expected, seen }.encode()));
        }
    }

    fn send(&mut self, id: u64, bytes: Arc<Vec<u8>>) {
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.push(bytes);
            self.flush(id);
        }
    }

    fn flush(&mut self, id: u64) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let Ok(some) = connection.write() else { return self.drop_connection(id) };
        let (more, last_words) = (connection.has_to_write(), connection.last_words);
        if !more && last_words {
            return self.drop_connection(id);
        }
        let flags = if more { epoll::EventFlags::OUT } else { epoll::EventFlags::IN };
        let changed = epoll::modify(&self.epoll, connection.stream(), epoll::EventData::new_u64(id), flags);
        if changed.is_err() {
            return self.drop_connection(id);
        }
        if !more {
            self.set_due(id, None);
        } else if some || connection.due.is_none() {
            self.set_due(id, Some(Instant::now() + WRITE_WITHIN));
        }
    }

    fn set_due(&mut self, id: u64, due: Option<Instant>) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        if let Some(old) = connection.due.take() {
            self.due.remove(&(old, id));
        }
        connection.due = due;
        self.due.extend(due.map(|at| (at, id)));
    }

    fn expire(&mut self, now: Instant) {
        if self.accept_again.is_some_and(|again| again <= now) {
            let data = epoll::EventData::new_u64(LISTENER);
            let again = epoll::add(&self.epoll, &self.listener, data, epoll::EventFlags::IN);
            self.accept_again = again.err().map(|_| now + ACCEPT_AGAIN);
        }
        if self.look_at().is_some_and(|at| at <= now) {
            self.end_in_vain(now);
        }
        while let Some((at, id)) = self.due.first().copied().filter(|(at, _)| *at <= now) {
            self.due.remove(&(at, id));
            let Some(connection) = self.connections.get_mut(&id) else { continue };
            connection.due = None;
            if connection.gathering.is_some() {
                self.answer_gather(id, true);
            } else if connection.has_to_write() {
                self.turn_away(
                    id,
                    Wrong::new("pace", format!("an answer read within {WRITE_WITHIN:?}"), "none"),
                    false,
                );
            } else if connection.participant.is_some() {
                let seen = connection.seen();
                self.turn_away(
                    id,
                    Wrong::new("pace", format!("a frame within {FRAME_WITHIN:?}"), seen),
                    false,
                );
            } else {
                let seen = connection.seen();
                self.turn_away(
                    id,
                    Wrong::new("pace", format!("a greeting within {HELLO_WITHIN:?}"), seen),
                    false,
                );
            }
        }
    }

    /// When to look for gathers that wait in vain, if there may be any.
    fn look_at(&self) -> Option<Instant> {
        (self.seats.somebody_has_gone() && !self.gathering.is_empty()).then(|| self.looked + LOOK_EVERY)
    }

    /// Ends the gathers that wait for somebody who has gone for good.
    fn end_in_vain(&mut self, now: Instant) {
        self.looked = now;
        let Some(moment) = now.checked_sub(GONE_FOR) else { return };
        let gone = self.seats.gone_by(moment);
        if gone.is_empty() {
            return;
        }
        let in_vain = self.gathering.iter().filter(|(key, _)| self.board.waits_in_vain(key, &gone));
        let has_waited = |id: &u64| {
            let gathering = self.connections.get(id).and_then(|connection| connection.gathering.as_ref());
            gathering.is_some_and(|(_, since)| *since <= moment)
        };
        let ids: Vec<u64> = in_vain.flat_map(|(_, ids)| ids).copied().filter(has_waited).collect();
        for id in ids {
            self.answer_gather(id, true);
        }
    }

    fn drop_connection(&mut self, id: u64) {
        self.gathered(id);
        self.set_due(id, None);
        self.strangers.remove(&id);
        if let Some(connection) = self.connections.remove(&id) {
            if let Some(participant) = connection.participant {
                self.seats.leave(participant);
            }
        }
    }
}
