//! The progress matrix with copies, on a real device: while a kernel waits for a put over this transport, the application
//! gets itself into the driver in every way that it can. Where the driver runs copies the kernel gets its put; where it
//! does not, the port fails in time and names the stall, the kernel and the application come back, an unrelated channel
//! was served all the while, and a new channel works. In the control the engine's own thread submits the copies, and the
//! unrelated channel stands still with it.
//!
//! ```text
//! cuda_ipc_progress [--runs N] [--results FILE]
//! ```
//!
//! N runs a cell, 20 unless told otherwise; at most 3 of those in which copies may stall, and of the control, which take
//! seconds each. Prints a line a cell; fails if one of ours fails. With a results file (a line of JSON a cell) what it holds already is
//! not run again. Each setting runs in processes of its own, because the driver reads the environment once. Puts go to
//! the second GPU if there is one, else to the first itself. Without a device it prints `waived:`.

// The states of the application, and what kernels and host tell each other, are those of the proxy's own matrix.
#[allow(dead_code, reason = "the proxy's matrix uses more of it")]
#[path = "../../proxy/tests/cuda_progress/application.rs"]
mod application;
#[path = "cuda_ipc_progress/cell.rs"]
mod cell;
#[path = "../../proxy/tests/cuda_support/mod.rs"]
mod cuda_support;
#[path = "cuda_ipc_progress/inline.rs"]
mod inline;

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, ExitCode, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use application::State;
use cell::{Outcome, Rig, Who};
use cuda_support::Device;

/// How long a process may be silent: longer than all waits of a cell that fails take.
const SILENCE: Duration = Duration::from_secs(150);

/// What the driver reads from the environment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Setting {
    one_connection: bool,
    lazy: bool,
}

impl Setting {
    const ALL: [Setting; 4] = [
        Setting { one_connection: false, lazy: true },
        Setting { one_connection: false, lazy: false },
        Setting { one_connection: true, lazy: true },
        Setting { one_connection: true, lazy: false },
    ];

    /// The one that this process was started with.
    fn current() -> Self {
        let is = |name: &str, value: &str| std::env::var(name).is_ok_and(|seen| seen == value);
        Setting {
            one_connection: is("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
            lazy: !is("CUDA_MODULE_LOADING", "EAGER"),
        }
    }

    fn name(self) -> String {
        let connections = if self.one_connection { "1 connection" } else { "default" };
        format!("{connections}, {}", if self.lazy { "lazy" } else { "eager" })
    }

    fn set(self, command: &mut Command) {
        command.env("CUDA_MODULE_LOADING", if self.lazy { "LAZY" } else { "EAGER" });
        match self.one_connection {
            true => command.env("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
            false => command.env_remove("CUDA_DEVICE_MAX_CONNECTIONS"),
        };
    }

    /// Whether the driver may be unable to run a copy in this state.
    fn may_stall(self, state: State) -> bool {
        match state {
            State::Free => true,
            State::FirstLaunch => self.lazy,
            State::QueueFull | State::PageableCopy | State::LegacyCopy => self.one_connection,
            _ => false,
        }
    }
}

fn cells() -> Vec<(Who, State)> {
    let ours = State::ALL.map(|state| (Who::Executor, state));
    let control = [(Who::Engine, State::StreamSynchronise), (Who::Engine, State::Free)];
    ours.into_iter().chain(control).collect()
}

/// How often a cell is run.
fn runs_of(setting: Setting, (who, state): (Who, State), runs: u64) -> u64 {
    if who == Who::Engine || setting.may_stall(state) { runs.min(3) } else { runs }
}

fn key(setting: Setting, (who, state): (Who, State)) -> String {
    format!("ipc, {}, {}, {}", who.name(), setting.name(), state.name())
}

/// One line of the results file.
fn line(key: &str, runs: u64, outcome: &Outcome) -> String {
    let text = |text: &str| text.replace(['"', '\\', '\n'], "'");
    format!(
        r#"{{"cell":"{key}","ok":{},"runs":{runs},"summary":"{}","detail":"{}"}}"#,
        outcome.ok,
        text(&outcome.summary),
        text(&outcome.detail)
    )
}

/// A text field of such a line.
fn field<'a>(line: &'a str, name: &str) -> &'a str {
    let rest = line.split_once(&format!(r#""{name}":""#)).map_or("", |(_, rest)| rest);
    rest.split_once('"').map_or("?", |(value, _)| value)
}

#[derive(Default)]
struct Arguments {
    runs: u64,
    results: Option<String>,
    /// In a child: the number of the cell to begin with.
    child: Option<usize>,
}

fn arguments() -> Result<Arguments, String> {
    let mut arguments = Arguments { runs: 20, ..Arguments::default() };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word} needs a value"));
        let number = |text: String| text.parse::<u64>().map_err(|error| format!("{word}: {error}"));
        match word.as_str() {
            "--runs" => arguments.runs = number(value()?)?,
            "--child" => arguments.child = Some(number(value()?)? as usize),
            "--results" => arguments.results = Some(value()?),
            // What cargo hands on to every test program.
            _ => eprintln!("cuda_ipc_progress: {word} is ignored"),
        }
    }
    Ok(arguments)
}

/// The child: runs the cells from one on, and writes `end LINE` for each.
fn child(first: usize, runs: u64, skip: &str) -> ExitCode {
    let Some(device) = Device::open("cuda_ipc_progress") else { return ExitCode::FAILURE };
    let setting = Setting::current();
    let rig = Rig::new(device);
    for (number, cell) in cells().into_iter().enumerate().skip(first) {
        if skip.split(',').any(|skipped| skipped == number.to_string()) {
            continue;
        }
        println!("begin {number}");
        let runs = runs_of(setting, cell, runs);
        let outcome = rig.run(setting, cell.0, cell.1, runs);
        println!("end {number} {}", line(&key(setting, cell), runs, &outcome));
    }
    ExitCode::SUCCESS
}

/// Tells a child which cells are done already.
const SKIP: &str = "PORTWAY_IPC_PROGRESS_SKIP";

struct Results {
    lines: HashMap<String, String>,
    file: Option<std::fs::File>,
    all_ok: bool,
}

impl Results {
    fn open(arguments: &Arguments) -> Result<Self, String> {
        let mut results = Results { lines: HashMap::new(), file: None, all_ok: true };
        let Some(path) = &arguments.results else { return Ok(results) };
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let lines: HashMap<_, _> = text.lines().map(|line| (field(line, "cell"), line)).collect();
        for (setting, cell) in Setting::ALL.into_iter().flat_map(|s| cells().into_iter().map(move |c| (s, c)))
        {
            let (key, runs) = (key(setting, cell), runs_of(setting, cell, arguments.runs));
            let done = format!(r#""ok":true,"runs":{runs},"#);
            if let Some(line) = lines.get(key.as_str()).filter(|line| line.contains(&done)) {
                results.lines.insert(key, (*line).to_owned());
            }
        }
        let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
        results.file = Some(file.map_err(|error| format!("{path}: {error}"))?);
        Ok(results)
    }

    fn add(&mut self, key: String, line: &str) -> Result<(), String> {
        let ok = line.contains(r#""ok":true"#);
        let verdict = if ok { "passed" } else { "FAILED" };
        println!("{key}: {} ({verdict}) {}", field(line, "summary"), field(line, "detail"));
        self.all_ok &= ok;
        if let Some(file) = &mut self.file {
            writeln!(file, "{line}").map_err(|error| format!("the results file: {error}"))?;
        }
        self.lines.insert(key, line.to_owned());
        Ok(())
    }
}

/// Runs the cells of a setting that are missing, in as many processes as it takes.
fn run_setting(setting: Setting, runs: u64, results: &mut Results) -> Result<(), String> {
    let cells = cells();
    let mut first = 0;
    while first < cells.len() {
        let done = |number: &usize| results.lines.contains_key(&key(setting, cells[*number]));
        let skip: Vec<String> = (0..cells.len()).filter(done).map(|number| number.to_string()).collect();
        if skip.len() == cells.len() {
            return Ok(());
        }
        let mut command = Command::new(std::env::current_exe().map_err(|error| error.to_string())?);
        command.args(["--runs", &runs.to_string(), "--child", &first.to_string()]);
        command.env(SKIP, skip.join(",")).stdin(Stdio::null()).stdout(Stdio::piped());
        setting.set(&mut command);
        let mut child = command.spawn().map_err(|error| error.to_string())?;
        let output = child.stdout.take().ok_or("the process has no output")?;
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        let mut inside = None;
        let why = loop {
            match lines.recv_timeout(SILENCE) {
                Ok(text) => {
                    if let Some(number) = text.strip_prefix("begin ") {
                        inside = number.parse::<usize>().ok();
                    } else if let Some((number, line)) =
                        text.strip_prefix("end ").and_then(|t| t.split_once(' '))
                    {
                        let number: usize = number.parse().map_err(|_| format!("a line: {text}"))?;
                        results.add(key(setting, cells[number]), line)?;
                        inside = None;
                    }
                }
                Err(RecvTimeoutError::Timeout) => {
                    child.kill().map_err(|error| error.to_string())?;
                    break format!("killed after {SILENCE:?} without a word");
                }
                Err(RecvTimeoutError::Disconnected) => break "the process ended".to_owned(),
            }
        };
        let status = child.wait().map_err(|error| error.to_string())?;
        match inside {
            Some(number) => {
                let detail = format!("{why}, {status}");
                let outcome = Outcome { ok: false, summary: "stuck".to_owned(), detail };
                let key = key(setting, cells[number]);
                let line = line(&key, runs_of(setting, cells[number], runs), &outcome);
                results.add(key, &line)?;
                first = number + 1;
            }
            None if status.success() => return Ok(()),
            None => return Err(format!("{}: {why} outside of a cell, {status}", setting.name())),
        }
    }
    Ok(())
}

fn main() -> ExitCode {
    let run = || -> Result<bool, String> {
        let arguments = arguments()?;
        if let Some(first) = arguments.child {
            let skip = std::env::var(SKIP).unwrap_or_default();
            return Ok(child(first, arguments.runs, &skip) == ExitCode::SUCCESS);
        }
        let Some(device) = Device::open("cuda_ipc_progress") else { return Ok(true) };
        let count = device.context.driver().device_count().map_err(|error| error.to_string())?;
        let to = if count > 1 { "to a second GPU" } else { "within ONE GPU" };
        println!("{}, puts {to}, {} runs a cell that is not to stall", device.name(), arguments.runs);
        drop(device);
        let mut results = Results::open(&arguments)?;
        for setting in Setting::ALL {
            run_setting(setting, arguments.runs, &mut results)?;
        }
        Ok(results.all_ok)
    };
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("cuda_ipc_progress: {error}");
            ExitCode::FAILURE
        }
    }
}
