//! A participant that is a process of its own: this test program, started again.
//!
//! It stops before each step until the test says `go`, and says what it does, one line each:
//! `at STEP`, `ok STEP`, `missing STEP WHO WHEREABOUTS`, `error STEP TEXT`, `took STEP MILLISECONDS`, `end`.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use portway_clique::rendezvous::{
    JobToken, Membership, Post, Rendezvous, Round, SharedFile, SharedFileConfig, Tcp, TcpConfig,
};
use rustix::process::{Pid, Signal, kill_process};

use crate::meeting::PATIENCE;

const VARIABLE: &str = "PORTWAY_TEST_PARTICIPANT";
/// A child that nobody ends ends itself.
const LIFE: Duration = Duration::from_secs(120);

/// Where participants meet: an address, or a folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Tcp,
    SharedFile,
}

/// What a participant is told.
#[derive(Clone, Debug)]
pub struct Part {
    pub kind: Kind,
    pub place: String,
    pub participant: u32,
    pub participants: u32,
    pub token: String,
    pub attempt: u64,
    pub limit: Duration,
}

/// The steps, in order.
pub const STEPS: [&str; 6] = ["connect", "post-a", "gather-a", "post-b", "gather-b", "close"];

/// A started participant.
pub struct Participant {
    pub number: u32,
    child: Child,
    stdin: ChildStdin,
    lines: Receiver<String>,
}

impl Participant {
    pub fn start(part: &Part) -> Self {
        let Part { kind, place, participant, participants, token, attempt, limit } = part;
        let value = format!(
            "{kind:?}\n{place}\n{participant}\n{participants}\n{token}\n{attempt}\n{}",
            limit.as_millis()
        );
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["participant", "--exact", "--nocapture", "--test-threads=1"])
            .env(VARIABLE, value)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (stdin, stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let (line, lines) = channel();
        std::thread::spawn(move || {
            for text in BufReader::new(stdout).lines().map_while(Result::ok) {
                // The test harness begins its line before the participant does.
                let text = text.rsplit("... ").next().unwrap_or_default().to_owned();
                let _ = line.send(text);
            }
        });
        Participant { number: *participant, child, stdin, lines }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits until it is about to do a step.
    pub fn wait_for(&self, step: &str) {
        self.read_until(&format!("at {step}"));
    }

    /// Lets it do the step that it is about to do.
    pub fn go(&mut self) {
        let _ = self.stdin.write_all(b"go\n");
    }

    /// Lets it go on to a step, which it is then about to do.
    pub fn bring_to(&mut self, step: &str) {
        for each in STEPS {
            self.wait_for(each);
            if each == step {
                return;
            }
            self.go();
        }
    }

    /// Lets it do the rest, from a step that it is about to do; returns all that it says.
    pub fn finish(&mut self) -> Vec<String> {
        for _ in STEPS {
            self.go();
        }
        self.read_until("end")
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Everything up to a line.
    fn read_until(&self, line: &str) -> Vec<String> {
        let began = Instant::now();
        let mut seen = Vec::new();
        loop {
            match self.lines.recv_timeout(PATIENCE.saturating_sub(began.elapsed())) {
                Ok(next) if next == line => return seen,
                Ok(next) => seen.push(next),
                Err(RecvTimeoutError::Timeout) => {
                    panic!("participant {}: waited for {line:?}, seen {seen:#?}", self.number)
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
    let [kind, place, participant, participants, token, attempt, limit] = parts[..] else {
        panic!("{VARIABLE}={value:?}")
    };
    let token = JobToken::new(token).unwrap();
    let member = Membership {
        token,
        participant: participant.parse().unwrap(),
        participants: participants.parse().unwrap(),
    };
    let (attempt, within) = (attempt.parse().unwrap(), Duration::from_millis(limit.parse().unwrap()));
    println!(); // the harness has begun a line
    run(kind, place, member, attempt, within);
    println!("end");
}

fn pause(step: &str) {
    println!("at {step}");
    let mut line = String::new();
    if std::io::stdin().read_line(&mut line).unwrap_or(0) == 0 {
        std::process::exit(98); // the test has gone
    }
}

/// Says how a step ended; `None` if it failed.
fn say<T, E: std::fmt::Display>(step: &str, began: Instant, result: Result<T, E>) -> Option<T> {
    println!("took {step} {}", began.elapsed().as_millis());
    match result {
        Ok(value) => {
            println!("ok {step}");
            Some(value)
        }
        Err(error) => {
            println!("error {step} {error}");
            None
        }
    }
}

fn run(kind: &str, place: &str, member: Membership, attempt: u64, within: Duration) -> Option<()> {
    let own = member.participant;
    pause("connect");
    let began = Instant::now();
    let mut tcp = None;
    let mut file = None;
    match kind {
        "Tcp" => {
            let config = TcpConfig { member, address: place.parse().unwrap(), within };
            tcp = Some(say("connect", began, Tcp::start(config))?);
        }
        _ => {
            let config = SharedFileConfig { member, directory: place.into(), within };
            file = Some(say("connect", began, SharedFile::start(config))?);
        }
    }
    let rendezvous: &dyn Rendezvous = match (&tcp, &file) {
        (Some(tcp), _) => tcp,
        (_, Some(file)) => file,
        _ => return None,
    };
    for (phase, post, gather) in [("a", "post-a", "gather-a"), ("b", "post-b", "gather-b")] {
        let round = Round { clique: "test".to_owned(), attempt, phase };
        pause(post);
        let began = Instant::now();
        say(post, began, rendezvous.post(&round, Post::Ok(format!("{phase}{own}").into_bytes())))?;
        pause(gather);
        let began = Instant::now();
        let said = say(gather, began, rendezvous.gather(&round, within))?;
        for (said, other) in said.0.iter().zip(0..) {
            match said {
                Some(Post::Ok(bytes)) if *bytes == format!("{phase}{other}").into_bytes() => {}
                None => {
                    let whereabouts = rendezvous.whereabouts(other).unwrap_or_default();
                    println!("missing {gather} {other} {whereabouts}");
                }
                wrong => println!("error {gather} wrong message of {other}: {wrong:?}"),
            }
        }
    }
    pause("close");
    for turned_away in tcp.iter().flat_map(Tcp::turned_away) {
        println!("turned away {turned_away}");
    }
    let began = Instant::now();
    if let Some(tcp) = tcp {
        say("close", began, tcp.close(within))?;
    }
    if let Some(file) = file {
        say("close", began, file.close(within))?;
    }
    Some(())
}
