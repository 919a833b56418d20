//! Processes of a test: the test program once more, told what to be, with a limit.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child as Process, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// The variable that tells a child what it is.
const VARIABLE: &str = "PORTWAY_CLIQUE_CHILD";

/// What this process was told to be, word by word; `None` in a process that is no child.
pub fn told() -> Option<Vec<String>> {
    let told = std::env::var(VARIABLE).ok()?;
    Some(told.split(' ').map(str::to_owned).collect())
}

/// A started child. It is killed when dropped.
pub struct Child {
    name: String,
    process: Process,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
    seen: Vec<String>,
}

/// How a child ended.
pub struct Ended {
    /// It ended by itself, and without a failure.
    pub is_good: bool,
    /// It did not end in time, and was killed.
    pub was_killed: bool,
    /// What it said.
    pub lines: Vec<String>,
}

impl Child {
    /// Starts this program's test `child_process`, which finds `told` and these variables.
    pub fn start(told: &str, variables: &[(&str, &str)]) -> Child {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "child_process", "--nocapture", "--test-threads=1"]).env(VARIABLE, told);
        command.envs(variables.iter().copied());
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let (stdin, stdout) = (process.stdin.take(), process.stdout.take().unwrap());
        let (line, lines) = channel();
        std::thread::spawn(move || {
            for text in BufReader::new(stdout).lines().map_while(Result::ok) {
                // The harness begins its line before the child does.
                let _ = line.send(text.rsplit("... ").next().unwrap_or_default().to_owned());
            }
        });
        Child { name: format!("{told} {variables:?}"), process, stdin, lines, seen: Vec::new() }
    }

    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Waits for a line that begins so; returns the rest of it.
    pub fn wait_for(&mut self, start: &str, limit: Duration) -> String {
        let end = Instant::now() + limit;
        loop {
            match self.lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(line) => {
                    self.seen.push(line);
                    if let Some(rest) = self.seen.last().and_then(|line| line.strip_prefix(start)) {
                        return rest.trim().to_owned();
                    }
                }
                Err(why) => panic!(
                    "child {:?}: waited {limit:?} for {start:?} ({why}), seen {:?}",
                    self.name, self.seen
                ),
            }
        }
    }

    /// Lets it go on from [`pause`].
    pub fn go(&mut self) {
        if let Some(stdin) = &mut self.stdin {
            // It may be gone already.
            let _ = stdin.write_all(b"go\n");
        }
    }

    pub fn kill(&mut self) {
        // It may have ended already.
        let _ = self.process.kill();
    }

    /// Waits until it has ended, and kills it if it has not in time.
    pub fn finish(mut self, limit: Duration) -> Ended {
        self.stdin = None;
        let start = Instant::now();
        let mut was_killed = false;
        let status = loop {
            if let Some(status) = self.process.try_wait().unwrap() {
                break status;
            }
            if !was_killed && start.elapsed() > limit {
                self.kill();
                was_killed = true;
            }
            let over = limit + Duration::from_secs(20);
            assert!(start.elapsed() < over, "child {:?} was killed and has not ended", self.name);
            std::thread::sleep(Duration::from_millis(2));
        };
        // The pipe ends with the child.
        let end = Instant::now() + Duration::from_secs(5);
        while let Ok(line) = self.lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
            self.seen.push(line);
        }
        Ended { is_good: status.success() && !was_killed, was_killed, lines: std::mem::take(&mut self.seen) }
    }

    /// The same for one that has to end by itself and well. What it has recorded is said here.
    pub fn succeed(self, limit: Duration) -> Vec<String> {
        let name = self.name.clone();
        let ended = self.finish(limit);
        let said = ended.lines.join("\n    ");
        assert!(!ended.was_killed, "child {name:?} has not ended after {limit:?}; it said:\n    {said}");
        assert!(ended.is_good, "child {name:?} has failed; it said:\n    {said}");
        for line in ended.lines.iter().filter(|line| line.starts_with("recorded:")) {
            println!("{line}");
        }
        ended.lines
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.kill();
        let _ = self.process.try_wait();
    }
}

/// In a child: says that it has come to a place, and waits for the test's word to go on, which also comes if the test
/// ends.
pub fn pause(place: &str) {
    println!("{place}");
    // The pipe ends with the test.
    let _ = std::io::stdin().read_line(&mut String::new());
}
