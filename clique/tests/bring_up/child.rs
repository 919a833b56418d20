//! A participant that is a process of its own: this test program, started again. It says what it does, one line each:
//! `address ADDRESS` of the store, `at STEP` before the step that it stops at, until it is told to go on; `ready`, `ok WHAT` or `error WHAT TEXT`, and
//! `took WHAT MILLISECONDS`; `end`.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use portway_clique::rendezvous::{Gathered, JobToken, Membership, Post, Rendezvous, Round, Tcp, TcpConfig};
use portway_clique::{Clique, CliqueError, FirstUse};
use rustix::process::{Pid, Signal, kill_process};

use crate::library::{Before, Library};

const VARIABLE: &str = "PORTWAY_TEST_BRING_UP";
/// A child that nobody ends ends itself.
const LIFE: Duration = Duration::from_secs(120);

/// What a participant is told.
#[derive(Clone, Debug)]
pub struct Part {
    pub address: String,
    pub folder: PathBuf,
    pub participant: u32,
    pub participants: u32,
    pub rank: u32,
    pub size: u32,
    /// Where it stops; nowhere if there is no such step.
    pub stops_at: String,
    pub limit: Duration,
}

pub struct Participant {
    pub number: u32,
    child: Child,
    lines: Receiver<String>,
}

impl Participant {
    pub fn start(part: &Part) -> Self {
        let Part { address, folder, participant, participants, rank, size, stops_at, limit } = part;
        let (folder, millis) = (folder.display(), limit.as_millis());
        let value = format!(
            "{address}\n{folder}\n{participant}\n{participants}\n{rank}\n{size}\n{stops_at}\n{millis}"
        );
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["participant", "--exact", "--nocapture", "--test-threads=1"])
            .env(VARIABLE, value)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdout = child.stdout.take().unwrap();
        let (line, lines) = channel();
        std::thread::spawn(move || {
            for text in BufReader::new(stdout).lines().map_while(Result::ok) {
                let _ = line.send(text);
            }
        });
        Participant { number: *participant, child, lines }
    }

    pub fn go(&mut self) {
        self.child.stdin.as_mut().unwrap().write_all(b"go\n").unwrap();
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Everything up to a line.
    pub fn read_until(&self, line: &str, within: Duration) -> Vec<String> {
        let began = Instant::now();
        let mut seen = Vec::new();
        loop {
            match self.lines.recv_timeout(within.saturating_sub(began.elapsed())) {
                Ok(next) if next == line => return seen,
                Ok(next) => seen.push(next),
                Err(RecvTimeoutError::Timeout) => {
                    panic!("participant {}: waited {within:?} for {line:?}, seen {seen:#?}", self.number)
                }
                Err(RecvTimeoutError::Disconnected) => {
                    panic!("participant {} has ended before {line:?}, seen {seen:#?}", self.number)
                }
            }
        }
    }
}

impl Drop for Participant {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What the child does, if this process is one.
pub fn play() {
    let Ok(value) = std::env::var(VARIABLE) else { return };
    std::thread::spawn(|| {
        std::thread::sleep(LIFE);
        std::process::exit(99);
    });
    let parts: Vec<&str> = value.split('\n').collect();
    let [address, folder, participant, participants, rank, size, stops_at, millis] = parts[..] else {
        panic!("{VARIABLE}={value:?}")
    };
    let number = |text: &str| text.parse::<u32>().unwrap();
    println!(); // the harness has begun a line
    run(&Part {
        address: address.to_owned(),
        folder: folder.into(),
        participant: number(participant),
        participants: number(participants),
        rank: number(rank),
        size: number(size),
        stops_at: stops_at.to_owned(),
        limit: Duration::from_millis(u64::from(number(millis))),
    });
    println!("end");
}

/// Stops at one step, the first time that it comes there, until it is told to go on.
fn stops_at(step: &str) -> Before {
    let (step, has_stopped) = (step.to_owned(), AtomicBool::new(false));
    Arc::new(move |next: &str| {
        if next == step && !has_stopped.swap(true, Ordering::AcqRel) {
            println!("at {step}");
            let mut line = String::new();
            if std::io::stdin().read_line(&mut line).unwrap_or(0) == 0 {
                std::process::exit(98); // the test has gone
            }
        }
    })
}

struct Stopping(Tcp, Before);

impl core::fmt::Debug for Stopping {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.0.fmt(f)
    }
}

impl Rendezvous for Stopping {
    fn participant(&self) -> u32 {
        self.0.participant()
    }

    fn participants(&self) -> u32 {
        self.0.participants()
    }

    fn post(&self, round: &Round, post: Post) -> Result<(), CliqueError> {
        (self.1)(&format!("post-{}", round.phase));
        self.0.post(round, post)
    }

    fn gather(&self, round: &Round, within: Duration) -> Result<Gathered, CliqueError> {
        (self.1)(&format!("gather-{}", round.phase));
        self.0.gather(round, within)
    }

    fn look(&self, round: &Round) -> Result<Option<Gathered>, CliqueError> {
        self.0.look(round)
    }

    fn whereabouts(&self, participant: u32) -> Option<String> {
        self.0.whereabouts(participant)
    }
}

/// Leaves the rendezvous last, so that a store stays until the others have left it: a process that ends waits for no thread.
struct Last(Arc<Stopping>);

impl Drop for Last {
    fn drop(&mut self) {
        let start = Instant::now();
        while Arc::strong_count(&self.0) > 1 && start.elapsed() < Duration::from_secs(5) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn say<T>(what: &str, began: Instant, result: Result<T, CliqueError>) -> Option<T> {
    println!("took {what} {}", began.elapsed().as_millis());
    match result {
        Ok(value) => {
            println!("ok {what}");
            Some(value)
        }
        Err(error) => {
            println!("error {what} {error}");
            None
        }
    }
}

fn run(part: &Part) -> Option<()> {
    let before = stops_at(&part.stops_at);
    let member = Membership {
        token: JobToken::new("the token of this job").unwrap(),
        participant: part.participant,
        participants: part.participants,
    };
    let config = TcpConfig { member, address: part.address.parse().unwrap(), within: 10 * part.limit };
    let (began, tcp) = (Instant::now(), Tcp::start(config));
    tcp.iter().for_each(|tcp| println!("address {}", tcp.address()));
    let last = Last(Arc::new(Stopping(say("connect", began, tcp)?, before.clone())));
    let library = Arc::new(Library::new(part.folder.clone(), before.clone()));
    let builder = Clique::builder("test", part.size)
        .local(part.rank, 0)
        .call_within(part.limit)
        .heartbeat(Duration::from_millis(50))
        .first_use(FirstUse::default().all_gather().large_bytes(4096));
    let (began, rendezvous) = (Instant::now(), last.0.clone());
    let mut clique = say("bring-up", began, builder.bring_up(library, rendezvous, part.limit))?;
    before("ready");
    let mut member = clique.members().remove(0);
    let began = Instant::now();
    say("barrier", began, member.barrier())?;
    drop(member);
    let began = Instant::now();
    let closed = say("close", began, clique.close(part.limit))?;
    println!("everybody {}", closed.everybody);
    Some(())
}
