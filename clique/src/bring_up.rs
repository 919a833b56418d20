//! [`CliqueBuilder`]: the one way to make a clique.

use core::time::Duration;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::Instant;

use crate::CliqueError;
use crate::backend::{Backend, CommConfig, LocalRank, RawComm};
use crate::clique::Clique;
use crate::environment;
use crate::failure::Fault;
use crate::group::{self, Plan, Up};
use crate::id::{IdPlan, UniqueIds};
use crate::joint::Joint;
use crate::life::{Life, told_by};
use crate::message::{Hello, IdMessage, Local, Note};
use crate::owner::spawn;
use crate::rendezvous::{Post, Rendezvous};
use crate::report::Durations;
use crate::rounds::{Heard, LIFE, Rounds, Short, note_of};
use crate::state::{Event, Machine, Phase};
use crate::sync::Deadline;
use crate::team::Team;
use crate::uses::FirstUse;
use crate::verify::{Agreement, verdict};

/// The longest name of a clique, in bytes.
pub const MAX_NAME_BYTES: usize = 128;

/// The shortest time between two heartbeats.
const MIN_HEARTBEAT: Duration = Duration::from_millis(1);
/// How long a bring-up that failed waits for its rendezvous to be left, and until when, counted from the deadline: a moment
/// after the [aborts](crate::life::ABORTED_BY), and before the promised 100 ms are over.
const LEAVE_WITHIN: Duration = Duration::from_millis(200);
const LEFT_BY: Duration = Duration::from_millis(90);

const HELLO: &str = "hello";
const IDS: &str = "ids";
const BEGUN: &str = "begun";
const UP: &str = "up";
const USED: &str = "used";

/// What a clique is to be. Nothing can be done with it but [`bring_up`](Self::bring_up):
///
/// ```compile_fail,E0599
/// # use portway_clique::{Clique, FirstUse};
/// let builder = Clique::builder("train", 1).local(0, 0);
/// builder.members(); // there are none before it is ready
/// ```
#[derive(Clone, Debug)]
pub struct CliqueBuilder {
    name: String,
    size: u32,
    attempt: u64,
    locals: Vec<LocalRank>,
    config: CommConfig,
    first_use: FirstUse,
    heartbeat: Duration,
    call_within: Duration,
}

impl CliqueBuilder {
    pub(crate) fn new(name: &str, size: u32) -> Self {
        CliqueBuilder {
            name: name.to_owned(),
            size,
            attempt: 0,
            locals: Vec::new(),
            config: CommConfig::default(),
            first_use: FirstUse::default(),
            heartbeat: Duration::from_millis(500),
            call_within: Duration::from_secs(30),
        }
    }

    /// Which attempt this is, for all participants. A failed attempt is followed by one with another number.
    #[must_use]
    pub fn attempt(mut self, attempt: u64) -> Self {
        self.attempt = attempt;
        self
    }

    /// Adds a rank of this process, on a device as this process counts them.
    #[must_use]
    pub fn local(mut self, rank: u32, device: u32) -> Self {
        self.locals.push(LocalRank { rank, device });
        self
    }

    /// How the communicators are made. The same for all participants.
    #[must_use]
    pub fn config(mut self, config: CommConfig) -> Self {
        self.config = config;
        self
    }

    /// What is run once before the clique is ready.
    #[must_use]
    pub fn first_use(mut self, first_use: FirstUse) -> Self {
        self.first_use = first_use;
        self
    }

    /// How often the library, and the other participants, are asked for errors. 500 ms unless told otherwise; 1 ms or
    /// more, since a heartbeat that never pauses takes a processor.
    #[must_use]
    pub fn heartbeat(mut self, every: Duration) -> Self {
        self.heartbeat = every;
        self
    }

    /// How long a call of a member may take, with all that it waits for, before the clique counts as failed; also how long
    /// the library, and the rendezvous, may leave a heartbeat without an answer. 30 s unless told otherwise.
    #[must_use]
    pub fn call_within(mut self, within: Duration) -> Self {
        self.call_within = within;
        self
    }

    /// Brings the clique up together with the other participants. Returns after `within`, at the latest 100 ms later,
    /// whatever the library and the others do.
    ///
    /// Keep a clone of the rendezvous to decide yourself when it ends; otherwise it ends with the clique. After a failure it
    /// ends on a thread of its own, which is waited for 200 ms at most: one that takes longer to leave, as the TCP store
    /// does that waits for others, is left later.
    ///
    /// # Errors
    /// - [`CliqueError::Config`] for what cannot be.
    /// - [`CliqueError::Disagreement`], the same for every participant.
    /// - [`CliqueError::Failed`]: what failed first, where, in which phase, and who was missing. What this participant
    ///   had of the clique is aborted then, or in quarantine. An attempt with another number may succeed.
    pub fn bring_up(
        self,
        backend: Arc<dyn Backend>,
        rendezvous: Arc<dyn Rendezvous>,
        within: Duration,
    ) -> Result<Clique, CliqueError> {
        let len = self.name.len();
        if len == 0 || len > MAX_NAME_BYTES || self.name.contains('/') {
            return Err(CliqueError::Config {
                what: "name of a clique".to_owned(),
                expected: format!(
                    "1 to {MAX_NAME_BYTES} bytes without a '/', which the names of children have"
                ),
                seen: if len > MAX_NAME_BYTES { format!("{len} bytes") } else { format!("{:?}", self.name) },
            });
        }
        if self.heartbeat < MIN_HEARTBEAT {
            return Err(CliqueError::Config {
                what: "time between heartbeats".to_owned(),
                expected: format!("{MIN_HEARTBEAT:?} or more"),
                seen: format!("{:?}", self.heartbeat),
            });
        }
        let (clique, attempt) = (self.name.clone(), self.attempt);
        let kept = rendezvous.clone();
        let rounds = Rounds { rendezvous, clique, attempt, who: None };
        let life = Arc::new(Life::new(backend, rounds, this_process(), self.locals.len())?);
        let deadline = Deadline::after(within);
        let run = Run {
            builder: self,
            life,
            machine: Machine::new(),
            start: Instant::now(),
            deadline,
            durations: Durations::default(),
        };
        // Whoever drops a rendezvous last may wait for the others to leave it, as the TCP store does.
        run.go().inspect_err(|_| {
            let (alive, gone) = sync_channel::<()>(0);
            let dropped_elsewhere = spawn("clique-rendezvous", move || {
                drop(kept);
                drop(alive);
            });
            drop(dropped_elsewhere);
            // One that is left at once is left when this returns, so that whoever makes a new one finds its seat free.
            let until = Deadline::after(LEAVE_WITHIN).earlier(deadline.plus(LEFT_BY));
            let _ = gone.recv_timeout(until.left());
        })
    }
}

/// This process, for messages: `host:pid`.
pub(crate) fn this_process() -> String {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    format!("{host}:{}", std::process::id())
}

/// One attempt, on the thread of the caller, which holds the deadline.
struct Run {
    builder: CliqueBuilder,
    life: Arc<Life>,
    machine: Machine,
    start: Instant,
    deadline: Deadline,
    durations: Durations,
}

impl Run {
    fn go(mut self) -> Result<Clique, CliqueError> {
        let agreement = self.gather()?;
        let ids = self.exchange_ids(&agreement)?;
        let plan = self.plan(&agreement);
        let up = self.init(&plan, &agreement, ids)?;
        let comms = self.use_first(&plan, &agreement, up)?;
        self.on(Event::EverybodyUsed)?;
        self.durations.total = self.start.elapsed();
        let Run { builder, life, durations, .. } = self;
        let team = Team::new(life, &plan, comms, agreement.seats, builder.call_within, builder.heartbeat);
        Clique::start(team, durations)
    }

    /// Everybody says who they are; the verdict.
    fn gather(&mut self) -> Result<Agreement, CliqueError> {
        let start = Instant::now();
        let hello = self.hello().and_then(|hello| hello.encode());
        let named = self.exchange(HELLO, hello)?;
        self.durations.gathering = start.elapsed();
        let start = Instant::now();
        let hellos: Result<Vec<Hello>, _> =
            named.iter().map(|(peer, message)| Hello::decode(message, peer)).collect();
        let hellos = hellos.map_err(|error| self.fail_locally(&error))?;
        let agreement =
            verdict(&hellos).map_err(|disagreement| self.end(CliqueError::Disagreement(disagreement)))?;
        // Nobody has set it: this attempt has one verdict.
        let _ = self.life.hardware.set(agreement.hardware.clone());
        self.durations.verification = start.elapsed();
        self.on(Event::Agreed)?;
        Ok(agreement)
    }

    /// What this participant says of itself. The library is asked on the owner's thread, since it may hang.
    fn hello(&mut self) -> Result<Hello, CliqueError> {
        let CliqueBuilder { size, locals, config, first_use, .. } = &self.builder;
        let of_this_process = environment::of_this_process();
        let (environment, hardware) = environment::sorted_out(&*self.life.backend, of_this_process)?;
        let uses = first_use.of(*size, locals)?;
        let devices = locals.clone();
        let asked = self.life.owner.post(move |desk| {
            desk.call(None, "version and devices", |backend| {
                let uuid = |local: &LocalRank| {
                    Ok(Local { rank: local.rank, uuid: backend.device_uuid(local.device)? })
                };
                let locals: Result<Vec<Local>, CliqueError> = devices.iter().map(uuid).collect();
                Ok::<_, CliqueError>((backend.version()?, locals?))
            })
        });
        let (library_version, locals) = self.answer(&asked, "version and devices")??;
        let capabilities = self.life.backend.capabilities();
        Ok(Hello {
            size: *size,
            process: self.life.process.clone(),
            library: self.life.backend.name(),
            library_version,
            several_ids: capabilities.several_ids,
            config: config.clone(),
            large_bytes: first_use.large_bytes as u64,
            locals,
            uses,
            environment,
            hardware,
        })
    }

    /// The ids, from who makes them.
    fn exchange_ids(&mut self, agreement: &Agreement) -> Result<UniqueIds, CliqueError> {
        let start = Instant::now();
        let several = self.life.backend.capabilities().several_ids;
        let plan = Arc::new(IdPlan::new(&self.life.rounds.round(IDS), &agreement.seats, several));
        let (makes, participant) = (plan.clone(), self.life.rounds.rendezvous.participant());
        let made = self
            .life
            .owner
            .post(move |desk| desk.call(None, "unique_id", |backend| makes.make(participant, backend)));
        let message = self.answer(&made, "unique_id").and_then(|made| made?.encode());
        let named = self.exchange(IDS, message)?;
        let decoded: Result<Vec<(String, IdMessage)>, CliqueError> = named
            .into_iter()
            .map(|(peer, message)| Ok((peer.clone(), IdMessage::decode(&message, &peer)?)))
            .collect();
        let ids = decoded.and_then(|messages| plan.collect(&messages));
        let ids = ids.map_err(|error| self.fail_locally(&error))?;
        self.durations.id_exchange = start.elapsed();
        self.on(Event::IdsArrived)?;
        Ok(ids)
    }

    fn plan(&self, agreement: &Agreement) -> Plan {
        Plan {
            size: self.builder.size,
            locals: self.builder.locals.clone(),
            uses: agreement.uses.clone(),
            large_bytes: self.builder.first_use.large_bytes,
        }
    }

    /// The communicators, here and everywhere.
    fn init(&mut self, plan: &Plan, agreement: &Agreement, ids: UniqueIds) -> Result<Up, CliqueError> {
        let start = Instant::now();
        // Posted before the library is called, so that its gaps tell who never came so far.
        let begun = self.life.rounds.post(BEGUN, Post::Ok(Vec::new()), self.deadline);
        begun.map_err(|error| self.fail_locally(&error))?;
        let (config, own) = (self.builder.config.clone(), plan.clone());
        let part = Box::new(move |desk: &mut _, until| group::init(desk, &own, ids, &config, until));
        let joint = self.joint(UP, Some(BEGUN), agreement);
        let done = joint.run(vec![(self.life.clone(), part as crate::joint::Part<Up>)]);
        let done = done.map_err(|note| self.fail(note))?;
        self.on(Event::LocalsUp)?;
        self.on(Event::EverybodyUp)?;
        self.durations.initialisation = done.own_done - start;
        self.durations.barrier = done.own_done.elapsed();
        // Everybody has posted to it, so this only lets the rendezvous forget the round.
        let _ = self.life.rounds.hear_so_far(BEGUN, self.deadline);
        done.results.into_iter().next().ok_or_else(|| self.life.ended())
    }

    /// What was declared, here and everywhere.
    fn use_first(&mut self, plan: &Plan, agreement: &Agreement, up: Up) -> Result<Vec<RawComm>, CliqueError> {
        let start = Instant::now();
        let own = plan.clone();
        let part =
            Box::new(move |desk: &mut crate::owner::Desk, until| group::use_first(desk, &own, up, until));
        let joint = self.joint(USED, None, agreement);
        let done = joint.run(vec![(self.life.clone(), part as crate::joint::Part<Vec<RawComm>>)]);
        let done = done.map_err(|note| self.fail(note))?;
        self.durations.first_use = start.elapsed();
        done.results.into_iter().next().ok_or_else(|| self.life.ended())
    }

    fn joint<'a>(
        &'a self,
        round: &'static str,
        begun: Option<&'static str>,
        agreement: &'a Agreement,
    ) -> Joint<'a> {
        Joint {
            rounds: &self.life.rounds,
            round,
            next: if round == UP { USED } else { LIFE },
            begun,
            phase: self.machine.phase(),
            process: &self.life.process,
            seats: &agreement.seats,
            deadline: self.deadline,
            parent: None,
        }
    }

    /// Says the own message, or why there is none, and hears the others.
    fn exchange(
        &mut self,
        round: &'static str,
        message: Result<Vec<u8>, CliqueError>,
    ) -> Result<Vec<(String, Vec<u8>)>, CliqueError> {
        let message = match message {
            Ok(message) => message,
            Err(error) => {
                let note = note_of(&error, self.machine.phase(), &self.life.process);
                return Err(self.tell(round, note));
            }
        };
        match self.life.rounds.exchange(round, Post::Ok(message), self.deadline, || Ok(())) {
            Ok(said) => {
                Ok(said.into_iter().map(|(one, message)| (self.life.rounds.name(one), message)).collect())
            }
            Err(Short::Failed(note)) => Err(self.fail(note)),
            Err(Short::Silent(who)) => {
                let note = Fault::new(None, who).note(self.machine.phase(), &self.life.process);
                Err(self.tell(self.next_round(), note))
            }
            Err(Short::Error(error)) => Err(self.fail_locally(&error)),
        }
    }

    /// The answer of a call on the owner's thread.
    fn answer<R>(&self, answer: &Receiver<Result<R, Fault>>, call: &str) -> Result<R, CliqueError> {
        let fault = match answer.recv_timeout(self.deadline.left()) {
            Ok(Ok(result)) => return Ok(result),
            Ok(Err(fault)) => fault,
            Err(RecvTimeoutError::Timeout) => {
                Fault::new(None, format!("{call} did not return by the deadline"))
            }
            Err(RecvTimeoutError::Disconnected) => return Err(self.life.ended()),
        };
        let note = fault.note(self.machine.phase(), &self.life.process);
        Err(CliqueError::Failed(Arc::new(self.life.failure(note))))
    }

    fn on(&mut self, event: Event) -> Result<Phase, CliqueError> {
        self.machine.on(event).map_err(|error| {
            let note = Fault::new(None, error.to_string()).note(self.machine.phase(), &self.life.process);
            self.life.fail(note, self.deadline)
        })
    }

    /// This participant failed before it said anything in a round: it says why.
    fn tell(&mut self, round: &'static str, note: Note) -> CliqueError {
        // Where the others cannot be told their own deadlines end their waits.
        let until = told_by(self.deadline);
        let _ = self.life.rounds.post(round, Post::Failed(note.encode()), until);
        // It may be a consequence of an earlier failure of another participant.
        match self.life.rounds.hear_so_far(round, until) {
            Some(Heard::Failed(first)) => self.fail(first),
            _ => self.fail(note),
        }
    }

    /// This participant alone cannot go on, after it has said that it could: the others hear of it in the next round.
    fn fail_locally(&mut self, error: &CliqueError) -> CliqueError {
        let note = note_of(error, self.machine.phase(), &self.life.process);
        self.tell(self.next_round(), note)
    }

    /// Where the others are told of what goes wrong after the phase's own round.
    fn next_round(&self) -> &'static str {
        match self.machine.phase() {
            Phase::Gathering => IDS,
            _ => UP,
        }
    }

    fn fail(&mut self, note: Note) -> CliqueError {
        let failed = self.life.fail(note, self.deadline);
        self.end(failed)
    }

    fn end(&mut self, how: CliqueError) -> CliqueError {
        // A failure belongs to every phase.
        let _ = self.machine.on(Event::Failed);
        self.life.finish(how, self.deadline)
    }
}
