//! [`Member`]: one rank of a ready clique, for one thread. [`Buffers`]: what its operations read and write.

use core::time::Duration;
use std::collections::BTreeSet;
use std::sync::Arc;

use crate::CliqueError;
use crate::backend::{
    Backend, BackendError, DataType, Enqueue, Operation, RawComm, RawStream, ReduceOp, Status, Workspace,
};
use crate::barrier::{Arrival, Late};
use crate::closing::Meeting;
use crate::report::Closed;
use crate::split;
use crate::sync::{Deadline, Pause, lock};
use crate::team::{Team, Word};
use crate::uses::{SizeClass, Use};

/// One rank of a clique that is ready.
///
/// It belongs to one thread at a time, and can be sent to another. Each operation is put into a stream by the owner's
/// thread and returns once it is there; the stream does it later. Operations that were declared go straight through.
/// An all-reduce or all-gather that was not declared passes a barrier of all ranks, before and after, the first time it is
/// small and the first time it is large, so that nobody runs ahead of what the library sets up.
///
/// Dropping a member means that it takes part in nothing any more: others that wait for it at a barrier are told.
///
/// A member cannot be copied, so a rank is used in one place:
///
/// ```compile_fail,E0599
/// # fn f(member: portway_clique::Member) {
/// let two = (member.clone(), member); // there is no clone
/// # }
/// ```
#[derive(Debug)]
pub struct Member {
    team: Arc<Team>,
    seat: u32,
    /// How many splits, and shrinks, it has called: the n-th calls of all members belong together, also when one of them was
    /// not joined by all.
    splits: u32,
    shrinks: u32,
}

/// A stream with a buffer to send from and one to receive into, on the device of a rank.
///
/// Making and dropping them may wait for the device. Make them while nothing runs that waits for others.
#[derive(Debug)]
pub struct Buffers {
    workspace: Box<dyn Workspace>,
    device: u32,
    backend: Arc<dyn Backend>,
}

impl Buffers {
    /// How long each buffer is.
    pub fn len_bytes(&self) -> usize {
        self.workspace.len_bytes()
    }

    /// Writes the head of the send buffer, and fills the receive buffer with 0xff.
    ///
    /// # Errors
    /// The device's; more bytes than there are; the stream is not idle.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), CliqueError> {
        self.idle("writing buffers")?;
        Ok(self.workspace.write(bytes)?)
    }

    /// Reads the head of the receive buffer.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn read(&mut self, bytes: &mut [u8]) -> Result<(), CliqueError> {
        self.idle("reading buffers")?;
        Ok(self.workspace.read(bytes)?)
    }

    /// Whether the stream has done everything. Does not wait.
    ///
    /// # Errors
    /// The device's.
    pub fn is_idle(&mut self) -> Result<bool, CliqueError> {
        Ok(self.workspace.is_idle()?)
    }

    fn idle(&mut self, what: &str) -> Result<(), CliqueError> {
        if self.is_idle()? {
            return Ok(());
        }
        let (expected, seen) = ("an idle stream".to_owned(), "work under way".to_owned());
        Err(CliqueError::Config { what: what.to_owned(), expected, seen })
    }
}

impl Member {
    pub(crate) fn new(team: Arc<Team>, seat: u32) -> Self {
        Member { team, seat, splits: 0, shrinks: 0 }
    }

    fn local(&self) -> crate::backend::LocalRank {
        self.team.locals[self.seat as usize]
    }

    fn comm(&self) -> RawComm {
        self.team.comms[self.seat as usize]
    }

    /// Its rank.
    pub fn rank(&self) -> u32 {
        self.local().rank
    }

    /// Its device, as this process counts them.
    pub fn device(&self) -> u32 {
        self.local().device
    }

    /// How many ranks the clique has.
    pub fn size(&self) -> u32 {
        self.team.size
    }

    /// Why the clique cannot be used any more; `None` while it can.
    pub fn end(&self) -> Option<CliqueError> {
        self.team.life.end()
    }

    /// Allocates buffers on this rank's device. May wait for the device.
    ///
    /// # Errors
    /// The device's.
    pub fn buffers(&self, len_bytes: usize) -> Result<Buffers, CliqueError> {
        self.team.life.check()?;
        let (device, backend) = (self.device(), self.team.life.backend.clone());
        Ok(Buffers { workspace: backend.workspace(device, len_bytes)?, device, backend })
    }

    /// Every rank gets the combination of what all have: `count` elements.
    ///
    /// # Errors
    /// [`CliqueError::Config`] for more than the buffers hold; why the clique has ended, or ends with this.
    pub fn all_reduce(
        &mut self,
        buffers: &mut Buffers,
        count: usize,
        data_type: DataType,
        op: ReduceOp,
    ) -> Result<(), CliqueError> {
        self.fits(buffers, count, 1, data_type)?;
        let (send, recv) = (buffers.workspace.send_address(), buffers.workspace.recv_address());
        let operation = Operation::AllReduce { send, recv, count, data_type, op };
        self.collective(Use::AllReduce { data_type, op }, buffers, operation, count * data_type.size_bytes())
    }

    /// Every rank gets what all have, in the order of the ranks: `count` elements of each.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    pub fn all_gather(
        &mut self,
        buffers: &mut Buffers,
        count: usize,
        data_type: DataType,
    ) -> Result<(), CliqueError> {
        self.fits(buffers, count, self.size() as usize, data_type)?;
        let (send, recv) = (buffers.workspace.send_address(), buffers.workspace.recv_address());
        let operation = Operation::AllGather { send, recv, count, data_type };
        self.collective(Use::AllGather, buffers, operation, count * data_type.size_bytes())
    }

    /// Sends `count` elements to a peer, which receives as many.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce); [`CliqueError::Undeclared`] for a peer that was not declared, since not all
    /// ranks are here to wait for each other.
    pub fn send(
        &mut self,
        buffers: &mut Buffers,
        count: usize,
        data_type: DataType,
        peer: u32,
    ) -> Result<(), CliqueError> {
        self.fits(buffers, count, 1, data_type)?;
        self.declared(Use::Peers { from: self.rank(), to: peer })?;
        let send = buffers.workspace.send_address();
        self.enqueue(buffers, "send", Operation::Send { send, count, data_type, peer })
    }

    /// Receives `count` elements from a peer, which sends as many.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn recv(
        &mut self,
        buffers: &mut Buffers,
        count: usize,
        data_type: DataType,
        peer: u32,
    ) -> Result<(), CliqueError> {
        self.fits(buffers, count, 1, data_type)?;
        self.declared(Use::Peers { from: peer, to: self.rank() })?;
        let recv = buffers.workspace.recv_address();
        self.enqueue(buffers, "recv", Operation::Recv { recv, count, data_type, peer })
    }

    /// Waits until the stream of the buffers has done everything, or the clique has ended.
    ///
    /// # Errors
    /// Why the clique has ended; [`CliqueError::Timeout`], and the work is still under way then; the device's.
    pub fn wait(&mut self, buffers: &mut Buffers, within: Duration) -> Result<(), CliqueError> {
        let until = Deadline::after(within);
        let mut pause = Pause::default();
        loop {
            if buffers.is_idle()? {
                return Ok(());
            }
            self.team.life.check()?;
            if until.is_over() {
                return Err(CliqueError::Timeout {
                    what: format!("rank {} of clique {:?}", self.rank(), self.team.life.rounds.clique),
                    expected: "its stream to be idle".to_owned(),
                    seen: "work under way".to_owned(),
                    waited: within,
                });
            }
            pause.wait();
        }
    }

    /// Waits for all ranks of the clique. The local members wait for each other; the last of them for the other
    /// participants. Nothing is put into any stream.
    ///
    /// # Errors
    /// Who did not come in time, and why the clique has ended.
    pub fn barrier(&mut self) -> Result<(), CliqueError> {
        let team = &self.team;
        let lead = |word: Result<(), CliqueError>, until| {
            let number = {
                let mut passes = lock(&team.passes);
                *passes += 1;
                *passes
            };
            team.meet_others(&team.life.rounds.keyed(&format!("barrier{number}")), word, until)?;
            Ok(Word::Go)
        };
        team.arrive(self.seat, "a barrier", Ok(()), Late::Breaks, lead).map(drop)
    }

    /// Runs `body` with the library's own communicator and the device, on the owner's thread, and waits until what it
    /// began is not in progress any more. The communicator is non-blocking; `body` must not block, and must neither end
    /// the communicator nor keep it. Everything else of this process's ranks waits meanwhile.
    ///
    /// # Errors
    /// Why the clique has ended; what `body` began has failed, or did not end in time: then the clique has failed.
    pub fn with_raw<R: Send + 'static>(
        &mut self,
        body: impl FnOnce(RawComm, u32) -> R + Send + 'static,
    ) -> Result<R, CliqueError> {
        self.team.life.check()?;
        let (answer, result) = std::sync::mpsc::sync_channel(1);
        let (comm, device, rank) = (self.comm(), self.device(), self.rank());
        let call = "with_raw";
        let begun = self.team.life.owner.begin(rank, comm, call, move |desk| {
            let value = desk.call(Some(rank), call, |backend| body(backend.handle(comm), device))?;
            // Received below, unless the call is over.
            let _ = answer.send(value);
            Ok(Status::IN_PROGRESS)
        });
        self.team.life.answer(&begun, call, Some(rank), self.team.call_within)?;
        result.try_recv().map_err(|_| self.team.life.ended())
    }

    /// Splits the clique: ranks of one colour make a child together, in the order of their keys, then of their ranks.
    /// `None` joins no child. Every member of the clique calls it, and every one gets its place, or all get an error. A
    /// child runs first what was declared for its parent, as far as its ranks are in it.
    ///
    /// The n-th split of one member belongs to the n-th of every other. One that somebody did not come to by the deadline
    /// is joined by nobody; who comes to it later learns who has stopped waiting, as soon as all others have come as well,
    /// and all can come to the next. The library is called once everybody has said that it goes on.
    ///
    /// # Errors
    /// What failed first, or who did not come. The clique itself stays usable unless it has failed too, as it does if the
    /// time is over just when all go on to the library: some may be in it then, and some not.
    pub fn split(&mut self, color: Option<u32>, key: i32) -> Result<Option<Member>, CliqueError> {
        self.team.life.check()?;
        if let Some(wish) = lock(&self.team.wishes).get_mut(self.seat as usize) {
            *wish = Some((color, key));
        }
        self.splits += 1;
        let word = split::split(&self.team, self.seat, self.splits)?;
        Ok(self.child(word))
    }

    /// Makes a child without some ranks, the same for all who call it. Every member that stays calls it, and, in processes
    /// where some rank stays, the others as well, which get `None`. The n-th shrinks of all members belong together, as
    /// splits do.
    ///
    /// # Errors
    /// As [`split`](Self::split); [`BackendError::NotInLibrary`] from a library that cannot.
    pub fn shrink(&mut self, excluded: &[u32]) -> Result<Option<Member>, CliqueError> {
        let excluded: BTreeSet<u32> = excluded.iter().copied().collect();
        let backend = &self.team.life.backend;
        if !backend.capabilities().shrink {
            return Err(BackendError::NotInLibrary { call: "shrink", library: backend.name() }.into());
        }
        if excluded.iter().any(|rank| *rank >= self.size()) || excluded.len() >= self.size() as usize {
            return Err(CliqueError::Config {
                what: "excluded ranks".to_owned(),
                expected: format!("below {}, and not all", self.size()),
                seen: format!("{excluded:?}"),
            });
        }
        self.shrinks += 1;
        let word = split::shrink(&self.team, self.seat, self.shrinks, &excluded)?;
        Ok(self.child(word))
    }

    /// Closes a clique that came from a split or a shrink, as [`Clique::close`](crate::Clique::close) does: every member of
    /// it calls this. The local ones wait for each other first, so it takes twice `within` at most, and the later the last
    /// of them comes, the less is left for the rest.
    ///
    /// # Errors
    /// As there.
    pub fn close(self, within: Duration) -> Result<Closed, CliqueError> {
        let life = &self.team.life;
        life.check()?;
        let lead = |word: Result<(), CliqueError>, until: Deadline| {
            word?;
            // Those who came first wait no longer than twice `within`, for the last to come and for what it does.
            self.team.close(within.min(until.left()), Meeting::AtTheBarrier).map(Word::Closed)
        };
        let (seat, purpose, twice) = (self.seat, "closing", within.saturating_mul(2));
        let arrival = Arrival { seat, purpose, word: Ok(()), within: twice, late: Late::Breaks };
        match life.barrier.meet(arrival, lead)? {
            Word::Closed(closed) => Ok(closed),
            Word::Go | Word::Children(_) => Err(life.ended()),
        }
    }

    fn child(&self, word: Word) -> Option<Member> {
        match word {
            Word::Go | Word::Closed(_) => None,
            Word::Children(places) => {
                let place = places.into_iter().nth(self.seat as usize).flatten();
                place.map(|place| Member::new(place.team, place.seat))
            }
        }
    }

    fn fits(
        &self,
        buffers: &Buffers,
        count: usize,
        times: usize,
        data_type: DataType,
    ) -> Result<(), CliqueError> {
        let wrong = |what: &str, expected: String, seen: String| {
            Err(CliqueError::Config { what: what.to_owned(), expected, seen })
        };
        if buffers.device != self.device() || !Arc::ptr_eq(&buffers.backend, &self.team.life.backend) {
            let expected = format!("buffers of device {}, made by a member of this clique", self.device());
            return wrong("buffers", expected, format!("some of device {}", buffers.device));
        }
        let bytes = count.checked_mul(times).and_then(|count| count.checked_mul(data_type.size_bytes()));
        match bytes {
            Some(bytes) if count > 0 && bytes <= buffers.len_bytes() => Ok(()),
            _ => wrong(
                "number of elements",
                format!("1 or more, {times} times in {} bytes", buffers.len_bytes()),
                format!("{count} of {data_type:?}"),
            ),
        }
    }

    fn declared(&self, one: Use) -> Result<(), CliqueError> {
        if self.team.has_met(one, SizeClass::Small) {
            Ok(())
        } else {
            Err(CliqueError::Undeclared { operation: one })
        }
    }

    fn collective(
        &mut self,
        one: Use,
        buffers: &Buffers,
        operation: Operation,
        bytes: usize,
    ) -> Result<(), CliqueError> {
        let (team, class) = (self.team.clone(), SizeClass::of(bytes));
        let call = if one == Use::AllGather { "all_gather" } else { "all_reduce" };
        if team.has_met(one, class) {
            return self.enqueue(buffers, call, operation);
        }
        if team.life.rounds.who.is_some() {
            return Err(CliqueError::Undeclared { operation: one });
        }
        let purpose = format!("the first {class:?} {one}");
        let rounds = |when: &str| team.life.rounds.keyed(&format!("{when} {one} {class:?}"));
        let lead = |word, until| team.meet_others(&rounds("before"), word, until).map(|()| Word::Go);
        team.arrive(self.seat, &purpose, Ok(()), Late::Breaks, lead)?;
        let word = self.enqueue(buffers, call, operation);
        let lead = |word, until| {
            team.meet_others(&rounds("after"), word, until)?;
            team.meet(one, class);
            Ok(Word::Go)
        };
        team.arrive(self.seat, &purpose, word, Late::Breaks, lead).map(drop)
    }

    fn enqueue(
        &mut self,
        buffers: &Buffers,
        call: &'static str,
        operation: Operation,
    ) -> Result<(), CliqueError> {
        self.team.life.check()?;
        let (rank, comm) = (self.rank(), self.comm());
        let stream: RawStream = buffers.workspace.stream();
        let begun = self.team.life.owner.begin(rank, comm, call, move |desk| {
            let calls = [Enqueue { comm, operation, stream }];
            // SAFETY: the communicator is this group's, of this library, and nobody has taken it while `call` runs this;
            // it is not in progress, since its one member waits for each call. The addresses are of a workspace of this
            // library, of the length that was checked; their memory outlives the work, as the workspace's contract says.
            desk.call(Some(rank), call, |backend| unsafe { backend.enqueue(&calls) })
        });
        self.team.life.answer(&begun, call, Some(rank), self.team.call_within)
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.team.life.barrier.leave(self.seat);
    }
}
