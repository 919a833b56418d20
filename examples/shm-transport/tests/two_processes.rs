//! The conformance suite with its ends in two processes: this program starts itself again as the other one.

use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use portway_proxy::TransportError;
use portway_proxy::conformance::{self, CHECKS, End, Failing, Fixture, Pair, serve};
use shm_transport::Shm;

/// Longer than the suite takes, so that neither process waits without end for the other.
const LIMIT: Duration = Duration::from_secs(120);
const OTHER: &str = "--other-process";

struct Ends {
    here: Shm,
    there: End,
}

fn end(shm: &Shm) -> End {
    let memory = shm.clone();
    End::new(shm.clone(), move |len_bytes| memory.allocate(len_bytes))
}

impl Fixture for Ends {
    fn pair(&self) -> Result<Pair, TransportError> {
        Ok(Pair { a: end(&self.here), b: self.there.clone() })
    }

    fn failing_pair(&self) -> Result<Failing, TransportError> {
        Ok(Failing::Pair(Pair { a: end(&self.here.failing_after(30)), b: self.there.clone() }))
    }
}

/// Names of objects of this process in the system.
fn objects(process: u32) -> usize {
    let name = format!("portway-shm-{process:08x}");
    let Ok(folder) = std::fs::read_dir("/dev/shm") else { return 0 };
    folder
        .filter_map(Result::ok)
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(&name))
        .count()
}

fn main() -> Result<ExitCode, Box<dyn std::error::Error>> {
    if std::env::args().any(|argument| argument == OTHER) {
        serve(&end(&Shm::new()?), std::io::stdin(), std::io::stdout(), LIMIT)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut other = Command::new(std::env::current_exe()?)
        .arg(OTHER)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let (reader, writer) = (other.stdout.take().unwrap(), other.stdin.take().unwrap());
    let here = Shm::new()?;
    // The control of the count below: what is there is counted.
    let kept = here.allocate(8)?;
    assert_eq!(objects(std::process::id()), 1, "names in /dev/shm while one memory is there");
    drop(kept);

    let ends = Ends { here, there: End::remote(reader, writer) };
    let report = conformance::run(&ends);
    println!("{report}");
    report.assert();
    assert_eq!((report.entries.len(), report.waived().count()), (CHECKS.len(), 0));

    drop(ends); // closes the stream, so the other process ends
    let started = Instant::now();
    let status = loop {
        match other.try_wait()? {
            Some(status) => break status,
            None if started.elapsed() > LIMIT => {
                other.kill()?;
                return Err(format!("the other process has not ended {LIMIT:?} after its stream").into());
            }
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    assert!(status.success(), "the other process: {status}");
    for process in [std::process::id(), other.id()] {
        assert_eq!(objects(process), 0, "names in /dev/shm that process {process} has left behind");
    }
    println!("two_processes: ok, nothing is left in /dev/shm");
    Ok(ExitCode::SUCCESS)
}
