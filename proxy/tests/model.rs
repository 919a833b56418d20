//! The engine against a simple model of it, over random sequences of triggers, completions, refusals, failures, lies,
//! aborts, breaks, resets and time.

mod support;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::Duration;

use portway_fifo::{Fifo, Heap, Position, Producer, Trigger};
use portway_proxy::transport::{Completion, Lane, Op, Put};
use portway_proxy::{
    ChannelError, Config, Engine, FifoId, OpSet, PortChannel, PortId, Request, RequestFault, TransportError,
};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use support::script::{Act, Scripted, scripted_channel};

const LEN_BYTES: u64 = 4096;
const DEADLINE: Duration = Duration::from_secs(10);

#[derive(Clone, Debug)]
enum Command {
    /// A trigger that makes sense, for the n-th channel of a FIFO.
    Push {
        fifo: usize,
        channel: usize,
        op: u8,
        size: u32,
        offset: u64,
    },
    /// Any bits at all.
    PushAnything {
        fifo: usize,
        words: [u64; 2],
    },
    /// More than the ring has room for, which breaks the FIFO.
    Flood {
        fifo: usize,
        channel: usize,
    },
    /// A put that leaves its source region or its destination region by a byte, or is empty.
    PushWrong {
        fifo: usize,
        channel: usize,
        how: u8,
    },
    /// The n-th op that the port holds completes.
    Complete {
        port: usize,
        nth: usize,
    },
    /// All that the port holds completes, newest first.
    CompleteAll {
        port: usize,
    },
    Full {
        port: usize,
        is_full: bool,
    },
    /// From now on the port refuses every n-th op.
    Refuse {
        port: usize,
        every: u64,
    },
    /// The next call of the port of that kind fails or panics.
    Fail {
        port: usize,
        call: u8,
        panics: bool,
    },
    /// A completion that is not true.
    Lie {
        port: usize,
        lane: u32,
        sequence: u64,
    },
    Abort {
        fifo: usize,
    },
    Reset {
        fifo: usize,
    },
    Step {
        millis: u64,
    },
}

fn command() -> impl Strategy<Value = Command> {
    let (fifo, port, channel) = (0..2usize, 0..2usize, 0..4usize);
    let push = (fifo.clone(), channel.clone(), 1..8u8, 1..=64u32, 0..=LEN_BYTES - 64)
        .prop_map(|(fifo, channel, op, size, offset)| Command::Push { fifo, channel, op, size, offset });
    let words = [0..1u64 << 63, 0..1u64 << 63];
    let time =
        prop_oneof![30 => Just(1u64), 3 => Just(0), 3 => 2..500u64, 2 => Just(6_000), 1 => Just(11_000)];
    prop_oneof![
        240 => push,
        1 => (fifo.clone(), words).prop_map(|(fifo, words)| Command::PushAnything { fifo, words }),
        1 => (fifo.clone(), channel.clone()).prop_map(|(fifo, channel)| Command::Flood { fifo, channel }),
        2 => (fifo.clone(), channel, 0..3u8)
            .prop_map(|(fifo, channel, how)| Command::PushWrong { fifo, channel, how }),
        60 => (port.clone(), 0..8usize).prop_map(|(port, nth)| Command::Complete { port, nth }),
        24 => port.clone().prop_map(|port| Command::CompleteAll { port }),
        12 => (port.clone(), prop::bool::weighted(0.3)).prop_map(|(port, is_full)| Command::Full { port, is_full }),
        8 => (port.clone(), 0..4u64).prop_map(|(port, every)| Command::Refuse { port, every: every & !1 }),
        1 => (port.clone(), 0..3u8, any::<bool>())
            .prop_map(|(port, call, panics)| Command::Fail { port, call, panics }),
        1 => (port, 0..6u32, prop_oneof![0..40u64, any::<u64>()])
            .prop_map(|(port, lane, sequence)| Command::Lie { port, lane, sequence }),
        1 => fifo.clone().prop_map(|fifo| Command::Abort { fifo }),
        8 => fifo.prop_map(|fifo| Command::Reset { fifo }),
        160 => time.prop_map(|millis| Command::Step { millis }),
    ]
}

/// A channel as the model has it.
struct Channel {
    channel: PortChannel,
    port: usize,
    lane: u32,
    /// The frontier while nothing was taken.
    idle_frontier: u64,
    /// Every op that it took: where its trigger stood, when it was taken, and whether it is complete.
    taken: Vec<(u64, Duration, bool)>,
    /// What the port has to be offered for them.
    ops: Vec<Op>,
    signal: u64,
    /// Its error, from the step on that ended it.
    error: Option<String>,
    last_frontier: Position,
}

struct FifoModel {
    id: FifoId,
    fifo: Fifo,
    producer: Producer,
    pushed: BTreeMap<u64, Trigger>,
    tail: u64,
    channels: Vec<usize>,
}

impl FifoModel {
    fn is_closed(&self) -> bool {
        use portway_fifo::Error::{Aborted, Broken};
        matches!(self.producer.sync(Position(self.tail)), Err(Aborted | Broken { .. }))
    }
}

struct Model {
    engine: Engine,
    now: Duration,
    fifos: Vec<FifoModel>,
    ports: Vec<(PortId, Scripted)>,
    channels: Vec<Channel>,
    triggers: u64,
    completions: u64,
}

impl Model {
    fn new() -> Self {
        let config = Config { batch: 8, window: 8, max_channels: 64, deadline: DEADLINE };
        let mut engine = Engine::new(&Heap, config).unwrap();
        let ports = [Scripted::new(), Scripted::new()].map(|port| {
            port.script().holds = true;
            (engine.add_port(port.port()).unwrap(), port)
        });
        // The second FIFO begins just below the end of all positions.
        let fifos = [Position(0), Position(0u64.wrapping_sub(20))].map(|first_position| {
            let timeout = Duration::ZERO;
            let config = portway_fifo::Config { slots: 64, timeout, first_position, ..Default::default() };
            let (fifo, consumer) = Fifo::new(&Heap, config).unwrap();
            let id = engine.add_fifo(fifo.clone(), consumer).unwrap();
            let (producer, tail) = (fifo.producer().unwrap(), first_position.0);
            let (pushed, channels) = (BTreeMap::new(), Vec::new());
            FifoModel { id, fifo, producer, pushed, tail, channels }
        });
        let (fifos, ports) = (Vec::from(fifos), Vec::from(ports));
        let (now, channels) = (Duration::from_secs(1), Vec::new());
        let mut model = Model { engine, now, fifos, ports, channels, triggers: 0, completions: 0 };
        for (fifo, port) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            model.add_channel(fifo, port);
        }
        model
    }

    /// Adds a channel, unless the port or the FIFO is at its end.
    fn add_channel(&mut self, fifo: usize, port: usize) {
        let (port_id, scripted) = &self.ports[port];
        let lane = scripted.script().bindings.len() as u32;
        let config = scripted_channel(self.fifos[fifo].id, *port_id, LEN_BYTES);
        let Ok(channel) = self.engine.add_channel(config) else { return };
        assert_eq!(usize::from(channel.number()), self.fifos[fifo].channels.len());
        assert_eq!(channel.frontier(), Position(self.fifos[fifo].tail));
        self.fifos[fifo].channels.push(self.channels.len());
        self.channels.push(Channel {
            last_frontier: channel.frontier(),
            channel,
            port,
            lane,
            idle_frontier: self.fifos[fifo].tail,
            taken: Vec::new(),
            ops: Vec::new(),
            signal: 0,
            error: None,
        });
    }

    fn apply(&mut self, command: Command) {
        match command {
            Command::Push { fifo, channel, op, size, offset } => {
                let channel = (channel % self.fifos[fifo].channels.len()) as u16;
                let op = op_set(op);
                let size = if op == OpSet::FLUSH { 0 } else { size };
                let (source, destination) = (offset, LEN_BYTES - 64 - offset);
                self.push(fifo, trigger(op, channel, size, source, destination));
            }
            Command::PushAnything { fifo, words } => self.push(fifo, Trigger::new(words).unwrap()),
            Command::Flood { fifo, channel } => {
                let channel = (channel % self.fifos[fifo].channels.len()) as u16;
                (0..70).for_each(|_| self.push(fifo, trigger(OpSet::SIGNAL, channel, 1, 0, 0)));
            }
            Command::PushWrong { fifo, channel, how } => {
                let channel = (channel % self.fifos[fifo].channels.len()) as u16;
                let (size, source, destination) =
                    [(8, LEN_BYTES - 7, 0), (8, 0, LEN_BYTES - 7), (0, 0, 0)][usize::from(how)];
                self.push(fifo, trigger(OpSet::PUT, channel, size, source, destination));
            }
            Command::Complete { port, nth } => self.complete(port, |held| vec![held[nth % held.len()]]),
            Command::CompleteAll { port } => {
                self.complete(port, |held| held.iter().rev().copied().collect());
            }
            Command::Full { port, is_full } => self.ports[port].1.script().is_full = is_full,
            Command::Refuse { port, every } => self.ports[port].1.script().refuse_every = every,
            Command::Fail { port, call, panics } => {
                let act = if panics { Act::Panic("told to") } else { Act::Fail(TransportError::Closed) };
                let mut script = self.ports[port].1.script();
                match call {
                    0 => script.submit = act,
                    1 => script.kick = act,
                    _ => script.poll = act,
                }
            }
            Command::Lie { port, lane, sequence } => {
                let completion = Completion { lane: Lane(lane), sequence };
                // Unless it is the truth by chance.
                if !self.held(port).contains(&completion) {
                    self.ports[port].1.script().done.push_back(completion);
                }
            }
            Command::Abort { fifo } => self.fifos[fifo].fifo.abort(),
            Command::Reset { fifo } => self.reset(fifo),
            Command::Step { millis } => self.step(millis),
        }
    }

    fn push(&mut self, fifo: usize, trigger: Trigger) {
        let fifo = &mut self.fifos[fifo];
        // If the ring is full, that breaks the FIFO; or it is at its end already.
        if let Ok(position) = fifo.producer.push(trigger) {
            fifo.pushed.insert(position.0, trigger);
        }
    }

    /// What a port holds: accepted and neither complete nor about to be.
    fn held(&self, port: usize) -> Vec<Completion> {
        let script = self.ports[port].1.script();
        let accepted = script.ops.iter().map(|op| Completion { lane: op.lane, sequence: op.sequence });
        let is_done = |completion: &Completion| {
            let of = |channel: &&Channel| channel.port == port && channel.lane == completion.lane.0;
            let channel = self.channels.iter().find(of).unwrap();
            channel.taken.get(completion.sequence as usize).is_some_and(|taken| taken.2)
        };
        accepted.filter(|c| !is_done(c) && !script.done.contains(c)).collect()
    }

    fn complete(&mut self, port: usize, choose: impl Fn(&[Completion]) -> Vec<Completion>) {
        let held = self.held(port);
        if !held.is_empty() {
            self.ports[port].1.script().done.extend(choose(&held));
        }
    }

    fn reset(&mut self, fifo: usize) {
        let was_closed = self.fifos[fifo].is_closed();
        self.engine.reset_fifo(self.fifos[fifo].id).unwrap();
        let state = &mut self.fifos[fifo];
        assert!(!state.is_closed());
        if was_closed {
            state.pushed.clear();
            let before = std::mem::replace(&mut state.tail, state.fifo.tail().0);
            assert!(Position(state.tail).reached(Position(before)), "positions never rewind");
            for channel in state.channels.clone() {
                assert!(self.channels[channel].channel.error().is_some());
            }
            // The step that follows looks at what has just ended.
            self.note_errors();
            (0..2).for_each(|port| self.add_channel(fifo, port));
        }
    }

    fn step(&mut self, millis: u64) {
        self.now += Duration::from_millis(millis);
        let pending: Vec<usize> = self.ports.iter().map(|port| port.1.script().done.len()).collect();
        let before: Vec<Vec<Completion>> =
            self.ports.iter().map(|port| port.1.script().done.iter().copied().collect()).collect();
        let closed: Vec<bool> = self.fifos.iter().map(FifoModel::is_closed).collect();
        let step = self.engine.step(self.now);

        let mut taken = 0;
        for fifo in 0..2 {
            taken += self.take(fifo);
        }
        assert_eq!(step.triggers, taken);
        self.triggers += taken;

        let mut completed = 0;
        for port in 0..2 {
            let left = self.ports[port].1.script().done.len();
            completed += self.note_completions(port, &before[port][..pending[port] - left]);
        }
        assert_eq!(step.completions, completed);
        self.completions += completed;
        self.note_errors();
        for (fifo, _) in self.fifos.iter().zip(closed).filter(|(_, closed)| *closed) {
            assert!(fifo.channels.iter().all(|&channel| self.channels[channel].error.is_some()));
        }
        self.check(millis > 0);
    }

    /// Notes what the step took from a FIFO, which is what its tail says.
    fn take(&mut self, fifo: usize) -> u64 {
        let state = &mut self.fifos[fifo];
        let tail = state.fifo.tail().0;
        let taken = tail.wrapping_sub(state.tail);
        assert!(taken <= 8, "a batch");
        for position in (0..taken).map(|n| state.tail.wrapping_add(n)) {
            let request = Request::decode(state.pushed.remove(&position).expect("it was pushed"));
            let index = state.channels[usize::from(request.channel)];
            let channel = &mut self.channels[index];
            if channel.error.is_none() && fault(&request).is_none() {
                let op = channel.op(&request);
                channel.ops.push(op);
                channel.taken.push((position, self.now, false));
            }
        }
        state.tail = tail;
        taken
    }

    /// Notes what a port reported in the step. Returns how much of it was true.
    fn note_completions(&mut self, port: usize, reported: &[Completion]) -> u64 {
        for (n, completion) in reported.iter().enumerate() {
            let of = |channel: &&mut Channel| channel.port == port && channel.lane == completion.lane.0;
            let accepted = self.ports[port].1.script().ops.clone();
            let known =
                accepted.iter().any(|o| o.lane == completion.lane && o.sequence == completion.sequence);
            let entry = self.channels.iter_mut().find(of).and_then(|channel| {
                channel.taken.get_mut(completion.sequence as usize).filter(|taken| known && !taken.2)
            });
            let Some(entry) = entry else {
                // A lie: the port has failed, and what came after it in the same poll counts for nothing.
                let error = self.channels.iter().find(|c| c.port == port).unwrap().channel.error();
                assert!(error.is_some(), "{completion:?} was believed");
                return n as u64;
            };
            entry.2 = true;
        }
        reported.len() as u64
    }

    /// Notes channels that have ended, and that those which had ended before have the error of then.
    fn note_errors(&mut self) {
        for channel in &mut self.channels {
            let now = channel.channel.error().map(|error| error.to_string());
            if channel.error.is_some() {
                assert_eq!(channel.error, now, "the first error stays");
            }
            channel.error = now;
        }
    }

    fn check(&mut self, kept_house: bool) {
        let mut under_way = 0;
        for (port, (_, scripted)) in self.ports.iter().enumerate() {
            let script = scripted.script();
            for channel in self.channels.iter().filter(|channel| channel.port == port) {
                // The port was offered what the triggers say, in their order, each once.
                let seen: Vec<&Op> = script.ops.iter().filter(|op| op.lane.0 == channel.lane).collect();
                assert!(seen.len() <= channel.ops.len());
                assert!(seen.iter().zip(&channel.ops).all(|(seen, op)| *seen == op), "{seen:?}");
                let complete = channel.taken.iter().filter(|taken| taken.2).count();
                under_way += seen.len() - complete;
                if channel.error.is_none() {
                    under_way += channel.ops.len() - seen.len();
                }
            }
        }
        let stats = self.engine.stats();
        assert_eq!((stats.triggers, stats.completions), (self.triggers, self.completions));
        assert_eq!(stats.triggers, stats.completions + stats.discarded + under_way as u64, "{stats:?}");
        let ended = self.channels.iter().filter(|channel| channel.error.is_some()).count();
        assert_eq!(stats.channels_ended, ended as u64);

        for channel in &mut self.channels {
            let frontier = channel.channel.frontier();
            let idle = channel.taken.last().map_or(channel.idle_frontier, |taken| taken.0.wrapping_add(1));
            let oldest = channel.taken.iter().find(|taken| !taken.2);
            let furthest = Position(oldest.map_or(idle, |taken| taken.0));
            // Whoever waits for an op that is complete, as all before it are, waits for a position below this one.
            let complete = channel.taken.iter().take_while(|taken| taken.2).last();
            let nearest = Position(complete.map_or(channel.idle_frontier, |taken| taken.0.wrapping_add(1)));
            // Never past an op that is not complete, never back, and, while the channel lives, past all that are.
            assert!(furthest.reached(frontier), "{frontier} is past {furthest}");
            assert!(frontier.reached(channel.last_frontier));
            channel.last_frontier = frontier;
            let age = oldest.map_or(Duration::ZERO, |taken| self.now - taken.1);
            match channel.channel.error() {
                None => {
                    assert!(frontier.reached(nearest), "{frontier} is short of {nearest}");
                    assert!(!kept_house || age <= DEADLINE, "not ended after {age:?}");
                }
                Some(ChannelError::Deadline { position, after, .. }) => {
                    assert!(after > DEADLINE);
                    assert!(position.reached(frontier));
                }
                Some(_) => {}
            }
        }
    }
}

impl Channel {
    /// What a port has to be offered for a request.
    fn op(&mut self, request: &Request) -> Op {
        let put = request.op.has(OpSet::PUT);
        let signal = request.op.has(OpSet::SIGNAL);
        if signal {
            self.signal += if put { 1 } else { u64::from(request.size) };
        }
        Op {
            lane: Lane(self.lane),
            sequence: self.ops.len() as u64,
            put: put.then_some(Put {
                source_offset_bytes: request.source_offset_bytes,
                destination_offset_bytes: request.destination_offset_bytes,
                len_bytes: u64::from(request.size),
            }),
            signal: signal.then_some(self.signal),
            flush: request.op.has(OpSet::FLUSH),
        }
    }
}

fn op_set(bits: u8) -> OpSet {
    let sets = [OpSet::PUT, OpSet::SIGNAL, OpSet::FLUSH];
    let chosen = sets.into_iter().enumerate().filter(|(bit, _)| bits & 1 << bit != 0).map(|(_, set)| set);
    chosen.reduce(OpSet::and).expect("1 to 7")
}

fn trigger(op: OpSet, channel: u16, size: u32, source: u64, destination: u64) -> Trigger {
    let (source_offset_bytes, destination_offset_bytes) = (source, destination);
    Request { op, channel, size, source_offset_bytes, destination_offset_bytes }.encode().unwrap()
}

/// What is wrong with a request to a channel of these tests, by the rules as the documentation states them.
fn fault(request: &Request) -> Option<RequestFault> {
    let (put, signal, flush) =
        (request.op.has(OpSet::PUT), request.op.has(OpSet::SIGNAL), request.op.has(OpSet::FLUSH));
    if !(put || signal || flush) {
        return Some(RequestFault::UndefinedOp);
    }
    if (put || signal) && request.size == 0 {
        return Some(RequestFault::Empty);
    }
    let limit_bytes = LEN_BYTES;
    let leaves = |offset: u64| u128::from(offset) + u128::from(request.size) > u128::from(LEN_BYTES);
    if put && leaves(request.source_offset_bytes) {
        return Some(RequestFault::Source { limit_bytes });
    }
    (put && leaves(request.destination_offset_bytes)).then_some(RequestFault::Destination { limit_bytes })
}

fn config(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, max_shrink_iters: 20_000, failure_persistence: None, ..ProptestConfig::default() }
}

#[test]
fn the_engine_does_what_the_model_says() {
    let mut reached = BTreeMap::<&str, u64>::new();
    let reached_by_runs = RefCell::new(&mut reached);
    let run = |commands: Vec<Command>| {
        let mut model = Model::new();
        for command in commands {
            model.apply(command);
        }
        model.step(1);
        // In the end everybody is told.
        model.engine.shut_down();
        let errors: Vec<_> = model.channels.iter().map(|channel| channel.channel.error().unwrap()).collect();
        let stats = model.engine.stats();
        let mut reached = reached_by_runs.borrow_mut();
        let mut count = |what, n: u64| *reached.entry(what).or_default() += n;
        count("completions", stats.completions);
        count("refusals", stats.refusals);
        count("stalls", stats.stalls);
        count("discarded", stats.discarded);
        count("channels after a reset", errors.len() as u64 - 4);
        for error in errors {
            let what = match error {
                ChannelError::Deadline { sent, .. } => {
                    if sent {
                        "sent too late"
                    } else {
                        "never sent"
                    }
                }
                ChannelError::Fifo { source: portway_fifo::Error::Aborted, .. } => "aborted",
                ChannelError::Fifo { .. } => "broken",
                ChannelError::Port { source: TransportError::Panicked { .. }, .. } => "panicked",
                ChannelError::Port { source: TransportError::Contract { .. }, .. } => "lied",
                ChannelError::Port { .. } => "failed",
                ChannelError::Request { fault: RequestFault::UnknownChannel { .. }, .. } => "no channel",
                ChannelError::Request { .. } => "refused",
                _ => "stopped",
            };
            count(what, 1);
        }
        Ok(())
    };
    let sequences = prop::collection::vec(command(), 1..400);
    if let Err(error) = TestRunner::new(config(2_000)).run(&sequences, run) {
        panic!("{error}");
    }
    // The control: the sequences went everywhere.
    println!("{reached:?}");
    assert_eq!(reached.len(), 15, "{reached:?}");
    assert!(reached.values().all(|&count| count > 50), "{reached:?}");
}

proptest! {
    #![proptest_config(config(1_000))]

    /// Every bit pattern, alone: it is taken as what it says, ends its channel, or ends its FIFO; with the right error.
    #[test]
    fn every_trigger_is_an_op_or_a_typed_error(words in [0..1u64 << 63, 0..1u64 << 63], number in 0..3u64, any_number: bool) {
        let words = if any_number { words } else { [words[0], words[1] & !(0x7fff << 45) | number << 45] };
        let mut model = Model::new();
        model.push(0, Trigger::new(words).unwrap());
        let request = Request::decode(Trigger::new(words).unwrap());
        prop_assert_eq!(request.encode().ok().map(Trigger::words), (words[1] >> 60 != 0).then_some(words));
        model.step(1);
        let errors: Vec<_> = (0..2).map(|channel| model.channels[channel].channel.error()).collect();
        let position = Position(0);
        if request.channel > 1 {
            for error in errors {
                let Some(ChannelError::Request { channel, position: at, fault, request: seen, .. }) = error else {
                    panic!("{error:?}");
                };
                let expected = RequestFault::UnknownChannel { channels: 2 };
                prop_assert_eq!((channel, at, fault, seen), (request.channel, position, expected, request));
            }
            let refused = model.fifos[0].producer.sync(position);
            prop_assert_eq!(refused, Err(portway_fifo::Error::Aborted));
        } else {
            let channel = usize::from(request.channel);
            match (&errors[channel], fault(&request)) {
                (None, None) => prop_assert_eq!(model.channels[channel].ops.len(), 1),
                (Some(ChannelError::Request { fault: seen, .. }), Some(expected)) => {
                    prop_assert_eq!(*seen, expected);
                }
                other => panic!("{other:?} for {request:?}"),
            }
            prop_assert!(errors[1 - channel].is_none());
        }
    }
}
