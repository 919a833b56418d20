//! [`Hosts`]: the hosts of a test as processes, each in its network namespace, and the wires between them.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// How long an answer may take that waits for nothing.
const PROMPT: Duration = Duration::from_secs(60);

struct Host {
    /// Of its device and network namespace.
    number: usize,
    child: Child,
    commands: ChildStdin,
    answers: mpsc::Receiver<String>,
}

/// Killed when dropped.
pub struct Hosts(Vec<Host>);

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Host {
    fn start(number: usize) -> Result<Host, String> {
        let program = std::env::current_exe().map_err(|error| error.to_string())?;
        // The shell's exec, so that the process that is killed is the host itself.
        let mut child = Command::new("ip")
            .args(["netns", "exec", &format!("host{number}")])
            .arg(program)
            .args(["host", &format!("rxe{number}"), "900"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| error.to_string())?;
        let (Some(commands), Some(out)) = (child.stdin.take(), child.stdout.take()) else {
            return Err("a host has no pipes".into());
        };
        let (sender, answers) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(out).lines() {
                let Ok(line) = line else { return };
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Ok(Host { number, child, commands, answers })
    }
}

impl Hosts {
    /// Starts so many, with a transport each.
    pub fn start(count: usize, timeout: u8, retries: u8) -> Result<Hosts, String> {
        Hosts::start_as(&vec!["plain"; count], timeout, retries)
    }

    /// Starts one for each word, which says how it opens its transport.
    pub fn start_as(how: &[&str], timeout: u8, retries: u8) -> Result<Hosts, String> {
        let hosts = (0..how.len()).map(Host::start).collect::<Result<Vec<_>, _>>()?;
        let mut hosts = Hosts(hosts);
        for (host, how) in how.iter().enumerate() {
            hosts.ask(host, &format!("open {timeout} {retries} {how}"))?;
        }
        Ok(hosts)
    }

    /// Starts another process on the device of a host; its own number.
    pub fn join(&mut self, host: usize, timeout: u8, retries: u8) -> Result<usize, String> {
        self.0.push(Host::start(host)?);
        let joined = self.0.len() - 1;
        self.ask(joined, &format!("open {timeout} {retries} plain"))?;
        Ok(joined)
    }

    /// Sends a command and does not wait for its answer.
    pub fn tell(&mut self, host: usize, command: &str) -> Result<(), String> {
        let line = format!("{command}\n");
        let sent = self.0[host].commands.write_all(line.as_bytes());
        sent.map_err(|error| format!("host {host}, {command}: {error}"))
    }

    /// The answer to the oldest command without one.
    pub fn answer(&mut self, host: usize, within: Duration) -> Result<String, String> {
        match self.0[host].answers.recv_timeout(within) {
            Ok(line) => match line.split_once(' ') {
                Some(("ok", answer)) => Ok(answer.to_owned()),
                _ => Err(format!("host {host}: {line}")),
            },
            Err(error) => Err(format!("host {host}: no answer within {within:?} ({error})")),
        }
    }

    pub fn ask(&mut self, host: usize, command: &str) -> Result<String, String> {
        self.ask_within(host, command, PROMPT)
    }

    pub fn ask_within(&mut self, host: usize, command: &str, within: Duration) -> Result<String, String> {
        let words: Vec<&str> = command.split_whitespace().take(2).collect();
        self.tell(host, command)?;
        self.answer(host, within).map_err(|error| format!("{}: {error}", words.join(" ")))
    }

    /// Makes a connection between two hosts, under one name on both.
    pub fn connect(&mut self, name: &str, a: usize, b: usize) -> Result<(), String> {
        let (a_end, b_end) = (self.endpoint(name, a)?, self.endpoint(name, b)?);
        self.ask(a, &format!("connect {name} {b_end}"))?;
        self.ask(b, &format!("connect {name} {a_end}")).map(drop)
    }

    /// One end; what the peer needs for its `connect`.
    pub fn endpoint(&mut self, name: &str, host: usize) -> Result<String, String> {
        self.ask(host, &format!("endpoint {name}"))
    }

    /// Puts so many times; how long it took.
    pub fn put(&mut self, name: &str, host: usize, len_bytes: u64, count: u64) -> Result<f64, String> {
        let answer = self.ask(host, &format!("put {name} {len_bytes} {count}"))?;
        answer.trim().parse().map_err(|_| format!("host {host} answered {answer}"))
    }

    /// Kills a host as the kernel does it.
    pub fn kill(&mut self, host: usize) -> Result<(), String> {
        let host = &mut self.0[host];
        host.child
            .kill()
            .and_then(|()| host.child.wait().map(drop))
            .map_err(|error| format!("killing host {}: {error}", host.number))
    }

    /// The end of a stream that a host puts, and how long after `since` it came.
    pub fn end_of_stream(
        &mut self,
        name: &str,
        host: usize,
        since: Instant,
        within: Duration,
    ) -> Result<(String, Duration), String> {
        let command = format!("outcome {name} {}", within.as_millis());
        let answer = self.ask_within(host, &command, within + PROMPT)?;
        Ok((answer, since.elapsed()))
    }
}

/// Runs a command of the system on the wires.
pub fn system(command: &str) -> Result<(), String> {
    let mut words = command.split_whitespace();
    let program = words.next().unwrap_or_default();
    match Command::new(program).args(words).output() {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(format!("{command}: {}", String::from_utf8_lossy(&output.stderr).trim())),
        Err(error) => Err(format!("{command}: {error}")),
    }
}

/// Spoils or cuts the wire at a host's port of the switch, until dropped.
pub struct Spoiled {
    undo: Vec<String>,
}

impl Spoiled {
    /// `how` as netem takes it, `loss 1%`.
    pub fn netem(hosts: &[usize], how: &str) -> Result<Spoiled, String> {
        let mut spoiled = Spoiled { undo: Vec::new() };
        for host in hosts {
            system(&format!("tc qdisc add dev port{host} root netem {how}"))?;
            spoiled.undo.push(format!("tc qdisc del dev port{host} root"));
        }
        Ok(spoiled)
    }

    pub fn link_down_at_the_switch(host: usize) -> Result<Spoiled, String> {
        system(&format!("ip link set port{host} down"))?;
        Ok(Spoiled { undo: vec![format!("ip link set port{host} up")] })
    }

    pub fn link_down_at_the_host(host: usize) -> Result<Spoiled, String> {
        system(&format!("ip -n host{host} link set eth{host} down"))?;
        Ok(Spoiled { undo: vec![format!("ip -n host{host} link set eth{host} up")] })
    }
}

impl Drop for Spoiled {
    fn drop(&mut self) {
        for command in &self.undo {
            if let Err(error) = system(command) {
                eprintln!("the wire is not mended: {error}");
            }
        }
    }
}
