//! The progress matrix, on a real device: while a kernel waits for a put through the proxy, the application gets itself
//! into the driver in every way that it can, with one connection and many, with modules loaded lazily and eagerly.
//! Through pinned memory the kernel gets its put in every cell. The control, in which the proxy's thread copies the tail,
//! stands still in some, and the kernel's own deadline says so.
//!
//! ```text
//! cuda_progress [--runs N] [--results FILE]
//! ```
//!
//! Prints a line a cell and a table; fails if a cell of the pinned path fails. With a results file (a line of JSON a
//! cell) what it holds already is not run again. Each configuration runs in a process of its own, because the driver
//! reads the environment once; a process that is stuck is killed, and its cell named.
//!
//! Without a device it prints `waived:`; see `cuda_support`.

#[path = "cuda_progress/application.rs"]
mod application;
#[path = "cuda_progress/cell.rs"]
mod cell;
mod cuda_support;

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use application::State;
use cell::{Outcome, Path, Rig};
use cuda_support::Device;

/// How long a process may be silent: longer than all waits of a cell that fails take.
const SILENCE: Duration = Duration::from_secs(150);

/// What the driver reads from the environment.
#[derive(Clone, Copy, PartialEq, Eq)]
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

    /// What the control was seen to do on one H200 with driver 580.159; `None` where it was not tried.
    fn expected(self, state: State) -> Option<&'static str> {
        match state {
            State::QueueFull if self.one_connection => Some("blocks"),
            State::Free => Some("blocks"),
            State::FirstLaunch if self.lazy => Some("never runs"),
            State::QueueFull
            | State::StreamSynchronise
            | State::EventSynchronise
            | State::DeviceSynchronise
            | State::FirstLaunch => Some("runs"),
            State::Malloc | State::HostAlloc | State::PageableCopy | State::LegacyCopy | State::Capture => {
                None
            }
        }
    }
}

/// A cell's number within its setting, and what that means.
fn cells() -> impl Iterator<Item = (usize, Path, State)> {
    let both = [Path::Pinned, Path::Copied];
    let all = both.into_iter().flat_map(|path| State::ALL.map(|state| (path, state)));
    all.enumerate().map(|(number, (path, state))| (number, path, state))
}

fn key(setting: Setting, path: Path, state: State) -> String {
    format!("{}, {}, {}", path.name(), setting.name(), state.name())
}

struct Arguments {
    runs: u64,
    results: Option<String>,
    /// In a child: the numbers of the cells to run.
    cells: Option<Vec<usize>>,
}

impl Arguments {
    fn parse() -> Result<Self, String> {
        let mut arguments = Arguments { runs: 20, results: None, cells: None };
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or(format!("{word} needs a value"));
            match word.as_str() {
                "--runs" => arguments.runs = value()?.parse().map_err(|e| format!("--runs: {e}"))?,
                "--results" => arguments.results = Some(value()?),
                "--cells" => {
                    let numbers = value()?;
                    let numbers = numbers.split(',').map(str::parse).collect::<Result<_, _>>();
                    arguments.cells = Some(numbers.map_err(|e| format!("--cells: {e}"))?);
                }
                // What cargo hands on to every test program.
                _ => eprintln!("cuda_progress: {word} is ignored"),
            }
        }
        Ok(arguments)
    }
}

/// One line of the results file.
fn line(key: &str, runs: u64, outcome: &Outcome, device: &str) -> String {
    let text = |text: &str| text.replace(['"', '\\', '\n'], "'");
    format!(
        r#"{{"cell":"{key}","ok":{},"runs":{runs},"summary":"{}","detail":"{}","device":"{}"}}"#,
        outcome.ok,
        text(&outcome.summary),
        text(&outcome.detail),
        text(device)
    )
}

/// A text field of such a line.
fn field<'a>(line: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = line.split_once(&format!(r#""{name}":""#))?;
    Some(rest.split_once('"')?.0)
}

/// The child: runs its cells and writes `begin KEY` and `end LINE` to the standard output.
fn child(setting: Setting, numbers: &[usize], runs: u64) -> ExitCode {
    let Some(device) = Device::open("cuda_progress") else { return ExitCode::FAILURE };
    let rig = Rig::new(device);
    for (number, path, state) in cells() {
        if numbers.contains(&number) {
            let key = key(setting, path, state);
            println!("begin {key}");
            let outcome = rig.run(path, state, runs);
            println!("end {}", line(&key, runs, &outcome, &rig.device_name()));
        }
    }
    ExitCode::SUCCESS
}

/// The setting that this process was started with.
fn current_setting() -> Setting {
    let is = |name: &str, value: &str| std::env::var(name).is_ok_and(|seen| seen == value);
    Setting {
        one_connection: is("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
        lazy: !is("CUDA_MODULE_LOADING", "EAGER"),
    }
}

/// The parent's side of the results.
struct Results {
    lines: HashMap<String, String>,
    file: Option<std::fs::File>,
    all_ok: bool,
}

impl Results {
    fn open(arguments: &Arguments) -> Result<Self, String> {
        let mut results = Results { lines: HashMap::new(), file: None, all_ok: true };
        let Some(path) = &arguments.results else { return Ok(results) };
        let runs = format!(r#""ok":true,"runs":{},"#, arguments.runs);
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(format!("{path}: {error}")),
        };
        for line in text.lines().filter(|line| line.contains(&runs)) {
            if let Some(cell) = field(line, "cell") {
                results.lines.insert(cell.to_owned(), line.to_owned());
            }
        }
        let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
        results.file = Some(file.map_err(|error| format!("{path}: {error}"))?);
        Ok(results)
    }

    fn add(&mut self, setting: Setting, path: Path, state: State, line: &str) {
        let (key, ok) = (key(setting, path, state), line.contains(r#""ok":true"#));
        let (summary, detail) = (field(line, "summary").unwrap_or("?"), field(line, "detail").unwrap_or("?"));
        let verdict = match path {
            Path::Pinned if ok => "passed".to_owned(),
            Path::Pinned => "FAILED".to_owned(),
            Path::Copied => match setting.expected(state) {
                Some(expected) if expected == summary => "control, as expected".to_owned(),
                Some(expected) => format!("control, recorded; elsewhere it {expected}"),
                None => "control, recorded".to_owned(),
            },
        };
        println!("{key}: {summary} ({verdict}) {detail}");
        self.all_ok &= ok || path == Path::Copied;
        if let Some(file) = &mut self.file {
            if let Err(error) = writeln!(file, "{line}") {
                eprintln!("cuda_progress: the results file: {error}");
                self.all_ok = false;
            }
        }
        self.lines.insert(key, line.to_owned());
    }

    fn table(&self) {
        println!("\npassed runs through pinned memory | what the control did");
        print!("{:26}", "");
        Setting::ALL.iter().for_each(|setting| print!(" {:24}", setting.name()));
        println!();
        for state in State::ALL {
            print!("{:26}", state.name());
            for setting in Setting::ALL {
                let [pinned, copied] = [Path::Pinned, Path::Copied].map(|path| {
                    let line = self.lines.get(&key(setting, path, state));
                    line.and_then(|line| field(line, "summary")).unwrap_or("-").to_owned()
                });
                print!(" {:24}", format!("{pinned} | {copied}"));
            }
            println!();
        }
    }
}

/// A process for one setting, and the lines that it writes.
fn start(setting: Setting, numbers: &[usize], runs: u64) -> Result<(Child, Receiver<String>), String> {
    let list: Vec<String> = numbers.iter().map(usize::to_string).collect();
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let mut command = Command::new(program);
    command.args(["--runs", &runs.to_string(), "--cells", &list.join(",")]);
    command.stdin(Stdio::null()).stdout(Stdio::piped());
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
    Ok((child, lines))
}

/// Runs the cells of a setting that are missing.
fn run_setting(setting: Setting, runs: u64, results: &mut Results) -> Result<(), String> {
    let mut left: Vec<_> =
        cells().filter(|&(_, path, state)| !results.lines.contains_key(&key(setting, path, state))).collect();
    while !left.is_empty() {
        let numbers: Vec<usize> = left.iter().map(|cell| cell.0).collect();
        let (mut child, lines) = start(setting, &numbers, runs)?;
        let mut began = false;
        let why = loop {
            match lines.recv_timeout(SILENCE) {
                Ok(text) => {
                    began |= text.starts_with("begin ");
                    let Some(line) = text.strip_prefix("end ") else { continue };
                    let (_, path, state) = left.remove(0);
                    results.add(setting, path, state, line);
                }
                Err(RecvTimeoutError::Timeout) => {
                    child.kill().map_err(|error| error.to_string())?;
                    break format!("killed after {SILENCE:?} without a word");
                }
                Err(RecvTimeoutError::Disconnected) => break "the process ended".to_owned(),
            }
        };
        let status = child.wait().map_err(|error| error.to_string())?;
        if left.is_empty() {
            break;
        }
        if !began {
            return Err(format!("{}: a process that begins no cell: {why}, {status}", setting.name()));
        }
        // The first cell that is left is the one that it was in.
        let (_, path, state) = left.remove(0);
        let outcome = Outcome { ok: false, summary: "stuck".to_owned(), detail: format!("{why}, {status}") };
        let line = line(&key(setting, path, state), runs, &outcome, "unknown");
        results.add(setting, path, state, &line);
    }
    Ok(())
}

fn main() -> ExitCode {
    let arguments = match Arguments::parse() {
        Ok(arguments) => arguments,
        Err(error) => {
            eprintln!("cuda_progress: {error}");
            return ExitCode::from(2);
        }
    };
    if let Some(numbers) = &arguments.cells {
        return child(current_setting(), numbers, arguments.runs);
    }
    let Some(device) = Device::open("cuda_progress") else { return ExitCode::SUCCESS };
    println!("{}, {} runs a cell", device.name(), arguments.runs);
    drop(device);
    let run = || -> Result<bool, String> {
        let mut results = Results::open(&arguments)?;
        for setting in Setting::ALL {
            run_setting(setting, arguments.runs, &mut results)?;
        }
        results.table();
        Ok(results.all_ok)
    };
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("cuda_progress: {error}");
            ExitCode::FAILURE
        }
    }
}
