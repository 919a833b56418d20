//! How a process becomes part of a run.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::CliqueError;
use crate::rendezvous::file::folder::{Folder, Lock, owner_of_new_files};
use crate::rendezvous::file::{Memory, Pause, SharedFile, check_run, gone, participant_of, short};
use crate::rendezvous::identity::{fresh_instance, own_name};
use crate::rendezvous::wire::{Frame, HEADER_BYTES, Hello, Instance, MAX_HELLO_BYTES, Wrong};
use crate::rendezvous::{Membership, end_of};

/// How a process takes part by files.
#[derive(Clone, Debug)]
pub struct SharedFileConfig {
    /// Who it is.
    pub member: Membership,
    /// A folder that all of them share and may write to.
    pub directory: PathBuf,
    /// The limit for coming up.
    pub within: Duration,
}

/// The time that coming up has.
#[derive(Clone, Copy)]
struct Time {
    began: Instant,
    end: Instant,
}

impl Time {
    fn is_over(self) -> bool {
        Instant::now() >= self.end
    }
}

impl SharedFile {
    /// Becomes a participant, and waits for all others. What a start that fails leaves behind, the next one removes.
    ///
    /// Two machines see each other's files as soon as their file system shows them, which on some takes seconds.
    ///
    /// # Errors
    /// - [`CliqueError::Config`]: the membership makes no sense; there is such a participant already, as far as the file
    ///   system has locks; participant 0 expects another number of them;
    /// - [`CliqueError::Timeout`]: somebody has not come, with what was wrong with the file that should have been theirs;
    /// - [`CliqueError::Foreign`]: a file that is not what it should be, such as a symbolic link, or somebody else's;
    /// - [`CliqueError::System`]: the system's own.
    pub fn start(config: SharedFileConfig) -> Result<Self, CliqueError> {
        let SharedFileConfig { member, directory, within } = config;
        member.check()?;
        let time = Time { began: Instant::now(), end: end_of(within) };
        let instance = fresh_instance()?;
        let owner = owner_of_new_files(&directory, &instance)?;
        let job = Folder::open(directory.join(format!("portway-{}", short(member.token.bytes()))), owner)?;
        let Some(seat) = Lock::take(&job, &format!("seat.{}", member.participant))? else {
            let hello = job.read(&format!("hello.{}", member.participant), HEADER_BYTES + MAX_HELLO_BYTES)?;
            let name = match hello.map(|bytes| Frame::decode(&bytes, MAX_HELLO_BYTES)) {
                Some(Ok(Frame::Hello(hello))) => hello.name,
                _ => "another process".to_owned(),
            };
            return Err(CliqueError::Config {
                what: format!("participant {}", member.participant),
                expected: "one".to_owned(),
                seen: format!("a second one: it is {name} already"),
            });
        };
        let hello = Hello {
            token: member.token.bytes().to_vec(),
            participant: member.participant,
            participants: member.participants,
            instance,
            name: own_name(),
        };
        job.write(&format!("hello.{}", member.participant), &Frame::Hello(hello.clone()).encode())?;
        let (run, names) = match member.participant {
            0 => begin_run(&job, &seat, &hello, time)?,
            _ => (join_run(&job, &hello, time)?, Vec::new()),
        };
        let rounds = Folder::open(run.file("rounds"), run.owner())?;
        let memory = Mutex::new(Memory::default());
        Ok(SharedFile { member, job, run, rounds, seat: Some(seat), memory, names })
    }
}

fn run_name(run: &Instance) -> String {
    let digits: String = run.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("run-{digits}")
}

/// Participant 0: removes earlier runs, answers hellos until everybody has joined. Returns their names too.
fn begin_run(
    job: &Folder,
    seat: &Lock,
    own: &Hello,
    time: Time,
) -> Result<(Folder, Vec<String>), CliqueError> {
    for name in job.names()? {
        // Without locks, the one that it belongs to might be alive.
        if seat.is_real && (name.starts_with("run-") || participant_of(&name, "welcome").is_some()) {
            job.remove(&name);
        }
    }
    let run = fresh_instance()?;
    let folder = Folder::open(job.file(&run_name(&run)), job.owner())?;
    folder.write("joined.0", &Frame::Hello(own.clone()).encode())?;
    let count = own.participants as usize;
    let mut others: Vec<Other> = (0..count).map(|_| Other::default()).collect();
    others[0].name = own.name.clone();
    let mut pause = Pause::new();
    loop {
        let mut missing = 0;
        for (other, participant) in others.iter_mut().zip(0..).filter(|(other, _)| other.name.is_empty()) {
            other.look(participant, job, &folder, own, &run);
            missing += usize::from(other.name.is_empty());
        }
        if missing == 0 {
            return Ok((folder, others.into_iter().map(|other| other.name).collect()));
        }
        if time.is_over() {
            let first = others.iter().zip(0..).find(|(other, _)| other.name.is_empty());
            let seen =
                first.map(|(other, participant)| format!("participant {participant} {}", other.problem()));
            return Err(CliqueError::Timeout {
                what: format!("gathering {count} processes in {}", job.path().display()),
                expected: "all to join".to_owned(),
                seen: format!("{missing} have not; {}", seen.unwrap_or_default()),
                waited: time.began.elapsed(),
            });
        }
        pause.wait(time.end);
    }
}

/// What participant 0 knows of another one.
#[derive(Default)]
struct Other {
    /// Empty until it has joined.
    name: String,
    answered: Option<Instance>,
    problem: Option<String>,
}

impl Other {
    fn problem(&self) -> String {
        match (&self.problem, &self.answered) {
            (Some(problem), _) => format!("has a file that is none of this run: {problem}"),
            (None, Some(_)) => {
                "has said hello and not joined: it has gone, or its file is of an earlier run".to_owned()
            }
            (None, None) => "has not come".to_owned(),
        }
    }

    /// A file that is wrong may be an earlier run's, so it ends nothing; it is told when the time is over.
    fn look(&mut self, participant: u32, job: &Folder, run_folder: &Folder, own: &Hello, run: &Instance) {
        match read_hello(run_folder, "joined", participant) {
            Ok(Some(hello)) => return self.name = hello.name,
            Ok(None) => {}
            Err(error) => return self.problem = Some(error.to_string()),
        }
        let hello = match read_hello(job, "hello", participant) {
            Ok(Some(hello)) if Some(hello.instance) != self.answered => hello,
            Ok(_) => return,
            Err(error) => return self.problem = Some(error.to_string()),
        };
        if hello.token != own.token {
            return self.problem = Some("its job token is another one".to_owned());
        }
        self.problem = None;
        let mut answer = Ok(*run);
        if hello.participants != own.participants {
            let parts = [
                format!("number of participants of participant {participant}, {}", hello.name),
                own.participants.to_string(),
                hello.participants.to_string(),
            ];
            self.problem = Some(format!("{}: expected {}, seen {}", parts[0], parts[1], parts[2]));
            answer = Err(parts);
        }
        let frame = Frame::Run { to: hello.instance, run: answer };
        match job.write(&format!("welcome.{participant}"), &frame.encode()) {
            Ok(()) => self.answered = Some(hello.instance),
            Err(error) => self.problem = Some(error.to_string()),
        }
    }
}

fn read_hello(folder: &Folder, kind: &str, participant: u32) -> Result<Option<Hello>, CliqueError> {
    let name = format!("{kind}.{participant}");
    let Some(bytes) = folder.read(&name, HEADER_BYTES + MAX_HELLO_BYTES)? else { return Ok(None) };
    let peer = || format!("participant {participant}, in {},", folder.file(&name).display());
    match Frame::decode(&bytes, MAX_HELLO_BYTES).map_err(|wrong| wrong.from(&peer()))? {
        Frame::Hello(hello) if hello.participant == participant => Ok(Some(hello)),
        Frame::Hello(hello) => Err(Wrong::new("participant", participant, hello.participant).from(&peer())),
        other => Err(Wrong::new("file", "its hello", other.kind()).from(&peer())),
    }
}

/// The others: wait for participant 0's answer to this very hello.
fn join_run(job: &Folder, own: &Hello, time: Time) -> Result<Folder, CliqueError> {
    let name = format!("welcome.{}", own.participant);
    let mut pause = Pause::new();
    loop {
        let mut seen = "none".to_owned();
        match job.read(&name, HEADER_BYTES + MAX_HELLO_BYTES) {
            Ok(Some(bytes)) => match Frame::decode(&bytes, MAX_HELLO_BYTES) {
                Ok(Frame::Run { to, run }) if to == own.instance => {
                    return match run {
                        Err([what, expected, seen]) => {
                            job.remove(&format!("hello.{}", own.participant));
                            Err(CliqueError::Config { what, expected, seen })
                        }
                        Ok(run) => {
                            let path = job.file(&run_name(&run));
                            let folder =
                                Folder::existing(path.clone(), job.owner())?.ok_or_else(|| gone(&path))?;
                            folder.write(
                                &format!("joined.{}", own.participant),
                                &Frame::Hello(own.clone()).encode(),
                            )?;
                            wait_for_all(&folder, own, time)?;
                            Ok(folder)
                        }
                    };
                }
                Ok(_) => seen = "one of an earlier run".to_owned(),
                Err(wrong) => seen = wrong.from("participant 0").to_string(),
            },
            Ok(None) => {}
            Err(error) => seen = error.to_string(),
        }
        if let Some(hello) =
            read_hello(job, "hello", own.participant)?.filter(|hello| hello.instance != own.instance)
        {
            return Err(CliqueError::Config {
                what: format!("participant {}", own.participant),
                expected: "one".to_owned(),
                seen: format!("a second one: {}", hello.name),
            });
        }
        if time.is_over() {
            job.remove(&format!("hello.{}", own.participant));
            return Err(CliqueError::Timeout {
                what: format!("joining a run in {}", job.path().display()),
                expected: "an answer of participant 0".to_owned(),
                seen,
                waited: time.began.elapsed(),
            });
        }
        pause.wait(time.end);
    }
}

/// Participant 0 has answered; the others are under way, or not.
fn wait_for_all(folder: &Folder, own: &Hello, time: Time) -> Result<(), CliqueError> {
    let mut pause = Pause::new();
    loop {
        let joined: HashSet<u32> =
            folder.names()?.iter().filter_map(|name| participant_of(name, "joined")).collect();
        let missing: Vec<u32> =
            (0..own.participants).filter(|participant| !joined.contains(participant)).collect();
        let Some(first) = missing.first() else { return Ok(()) };
        check_run(folder)?;
        if time.is_over() {
            return Err(CliqueError::Timeout {
                what: format!("gathering {} processes in {}", own.participants, folder.path().display()),
                expected: "all to join".to_owned(),
                seen: format!("{} have not; participant {first} has not come", missing.len()),
                waited: time.began.elapsed(),
            });
        }
        pause.wait(time.end);
    }
}
