//! [`Rig`]: two sides, connected; [`Way`]: lanes from one to the other.

use core::time::Duration;
use std::collections::HashSet;
use std::time::Instant;

use super::agent::DRIVE_LIMITS;
use super::command::{Driven, Milestone, Name, Plan, Track};
use super::pattern::{Piece, Random};
use super::report::{Failure, Outcome};
use super::side::{Checked, Memory, Side};
use super::{End, Failing, Fixture, Limits, Pair};
use crate::transport::{Completion, Lane, Op, Put};

/// Why a check ends early.
#[derive(Debug)]
pub(super) enum Stop {
    Failed(Failure),
    Waived(String),
}

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Self {
        Stop::Failed(failure)
    }
}

pub(super) type Ending = Result<(), Stop>;

/// Runs the body of a check on a new pair, and closes what is left open.
pub(super) fn check(fixture: &dyn Fixture, body: impl FnOnce(&mut Rig) -> Ending) -> Outcome {
    let result = fixture.pair().map_err(|error| no_pair(error.to_string())).map_err(Stop::Failed);
    outcome(result.and_then(|pair| on_rig(fixture, pair, body)))
}

/// The same with a pair whose port A will fail.
pub(super) fn failing_check(fixture: &dyn Fixture, body: impl FnOnce(&mut Rig) -> Ending) -> Outcome {
    outcome(match fixture.failing_pair() {
        Err(error) => Err(no_pair(error.to_string()).into()),
        Ok(Failing::Waived(reason)) => Err(Stop::Waived(reason)),
        Ok(Failing::Pair(pair)) => on_rig(fixture, pair, body),
    })
}

fn outcome(result: Ending) -> Outcome {
    match result {
        Ok(()) => Outcome::Passed,
        Err(Stop::Failed(failure)) => Outcome::Failed(failure),
        Err(Stop::Waived(reason)) => Outcome::Waived(reason),
    }
}

fn no_pair(seen: String) -> Failure {
    Failure { who: "the fixture".into(), expected: "a pair".into(), seen }
}

fn on_rig(fixture: &dyn Fixture, pair: Pair, body: impl FnOnce(&mut Rig) -> Ending) -> Ending {
    let mut rig = Rig::connect(pair, fixture.limits())?;
    body(&mut rig)?;
    Ok(rig.close()?)
}

/// Two sides with a port each, connected to each other.
#[derive(Debug)]
pub(super) struct Rig {
    pub(super) a: Side,
    pub(super) b: Side,
    pub(super) limits: Limits,
    open: bool,
}

impl Rig {
    fn connect(pair: Pair, limits: Limits) -> Checked<Rig> {
        let mut rig = Rig::apart(pair, limits)?;
        let (a, b) = (rig.a.endpoint()?, rig.b.endpoint()?);
        rig.connect_with(a, b)?;
        Ok(rig)
    }

    fn apart(pair: Pair, limits: Limits) -> Checked<Rig> {
        let start = |name, end: End| Side::start(name, end, limits);
        Ok(Rig { a: start("A", pair.a)?, b: start("B", pair.b)?, limits, open: false })
    }

    /// Connects both at the same time: an end may need the other to do so.
    fn connect_with(&mut self, a: Vec<u8>, b: Vec<u8>) -> Checked<()> {
        use super::command::Command;
        let within = self.limits.wait;
        self.a.begin(Command::Connect { bytes: b, within })?;
        self.b.begin(Command::Connect { bytes: a, within })?;
        self.a.finish(2 * within)?;
        self.b.finish(2 * within)?;
        self.open = true;
        Ok(())
    }

    /// Makes lanes from A to B.
    pub(super) fn way(&self, lanes: usize, len_bytes: u64) -> Checked<Way> {
        Way::new(&self.a, &self.b, lanes, len_bytes)
    }

    /// Makes lanes from B to A.
    pub(super) fn way_back(&self, lanes: usize, len_bytes: u64) -> Checked<Way> {
        Way::new(&self.b, &self.a, lanes, len_bytes)
    }

    /// Closes both ports until they are quiesced.
    pub(super) fn close(&mut self) -> Checked<()> {
        if core::mem::take(&mut self.open) {
            quiesce(&self.a, self.limits)?;
            quiesce(&self.b, self.limits)?;
        }
        Ok(())
    }

    /// The ports are none of the rig's business any more.
    pub(super) fn leave_open(&mut self) {
        self.open = false;
    }

    /// A plan that does what the engine does, in middling portions.
    pub(super) fn plan(&self) -> Plan {
        Plan { submits_a_kick: 16, room: 64, polls_after: 0, within: self.limits.wait }
    }

    /// Drives A until the ops are complete; each has to be, once.
    pub(super) fn drive(&self, ops: &[Op]) -> Checked<()> {
        let driven = self.a.drive(ops, self.plan())?;
        each_completes_once(&self.a, ops, &driven, self.limits.wait)
    }

    /// Calls A's port one call at a time, and looks at B's watched words after each of them. Ends when the ops are
    /// complete and B has seen all of their signals.
    pub(super) fn lockstep(&self, ops: &[Op]) -> Checked<()> {
        let mut stepper = self.stepper();
        for (at, op) in ops.iter().enumerate() {
            stepper.offer(op)?;
            if at % 3 == 2 {
                stepper.kick()?;
                stepper.poll()?;
            }
        }
        stepper.kick()?;
        stepper.finish()?;
        self.all_seen(&self.b)
    }

    /// For a check that decides about each call.
    pub(super) fn stepper(&self) -> Stepper<'_> {
        Stepper { rig: self, ops: Vec::new(), driven: Driven::default(), progress: Instant::now() }
    }

    /// Drives A on its own thread while B watches on its own.
    pub(super) fn side_by_side(&self, ops: &[Op]) -> Checked<()> {
        use super::command::{Command, Reply};
        let within = self.limits.wait;
        self.b.begin(Command::Look { within })?;
        self.a.begin(Command::Drive { ops: ops.to_vec(), plan: self.plan() })?;
        let looked = self.b.finish(within).and_then(|reply| self.b.looked(reply));
        let driven = self.a.finish(DRIVE_LIMITS * within);
        // What B saw comes first: it may be why A did not come to an end.
        let finished = looked?;
        if let Reply::Driven { driven } = driven? {
            each_completes_once(&self.a, ops, &driven, within)?;
        }
        if finished { Ok(()) } else { self.all_seen(&self.b) }
    }

    /// Every watched word of the side takes its last value, within the limit.
    pub(super) fn all_seen(&self, side: &Side) -> Checked<()> {
        if side.look(self.limits.wait)? {
            return Ok(());
        }
        let expected = "every signal word takes its last value";
        Err(side.failure(expected, format!("not all have within {:?}", self.limits.wait)))
    }
}

/// Calls A's port one call at a time; after each, B looks at what it watches.
#[derive(Debug)]
pub(super) struct Stepper<'r> {
    rig: &'r Rig,
    ops: Vec<Op>,
    driven: Driven,
    /// When an op was accepted or completed last.
    progress: Instant,
}

impl Stepper<'_> {
    fn late(&self) -> bool {
        self.progress.elapsed() > self.rig.limits.wait
    }

    /// Offers an op once; whether it was accepted.
    pub(super) fn offer_once(&mut self, op: &Op) -> Checked<bool> {
        let accepted = self.rig.a.submit(op)?;
        if accepted {
            self.ops.push(*op);
            self.driven.accepted += 1;
            self.progress = Instant::now();
        }
        self.glance()?;
        Ok(accepted)
    }

    /// Lets B look, if there is something that it watches.
    fn glance(&self) -> Checked<()> {
        if self.rig.b.is_watching() {
            self.rig.b.look(Duration::ZERO)?;
        }
        Ok(())
    }

    /// Offers an op until it is accepted. What completed meanwhile is returned.
    pub(super) fn offer(&mut self, op: &Op) -> Checked<Vec<Completion>> {
        let mut completions = Vec::new();
        while !self.offer_once(op)? {
            self.kick()?;
            completions.extend(self.poll()?);
            if self.late() {
                let expected = format!("op {} of lane {} is accepted in the end", op.sequence, op.lane.0);
                let seen = format!("Full, {:?} after anything else happened", self.rig.limits.wait);
                return Err(self.rig.a.failure(expected, seen));
            }
        }
        Ok(completions)
    }

    pub(super) fn kick(&mut self) -> Checked<()> {
        self.rig.a.kick()?;
        self.glance()
    }

    pub(super) fn poll(&mut self) -> Checked<Vec<Completion>> {
        let completions = self.rig.a.poll()?;
        if !completions.is_empty() {
            self.driven.completions.extend(&completions);
            self.progress = Instant::now();
        }
        // In any case: the look polls B's port, which may be what this one needs.
        self.rig.b.look(Duration::ZERO)?;
        Ok(completions)
    }

    /// Whether everything that was accepted is complete, or nothing has happened for too long.
    pub(super) fn is_over(&self) -> bool {
        self.driven.completions.len() >= self.ops.len() || self.late()
    }

    /// Polls until everything is complete, or, with an op, until that is.
    pub(super) fn poll_until(&mut self, op: Option<&Op>) -> Checked<()> {
        let done = |stepper: &Self| match op {
            Some(op) => {
                let completion = Completion { lane: op.lane, sequence: op.sequence };
                stepper.driven.completions.contains(&completion)
            }
            None => stepper.driven.completions.len() >= stepper.ops.len(),
        };
        while !done(self) && !self.late() {
            self.poll()?;
        }
        match op {
            Some(op) if !done(self) => {
                let expected = format!("op {} of lane {} completes", op.sequence, op.lane.0);
                let seen = format!("it has not, {:?} after anything else happened", self.rig.limits.wait);
                Err(self.rig.a.failure(expected, seen))
            }
            _ => Ok(()),
        }
    }

    /// Polls until every op that was accepted is complete; each has to be, once.
    pub(super) fn finish(mut self) -> Checked<()> {
        self.poll_until(None)?;
        each_completes_once(&self.rig.a, &self.ops, &self.driven, self.rig.limits.wait)
    }
}

/// Closes a port until it is quiesced.
pub(super) fn quiesce(side: &Side, limits: Limits) -> Checked<()> {
    let start = Instant::now();
    while !side.close()? {
        if start.elapsed() > limits.wait {
            let expected = "a port that is closed again and again is quiesced in the end";
            return Err(side.failure(expected, format!("Pending after {:?}", limits.wait)));
        }
        std::thread::yield_now();
    }
    Ok(())
}

/// Every op was accepted and is among the completions, and nothing else is.
pub(super) fn each_completes_once(side: &Side, ops: &[Op], driven: &Driven, wait: Duration) -> Checked<()> {
    if let Some(fault) = &driven.fault {
        return Err(side.fault(fault));
    }
    let name = |lane: Lane, sequence: u64| format!("op {sequence} of lane {}", lane.0);
    let mut missing: HashSet<(Lane, u64)> = ops.iter().map(|op| (op.lane, op.sequence)).collect();
    for &Completion { lane, sequence } in &driven.completions {
        if !missing.remove(&(lane, sequence)) {
            let known = ops.iter().any(|op| (op.lane, op.sequence) == (lane, sequence));
            let how = if known { "a second completion" } else { "a completion of what was never accepted" };
            let expected = "one completion an accepted op";
            return Err(side.failure(expected, format!("{how}: {}", name(lane, sequence))));
        }
    }
    let missing = ops.iter().find(|op| missing.contains(&(op.lane, op.sequence)));
    match missing {
        None => Ok(()),
        Some(op) => {
            let expected = format!("{} completes within {wait:?}", name(op.lane, op.sequence));
            let (accepted, complete) = (driven.accepted, driven.completions.len());
            let seen = format!("of {} ops {accepted} accepted and {complete} complete", ops.len());
            Err(side.failure(expected, seen))
        }
    }
}

/// Lanes from one side to the other, over one source and one destination, with a signal word each.
#[derive(Debug)]
pub(super) struct Way {
    pub(super) source: Memory,
    pub(super) destination: Memory,
    pub(super) destination_name: Name,
    pub(super) lanes: Vec<WayLane>,
    pub(super) source_seed: u64,
    pub(super) base_seed: u64,
}

/// A lane, with what its coming op and signal need.
#[derive(Debug)]
pub(super) struct WayLane {
    pub(super) lane: Lane,
    pub(super) word: Memory,
    pub(super) word_name: Name,
    sequence: u64,
    signal: u64,
    steps: Vec<Milestone>,
    /// Puts since the last signal.
    unsignalled: Vec<Piece>,
}

impl Way {
    fn new(from: &Side, to: &Side, lanes: usize, len_bytes: u64) -> Checked<Way> {
        let (source, destination) = (from.allocate(len_bytes)?, to.allocate(len_bytes)?);
        let destination_name = from.import(&destination)?;
        let mut way =
            Way { source, destination, destination_name, lanes: Vec::new(), source_seed: 0, base_seed: 0 };
        for _ in 0..lanes {
            way.add_lane(from, to)?;
        }
        way.refill(from, to, 1)?;
        Ok(way)
    }

    /// Binds one more lane.
    pub(super) fn add_lane(&mut self, from: &Side, to: &Side) -> Checked<()> {
        let word = to.signal_word()?;
        if word.len_bytes != 8 {
            return Err(to.failure("a signal word of 8 bytes", format!("{} bytes", word.len_bytes)));
        }
        let value = to.word(&word)?;
        if value != 0 {
            return Err(to.failure("a new signal word is zero", format!("{value:#x}")));
        }
        let word_name = from.import(&word)?;
        let source = Name::Local { number: self.source.number };
        let lane = from.bind(source, self.destination_name, word_name)?;
        let (steps, unsignalled) = (Vec::new(), Vec::new());
        self.lanes.push(WayLane { lane, word, word_name, sequence: 0, signal: 0, steps, unsignalled });
        Ok(())
    }

    /// Gives both memories new contents. Nothing is under way.
    pub(super) fn refill(&mut self, from: &Side, to: &Side, round: u64) -> Checked<()> {
        (self.source_seed, self.base_seed) = (2 * round + 1, 2 * round);
        self.forget_puts();
        from.fill(&self.source, self.source_seed)?;
        to.fill(&self.destination, self.base_seed)
    }

    /// Nobody has to see the puts so far.
    pub(super) fn forget_puts(&mut self) {
        for lane in &mut self.lanes {
            lane.unsignalled.clear();
            lane.steps.iter_mut().for_each(|step| step.pieces.clear());
        }
    }

    /// The next op of a lane: a put (source offset, destination offset, length), a signal that advances by so much if
    /// it is not 0, a flush.
    pub(super) fn op(
        &mut self,
        lane: usize,
        put: Option<(u64, u64, u64)>,
        signal_by: u64,
        flush: bool,
    ) -> Op {
        let source_seed = self.source_seed;
        let state = &mut self.lanes[lane];
        let sequence = state.sequence;
        state.sequence += 1;
        let put = put.map(|(source_offset_bytes, destination_offset_bytes, len_bytes)| {
            state.unsignalled.push(Piece {
                offset_bytes: destination_offset_bytes,
                len_bytes,
                seed: source_seed,
                pattern_offset_bytes: source_offset_bytes,
            });
            Put { source_offset_bytes, destination_offset_bytes, len_bytes }
        });
        let signal = (signal_by != 0).then(|| {
            state.signal = state.signal.wrapping_add(signal_by);
            let pieces = core::mem::take(&mut state.unsignalled);
            state.steps.push(Milestone { value: state.signal, pieces });
            state.signal
        });
        Op { lane: state.lane, sequence, put, signal, flush }
    }

    /// The latest op of its lane was refused, and is not going to be offered again.
    pub(super) fn take_back(&mut self, op: &Op) {
        for lane in self.lanes.iter_mut().filter(|lane| lane.lane == op.lane) {
            lane.sequence -= 1;
            if op.signal.is_some() {
                lane.unsignalled = lane.steps.pop().map_or_else(Vec::new, |step| step.pieces);
                lane.signal = lane.steps.last().map_or(0, |step| step.value);
            }
            if op.put.is_some() {
                lane.unsignalled.pop();
            }
        }
    }

    /// Signals and flushes every lane, so that all puts are behind a signal.
    pub(super) fn last_ops(&mut self) -> Vec<Op> {
        (0..self.lanes.len()).map(|lane| self.op(lane, None, 1, true)).collect()
    }

    /// Puts of one lane that whoever sees the next signal of the other has to see.
    pub(super) fn hand_over(&mut self, from: usize, to: usize) {
        let pieces = core::mem::take(&mut self.lanes[from].unsignalled);
        self.lanes[to].unsignalled.extend(pieces);
    }

    /// What the other side has to watch for the ops so far: all signals since the first.
    pub(super) fn tracks(&self) -> Vec<Track> {
        let track = |lane: &WayLane| Track {
            word: lane.word.number,
            destination: self.destination.number,
            steps: lane.steps.clone(),
        };
        self.lanes.iter().map(track).collect()
    }

    /// What the ops since the last refill have to have written, once all of it is behind a signal.
    pub(super) fn pieces(&self) -> Vec<Piece> {
        self.lanes.iter().flat_map(|lane| lane.steps.iter().flat_map(|step| &step.pieces)).copied().collect()
    }

    /// Ops of all kinds on random lanes, whose puts have these lengths and land apart from each other, in order of
    /// address, as long as they fit.
    pub(super) fn random_ops(&mut self, random: &mut Random, lens: &[u64]) -> Vec<Op> {
        let mut ops = Vec::new();
        let mut at = 0;
        for &len in lens {
            at += random.below(40);
            let lane = random.below(self.lanes.len() as u64) as usize;
            if at + len >= self.destination.len_bytes {
                break;
            }
            let put = Some((random.below(self.source.len_bytes - len), at, len));
            at += len;
            // Put alone, with a signal, with a flush, with both; now and then one of the others after it.
            let kind = random.next();
            let by = if kind & 1 == 0 { 0 } else { 1 };
            ops.push(self.op(lane, put, by, kind & 6 == 0));
            match kind >> 3 & 7 {
                0 => ops.push(self.op(lane, None, 1 + random.below(1 << 20), false)),
                1 => ops.push(self.op(lane, None, 0, true)),
                2 => ops.push(self.op(lane, None, 1, true)),
                _ => {}
            }
        }
        ops.extend(self.last_ops());
        ops
    }
}
