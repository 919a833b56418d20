//! SIGUSR1: what the running proxies are doing, on standard error, and the measurement goes on.

mod support;

use std::io::{BufRead, BufReader, Read};
use std::process::Stdio;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use support::command;

const DEADLINE: Duration = Duration::from_secs(60);

#[test]
fn a_signal_reports_the_running_proxies_and_ends_nothing() {
    // Long enough for some signals.
    let line = "put -N 1 -D 2 -n 1000000000 -T 60 -s 8 -c 0 --rate 0.05";
    let mut child = command(line).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    // Signals are served before the first line.
    let mut header = String::new();
    out.read_line(&mut header).unwrap();
    assert!(header.starts_with("# portway-bench"), "{header}");
    let rest = std::thread::spawn(move || {
        let mut rest = String::new();
        out.read_to_string(&mut rest).map(|_| rest)
    });
    let (send, lines) = mpsc::channel();
    let err = BufReader::new(child.stderr.take().unwrap());
    std::thread::spawn(move || err.lines().map_while(Result::ok).try_for_each(|line| send.send(line)));
    let pid = Pid::from_child(&child);
    let (begin, mut seen) = (Instant::now(), Vec::new());
    // A moment without a proxy says that there is none; in the end one is caught.
    while !seen.iter().any(|line: &String| line.contains("channel")) {
        if begin.elapsed() > DEADLINE {
            child.kill().unwrap();
            panic!("waited {DEADLINE:?} for the report of a proxy, and saw {seen:?}");
        }
        assert!(child.try_wait().unwrap().is_none(), "the signal, or the end, came first: {seen:?}");
        kill_process(pid, Signal::USR1).unwrap();
        seen.extend(lines.recv_timeout(Duration::from_millis(100)));
        seen.extend(lines.try_iter());
    }
    assert!(seen.iter().any(|line| line == "# SIGUSR1: 1 proxies are running"), "{seen:?}");
    assert!(seen.iter().any(|line| line == "# proxy 0"), "{seen:?}");
    while child.try_wait().unwrap().is_none() {
        if begin.elapsed() > 2 * DEADLINE {
            child.kill().unwrap();
            panic!("waited for the measurement to end");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let rest = rest.join().unwrap().unwrap();
    assert!(child.wait().unwrap().success() && rest.contains("# wrong: 0 OK"), "{rest}");
}
