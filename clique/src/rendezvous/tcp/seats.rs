//! [`Seats`]: which participant is which process.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::Instant;

use crate::rendezvous::IS_THERE;
use crate::rendezvous::wire::{Hello, Instance, Wrong};

/// The most connections of one participant: how many gathers it may have under way.
const MAX_CONNECTIONS: u32 = 1024;

#[derive(Clone, Debug, Default)]
struct Seat {
    instance: Instance,
    /// Empty until somebody comes.
    name: String,
    connections: u32,
    goodbye: bool,
}

#[derive(Debug)]
pub(super) struct Seats {
    seats: Vec<Seat>,
    changes: u64,
    here: u32,
    /// Who has been here and is not, and since when.
    gone: HashMap<u32, Instant>,
}

impl Seats {
    pub(super) fn new(participants: u32) -> Self {
        let seats = vec![Seat::default(); participants as usize];
        Seats { seats, changes: 0, here: 0, gone: HashMap::new() }
    }

    pub(super) fn len(&self) -> usize {
        self.seats.len()
    }

    /// Counts what changes the whereabouts of anybody.
    pub(super) fn changes(&self) -> u64 {
        self.changes
    }

    /// Takes a seat, or another connection to one's own. A seat that a process has left without a word is free.
    pub(super) fn sit(&mut self, hello: &Hello, from: SocketAddr) -> Result<(), Wrong> {
        let count = self.seats.len();
        if hello.participants as usize != count {
            return Err(Wrong::new("number of participants", count, hello.participants));
        }
        let Some(seat) = self.seats.get_mut(hello.participant as usize) else {
            return Err(Wrong::new("participant", format!("below {count}"), hello.participant));
        };
        if seat.connections > 0 && seat.instance != hello.instance {
            let expected = format!("one that is not here yet; {} is here", seat.name);
            return Err(Wrong::new("participant", expected, hello.participant));
        }
        if seat.connections == MAX_CONNECTIONS {
            return Err(Wrong::new(
                "number of connections",
                format!("at most {MAX_CONNECTIONS}"),
                "one more",
            ));
        }
        if seat.connections == 0 {
            self.here += 1;
            self.gone.remove(&hello.participant);
            seat.instance = hello.instance;
            seat.name = format!("participant {}, {}, from {from}", hello.participant, hello.name);
            seat.goodbye = false;
            self.changes += 1;
        }
        seat.connections += 1;
        Ok(())
    }

    pub(super) fn goodbye(&mut self, participant: u32) {
        if let Some(seat) = self.seats.get_mut(participant as usize) {
            seat.goodbye = true;
            self.changes += 1;
        }
    }

    /// A connection of a participant has ended.
    pub(super) fn leave(&mut self, participant: u32) {
        if let Some(seat) = self.seats.get_mut(participant as usize) {
            seat.connections -= 1;
            if seat.connections == 0 {
                self.here -= 1;
                self.gone.insert(participant, Instant::now());
                self.changes += 1;
            }
        }
    }

    pub(super) fn nobody_is_here(&self) -> bool {
        self.here == 0
    }

    pub(super) fn somebody_has_gone(&self) -> bool {
        !self.gone.is_empty()
    }

    /// Who had gone by a moment and has not come back.
    pub(super) fn gone_by(&self, moment: Instant) -> Vec<u32> {
        self.gone.iter().filter(|(_, since)| **since <= moment).map(|(participant, _)| *participant).collect()
    }

    pub(super) fn who_is_here(&self) -> String {
        let here: Vec<&str> =
            self.seats.iter().filter(|seat| seat.connections > 0).map(|seat| seat.name.as_str()).collect();
        match here.as_slice() {
            [] => "nobody is left".to_owned(),
            [first, rest @ ..] if rest.len() > 3 => {
                format!("{first} and {} others are still here", rest.len())
            }
            here => format!("still here: {}", here.join("; ")),
        }
    }

    pub(super) fn name(&self, participant: u32) -> String {
        match self.seats.get(participant as usize) {
            Some(seat) if !seat.name.is_empty() => seat.name.clone(),
            _ => format!("participant {participant}"),
        }
    }

    /// Where a participant is who has not said anything.
    pub(super) fn whereabouts(&self, participant: u32) -> String {
        match self.seats.get(participant as usize) {
            Some(seat) if seat.name.is_empty() => "has not connected".to_owned(),
            Some(seat) if seat.connections > 0 => format!("{} {IS_THERE}", seat.name),
            Some(seat) if seat.goodbye => format!("{} has left", seat.name),
            Some(seat) => format!("{} has gone without a goodbye", seat.name),
            None => "is none of them".to_owned(),
        }
    }
}
