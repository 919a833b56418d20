//! [`Perftest`]: `ib_write_lat` and `ib_write_bw` as two processes, a server and its client, over the same device.

use std::io::Read;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::raw::Setup;
use crate::args::Args;

/// See the module.
pub struct Perftest {
    lat: PathBuf,
    bw: PathBuf,
}

/// The names under which they stand as references.
pub const LAT: &str = "ib_write_lat";
pub const BW: &str = "ib_write_bw";

/// How long the client looks for its server.
const MEETING: Duration = Duration::from_secs(5);
/// Beyond the deadline of a measurement, for two processes to start.
const START: Duration = Duration::from_secs(10);

/// Killed when dropped.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Perftest {
    /// Where they are, if both are installed.
    pub fn find() -> Option<Self> {
        let path = std::env::var_os("PATH")?;
        let find =
            |name: &str| std::env::split_paths(&path).map(|dir| dir.join(name)).find(|file| file.is_file());
        Some(Perftest { lat: find(LAT)?, bw: find(BW)? })
    }

    /// The median one-way time in microseconds.
    pub fn latency_us(&self, args: &Args, setup: &Setup, size_bytes: u64, count: u64) -> Result<f64, String> {
        let words = |end| common(args, setup, end, size_bytes, count.max(5));
        // bytes, iterations, min, max, typical
        run(&self.lat, args, words).and_then(|output| column(&output, size_bytes, 4))
    }

    /// Millions of writes a second.
    pub fn mops(&self, args: &Args, setup: &Setup, size_bytes: u64, count: u64) -> Result<f64, String> {
        let (q, t, l) = (args.queue_pairs, args.tx_depth, args.post_list);
        let count = count.max(2 * t).next_multiple_of(l);
        let words = |end| {
            let mut words = common(args, setup, end, size_bytes, count);
            words.extend(
                ["-q", "-t", "-l"]
                    .into_iter()
                    .zip([q, t, l])
                    .flat_map(|(flag, value)| [flag.to_owned(), value.to_string()]),
            );
            words.push("--noPeak".into());
            words
        };
        let output = run(&self.bw, args, words)?;
        // bytes, iterations, peak, MiB/s, millions a second: of each the one with more digits.
        if size_bytes < 4096 {
            column(&output, size_bytes, 4)
        } else {
            column(&output, size_bytes, 3).map(|mib| mib * f64::from(1 << 20) / size_bytes as f64 / 1e6)
        }
    }
}

/// The arguments of one end.
fn common(args: &Args, setup: &Setup, end: usize, size_bytes: u64, count: u64) -> Vec<String> {
    let mut words: Vec<String> = vec!["-F".into(), "-d".into(), setup.devices[end].clone()];
    if let Some(index) = setup.gid_indices[end] {
        words.extend(["-x".into(), index.to_string()]);
    }
    for (flag, value) in [("-s", size_bytes), ("-n", count), ("-I", args.inline_bytes)] {
        words.extend([flag.into(), value.to_string()]);
    }
    words
}

/// What the client prints.
fn run(program: &PathBuf, args: &Args, words: impl Fn(usize) -> Vec<String>) -> Result<String, String> {
    let text = |error: std::io::Error| format!("{}: {error}", program.display());
    let deadline = args.deadline() + START;
    let begin = Instant::now();
    // Free a moment ago; should somebody take it, the two do not meet, and that is said.
    let port = TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr()).map_err(text)?.port();
    let start = |end: usize, peer: Option<&str>| {
        Command::new(program)
            .args(words(end))
            .args(["-p", &port.to_string()])
            .args(peer)
            .stdin(Stdio::null())
            .stdout(if peer.is_some() { Stdio::piped() } else { Stdio::null() })
            .stderr(if peer.is_some() { Stdio::piped() } else { Stdio::null() })
            .spawn()
            .map(Process)
            .map_err(text)
    };
    let mut server = start(1, None)?;
    loop {
        let mut client = start(0, Some("127.0.0.1"))?;
        let success = loop {
            if let Some(status) = client.0.try_wait().map_err(text)? {
                break status.success();
            }
            if begin.elapsed() > deadline {
                return Err(format!("{}: waited {deadline:?} for its end", program.display()));
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        // A page each, which a pipe holds, so that neither waits for a reader.
        let (mut output, mut errors) = (String::new(), String::new());
        let (out, err) = (client.0.stdout.take(), client.0.stderr.take());
        out.map(|mut pipe| pipe.read_to_string(&mut output)).transpose().map_err(text)?;
        err.map(|mut pipe| pipe.read_to_string(&mut errors)).transpose().map_err(text)?;
        if success {
            return Ok(output);
        }
        let server_ended = server.0.try_wait().map_err(text)?.is_some();
        if server_ended || begin.elapsed() > MEETING || !errors.contains("connect") {
            let last = |text: &str| {
                text.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("").trim().to_owned()
            };
            return Err(format!("{}: {} {}", program.display(), last(&output), last(&errors)));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A column of the line of data.
fn column(output: &str, size_bytes: u64, at: usize) -> Result<f64, String> {
    let is_data = |line: &&str| line.split_whitespace().next() == Some(&size_bytes.to_string());
    let line = output.lines().find(is_data);
    let cell =
        line.and_then(|line| line.split_whitespace().nth(at)).and_then(|cell| cell.parse::<f64>().ok());
    cell.filter(|value| *value > 0.0).ok_or_else(|| "no figure in what perftest printed".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_columns_of_both_programs_are_read() {
        let lat = " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]\n 8       1000          27.10          900.11       31.55     \t       35.0\n";
        assert_eq!(column(lat, 8, 4), Ok(31.55));
        let bw = " #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]\n 65536      1000             0.00               44.00              0.000704\n";
        assert_eq!(column(bw, 65536, 3), Ok(44.0));
        assert_eq!(column(bw, 65536, 4), Ok(0.000704));
        assert!(column(bw, 64, 3).is_err() && column("", 8, 4).is_err());
    }
}
