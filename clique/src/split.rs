//! Children of a ready clique: a split, or a shrink. Every member joins, or none.
//!
//! The participants tell each other, in this order: what their members want; that they go on, after which the library is
//! called, by all; that the children are up; that what was declared has run.

use core::time::Duration;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};

use crate::CliqueError;
use crate::backend::{LocalRank, RawComm, SplitCall, Status};
use crate::barrier::Late;
use crate::failure::Fault;
use crate::group::{self, Plan, Up};
use crate::joint::{Joint, Part};
use crate::life::{ABORTED_BY, Life, told_by};
use crate::message::{Note, SplitMessage};
use crate::owner::{Desk, spawn};
use crate::rendezvous::Post;
use crate::rounds::{Heard, Rounds, Short, note_of};
use crate::state::Phase;
use crate::sync::{Deadline, lock};
use crate::team::{Team, Word};
use crate::uses::Use;
use crate::verify::Seat;
use crate::watcher::Watcher;

/// What a member asks of a split: its colour and its key.
pub(crate) type Wish = (Option<u32>, i32);

/// A place in a child.
#[derive(Clone, Debug)]
pub(crate) struct Child {
    pub(crate) team: Arc<Team>,
    pub(crate) seat: u32,
}

/// A child to be: its name, and its ranks as the parent counts them, in the child's order.
struct Spec {
    name: String,
    members: Vec<u32>,
}

/// A child on its way.
struct Draft {
    life: Arc<Life>,
    plan: Plan,
    seats: Vec<Seat>,
    /// The parent's local seats that have a place in it, in the order of the plan's local ranks.
    from: Vec<usize>,
}

/// The call that makes the children: of each local seat that has one, its communicator.
type Make = Box<dyn FnOnce(&Desk) -> Result<(Status, Vec<(usize, RawComm)>), Fault> + Send>;

/// The round in which all say what their members want.
const WISHES: &str = "wishes";
/// How often the others are listened to while the library is called.
const LISTEN_EVERY: Duration = Duration::from_millis(50);

/// Brings a local seat, whose wish is with the team, to a split.
pub(crate) fn split(team: &Team, seat: u32, number: u32) -> Result<Word, CliqueError> {
    let rounds = rounds(team, &format!("split{number}"), None);
    arrive(team, seat, &format!("split {number}"), &rounds, |word, deadline| {
        let wishes: Vec<Wish> =
            lock(&team.wishes).iter_mut().map(|wish| wish.take().unwrap_or((None, 0))).collect();
        let said =
            team.locals.iter().zip(&wishes).map(|(local, (color, key))| (local.rank, *color, *key)).collect();
        let said = word.and_then(|()| SplitMessage(said).encode());
        let drafts = agree(team, &rounds, said, deadline, |messages| {
            let mut colors: BTreeMap<u32, Vec<(i32, u32)>> = BTreeMap::new();
            for (rank, (color, key)) in wishes_of_all(team, &rounds, messages)? {
                if let Some(color) = color {
                    colors.entry(color).or_default().push((key, rank));
                }
            }
            let specs = colors.into_iter().map(|(color, mut order)| {
                order.sort_unstable();
                let members = order.into_iter().map(|(_, rank)| rank).collect();
                Spec { name: format!("split{number}.{color}"), members }
            });
            Ok(specs.collect())
        })?;
        let comms = team.comms.clone();
        let make: Make = Box::new(move |desk| {
            let calls: Vec<SplitCall> = comms
                .iter()
                .zip(&wishes)
                .map(|(parent, (color, key))| SplitCall { parent: *parent, color: *color, key: *key })
                .collect();
            let mut children = vec![RawComm::NULL; calls.len()];
            let made = &mut children;
            let status = desk.call(None, "split", |backend| {
                // SAFETY: the parents are this group's, of this library, and nobody has taken them while `call` runs
                // this; none is in progress, since all local members stand at the barrier. There are as many places as
                // calls.
                unsafe { backend.split(&calls, made) }
            })?;
            Ok((status, children.into_iter().enumerate().collect()))
        });
        children(team, &rounds, drafts, make, deadline)
    })
}

/// Brings a local seat to a shrink: a child without some ranks.
pub(crate) fn shrink(
    team: &Team,
    seat: u32,
    number: u32,
    excluded: &BTreeSet<u32>,
) -> Result<Word, CliqueError> {
    let stays = |rank: &u32| !excluded.contains(rank);
    let members: Vec<u32> = (0..team.size).filter(stays).collect();
    let who: BTreeSet<u32> = members.iter().map(|rank| team.seats[*rank as usize].participant).collect();
    let rounds = rounds(team, &format!("shrink{number}"), Some(who));
    let purpose = format!("shrink {number}, without {excluded:?}");
    arrive(team, seat, &purpose, &rounds, |word, deadline| {
        let said = bits(team.size, excluded);
        let drafts = agree(team, &rounds, word.map(|()| said.clone()), deadline, |messages| {
            let other = messages.iter().find(|(_, other)| *other != said);
            if let Some((participant, other)) = other {
                let count: u32 = other.iter().map(|byte| byte.count_ones()).sum();
                return Err(CliqueError::Foreign {
                    peer: rounds.name(*participant),
                    what: "set of excluded ranks",
                    expected: format!("{excluded:?}"),
                    seen: format!("another, of {count} ranks"),
                });
            }
            Ok(vec![Spec { name: format!("shrink{number}"), members }])
        })?;
        let parents =
            team.locals.iter().zip(&team.comms).enumerate().filter(|(_, (local, _))| stays(&local.rank));
        let parents: Vec<(usize, RawComm)> = parents.map(|(seat, (_, comm))| (seat, *comm)).collect();
        let excluded: Vec<u32> = excluded.iter().copied().collect();
        let make: Make = Box::new(move |desk| {
            let comms: Vec<RawComm> = parents.iter().map(|(_, comm)| *comm).collect();
            let mut children = vec![RawComm::NULL; comms.len()];
            let made = &mut children;
            let status = desk.call(None, "shrink", |backend| {
                // SAFETY: as in `split`. Every member that is not excluded takes part, with the same ranks excluded: the
                // local ones came to the barrier for it, and the participants have told each other.
                unsafe { backend.shrink(&comms, &excluded, made) }
            })?;
            let status = status.map_err(|error| Fault::of(None, &error))?;
            Ok((status, parents.iter().map(|(seat, _)| *seat).zip(children).collect()))
        });
        children(team, &rounds, drafts, make, deadline)
    })
}

/// A set of ranks, a bit for each, so that it fits into a message however many there are.
fn bits(size: u32, ranks: &BTreeSet<u32>) -> Vec<u8> {
    let mut bits = vec![0; size.div_ceil(8) as usize];
    for rank in ranks {
        bits[*rank as usize / 8] |= 1 << (rank % 8);
    }
    bits
}

/// The rounds of a split, under a name that all participants make up alike.
fn rounds(team: &Team, name: &str, who: Option<BTreeSet<u32>>) -> Rounds {
    let mut rounds = team.life.rounds.keyed(name);
    if let Some(who) = who {
        let everybody = who.len() == team.life.rounds.rendezvous.participants() as usize;
        rounds.who = if everybody { None } else { Some(who.into_iter().collect()) };
    }
    rounds
}

/// Brings a local seat to the barrier. If not all have come in time nobody of this process will, so the others are told.
fn arrive(
    team: &Team,
    seat: u32,
    purpose: &str,
    rounds: &Rounds,
    lead: impl FnOnce(Result<(), CliqueError>, Deadline) -> Result<Word, CliqueError>,
) -> Result<Word, CliqueError> {
    let left = team.arrive(seat, purpose, Ok(()), Late::CallsOff, lead);
    if let Err(error @ CliqueError::Timeout { .. }) = &left {
        let note = note_of(error, Phase::Ready, &team.life.process);
        let until = told_by(Deadline::after(Duration::ZERO));
        // Each of them says so, and the first counts. Where the others cannot be told their own deadlines end their waits.
        let _ = rounds.post(WISHES, Post::Failed(note.encode()), until);
        // As everybody does in every round, or it is kept.
        let _ = rounds.hear_so_far(WISHES, until);
    }
    left
}

/// Says what the local members want, hears what all want, and returns once it is sure that everybody goes on from here to
/// the library, or nobody.
fn agree(
    team: &Team,
    rounds: &Rounds,
    said: Result<Vec<u8>, CliqueError>,
    deadline: Deadline,
    specs: impl FnOnce(&[(u32, Vec<u8>)]) -> Result<Vec<Spec>, CliqueError>,
) -> Result<Vec<Draft>, CliqueError> {
    let process = &team.life.process;
    let (post, said) = match said {
        Ok(message) => (Post::Ok(message), Ok(())),
        Err(error) => (Post::Failed(note_of(&error, Phase::Ready, process).encode()), Err(error)),
    };
    let heard = rounds.exchange(WISHES, post, deadline, || team.life.check());
    said?;
    let stopped = |why: String| {
        let cause = format!("participant {} has stopped waiting: {why}", rounds.rendezvous.participant());
        failed(team, Fault::new(None, cause).note(Phase::Ready, process))
    };
    let drafts = match heard {
        Ok(messages) => specs(&messages)
            .and_then(|specs| specs.iter().filter_map(|spec| draft(team, spec).transpose()).collect()),
        // All hear that.
        Err(Short::Failed(note)) => return Err(failed(team, note)),
        Err(Short::Silent(why)) => Err(stopped(why)),
        Err(Short::Error(error)) => Err(stopped(error.to_string())),
    };
    // Whoever comes late still hears what all want. So who has left meanwhile says so in this round. If somebody does not
    // come to it some may be in the library and some not, and the parent ends.
    let goes_on = drafts.as_ref().map(drop).map_err(Clone::clone);
    team.meet_others(rounds, goes_on, deadline)?;
    drafts
}

fn failed(team: &Team, note: Note) -> CliqueError {
    CliqueError::Failed(Arc::new(team.life.failure(note)))
}

/// By rank, what all wish. Each rank is spoken for once, by its own participant.
fn wishes_of_all(
    team: &Team,
    rounds: &Rounds,
    messages: &[(u32, Vec<u8>)],
) -> Result<BTreeMap<u32, Wish>, CliqueError> {
    let mut all = BTreeMap::new();
    for (participant, message) in messages {
        let peer = rounds.name(*participant);
        for (rank, color, key) in SplitMessage::decode(message, &peer)?.0 {
            let is_its = team.seats.get(rank as usize).is_some_and(|seat| seat.participant == *participant);
            if !is_its || all.insert(rank, (color, key)).is_some() {
                let expected = "its own ranks, each once".to_owned();
                return Err(CliqueError::Foreign {
                    peer,
                    what: "rank of a split",
                    expected,
                    seen: rank.to_string(),
                });
            }
        }
    }
    if all.len() < team.size as usize {
        return Err(CliqueError::Foreign {
            peer: "the participants".to_owned(),
            what: "number of ranks in a split",
            expected: team.size.to_string(),
            seen: all.len().to_string(),
        });
    }
    Ok(all)
}

/// Children on their way. Those that are still here when this is dropped are ended, also when the leader panics.
struct Drafts {
    all: Vec<Draft>,
    /// Why they end.
    note: Note,
    deadline: Deadline,
}

impl Drop for Drafts {
    fn drop(&mut self) {
        abandon(&self.all, &self.note, self.deadline);
    }
}

/// Makes the children, brings them up, uses them first, on all participants or on none.
fn children(
    team: &Team,
    rounds: &Rounds,
    drafts: Vec<Draft>,
    make: Make,
    deadline: Deadline,
) -> Result<Word, CliqueError> {
    let note = Fault::new(None, "what makes the children panicked").note(Phase::Ready, &team.life.process);
    let mut drafts = Drafts { all: drafts, note, deadline };
    let result = bring_up(team, rounds, &drafts.all, make, deadline);
    match &result {
        Ok(_) => drafts.all.clear(),
        Err(note) => drafts.note = note.clone(),
    }
    result.map_err(|note| failed(team, note))
}

/// Ends children that nobody joins: all at once, since what hangs in one takes all the time that there is. The deadline
/// is kept, or those who wait for this one at the barrier would take it for lost, and the parent with it.
fn abandon(drafts: &[Draft], note: &Note, deadline: Deadline) {
    let (ended, all_have) = sync_channel::<()>(0);
    for draft in drafts {
        let (life, note, ended) = (draft.life.clone(), note.clone(), ended.clone());
        let end = move || {
            // Told in the child's own round, too: another participant may have heard that all are done.
            let failed = CliqueError::Failed(Arc::new(life.failure(note.clone())));
            life.finish_and_tell(failed, Some(&note), deadline);
            drop(ended);
        };
        if spawn("clique-abandon", end.clone()).is_err() {
            // No thread is to be had for it.
            end();
        }
    }
    drop(ended);
    // Nothing is ever sent: the channel ends when the last thread has, which each does in time.
    let _ = all_have.recv_timeout(deadline.plus(ABORTED_BY).left());
}

fn bring_up(
    team: &Team,
    rounds: &Rounds,
    drafts: &[Draft],
    make: Make,
    deadline: Deadline,
) -> Result<Word, Note> {
    let process = &team.life.process;
    let made = made(team, rounds, drafts, make, deadline)?;
    let joint = |round, next| Joint {
        rounds,
        round,
        next,
        begun: None,
        phase: Phase::Ready,
        process,
        seats: &team.seats,
        deadline,
        parent: Some(&team.life),
    };
    let up = drafts.iter().zip(made).map(|(draft, comms)| {
        let plan = draft.plan.clone();
        let part: Part<Up> = Box::new(move |desk, until| {
            let workspaces = group::workspaces(desk, &plan)?;
            group::up(desk, &plan, comms, workspaces, until)
        });
        (draft.life.clone(), part)
    });
    let up = joint("up", "used").run(up.collect())?;
    let used = drafts.iter().zip(up.results).map(|(draft, up)| {
        let plan = draft.plan.clone();
        let part: Part<Vec<RawComm>> = Box::new(move |desk, until| group::use_first(desk, &plan, up, until));
        (draft.life.clone(), part)
    });
    let used = joint("used", "late").run(used.collect())?;
    place(team, drafts, used.results).map_err(|error| note_of(&error, Phase::Ready, process))
}

/// Calls the library for the parents, and puts each child into the custody of its own owner.
fn made(
    team: &Team,
    rounds: &Rounds,
    drafts: &[Draft],
    make: Make,
    deadline: Deadline,
) -> Result<Vec<Vec<RawComm>>, Note> {
    let process = &team.life.process;
    let owners: Vec<(Arc<Life>, Vec<usize>)> =
        drafts.iter().map(|draft| (draft.life.clone(), draft.from.clone())).collect();
    let parents: Vec<(u32, RawComm)> =
        team.locals.iter().zip(&team.comms).map(|(local, comm)| (local.rank, *comm)).collect();
    let answer = team.life.owner.post(move |desk| {
        let (status, children) = make(desk)?;
        let mut placed = Vec::new();
        let mut lost = false;
        for (life, from) in &owners {
            let find = |seat: &usize| {
                children.iter().find(|(other, _)| other == seat).map_or(RawComm::NULL, |c| c.1)
            };
            let comms: Vec<RawComm> = from.iter().map(find).collect();
            let left = life.owner.custody.register(&comms);
            lost |= !left.is_empty();
            group::abort_here(desk, &left);
            placed.push(comms);
        }
        if lost {
            return Err(Fault::taken());
        }
        if status.is_error() {
            return Err(desk.blamed(&parents, "split", status));
        }
        desk.settle(&parents, "split", deadline)?;
        Ok(placed)
    });
    let fault = loop {
        match answer.recv_timeout(deadline.left().min(LISTEN_EVERY)) {
            Ok(Ok(made)) => return Ok(made),
            Ok(Err(fault)) => break fault,
            // One that failed in its call never comes to where this one waits for it.
            Err(RecvTimeoutError::Timeout) if !deadline.is_over() => {
                team.life.check().map_err(|end| note_of(&end, Phase::Ready, process))?;
                let heard = rounds.watch("up").map(|heard| heard.recv_timeout(deadline.left()));
                if let Ok(Ok(Ok(Some(Heard::Failed(note))))) = heard {
                    return Err(note);
                }
            }
            Err(_) => {
                break Fault::new(None, "the call that makes the children did not return by the deadline");
            }
        }
    };
    let note = fault.note(Phase::Ready, process);
    // Where the others cannot be told their own deadlines end their waits.
    let _ = rounds.post("up", Post::Failed(note.encode()), deadline);
    Err(note)
}

/// The child as this participant has it; `None` if it has no rank in it.
fn draft(team: &Team, spec: &Spec) -> Result<Option<Draft>, CliqueError> {
    let place = |rank: u32| spec.members.iter().position(|member| *member == rank).map(|place| place as u32);
    let mut locals = Vec::new();
    let mut from = Vec::new();
    for (seat, local) in team.locals.iter().enumerate() {
        if let Some(rank) = place(local.rank) {
            locals.push(LocalRank { rank, device: local.device });
            from.push(seat);
        }
    }
    if locals.is_empty() {
        return Ok(None);
    }
    let uses = team.plan.uses.iter().filter_map(|one| match one {
        Use::Peers { from, to } => place(*from).zip(place(*to)).map(|(from, to)| Use::Peers { from, to }),
        one => Some(*one),
    });
    let plan = Plan {
        size: spec.members.len() as u32,
        locals,
        uses: uses.collect(),
        large_bytes: team.plan.large_bytes,
    };
    let seats: Vec<Seat> = spec.members.iter().map(|rank| team.seats[*rank as usize].clone()).collect();
    let who: BTreeSet<u32> = seats.iter().map(|seat| seat.participant).collect();
    let mut rounds = team.life.rounds.keyed(&spec.name);
    let everybody = who.len() == rounds.rendezvous.participants() as usize;
    rounds.who = if everybody { None } else { Some(who.into_iter().collect()) };
    let (backend, process) = (team.life.backend.clone(), team.life.process.clone());
    let mut life = Life::new(backend, rounds, process, plan.locals.len())?;
    // Whoever is told that there is no child is shown what did not come back of it.
    life.quarantine = team.life.quarantine.clone();
    Ok(Some(Draft { life: Arc::new(life), plan, seats, from }))
}

/// The children's teams, and the place of each local seat of the parent.
fn place(team: &Team, drafts: &[Draft], comms: Vec<Vec<RawComm>>) -> Result<Word, CliqueError> {
    let mut places = vec![None; team.locals.len()];
    for (draft, comms) in drafts.iter().zip(comms) {
        let child = Team::new(
            draft.life.clone(),
            &draft.plan,
            comms,
            draft.seats.clone(),
            team.call_within,
            team.heartbeat,
        );
        let child = Arc::new(child);
        Watcher::attach(&child)?;
        for (seat, parent_seat) in (0..).zip(&draft.from) {
            places[*parent_seat] = Some(Child { team: child.clone(), seat });
        }
    }
    Ok(Word::Children(places))
}
