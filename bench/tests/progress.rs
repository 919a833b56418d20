//! Progress: a line on a terminal, nothing anywhere else.

mod support;

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::fd::OwnedFd;
use std::sync::mpsc;
use std::time::Duration;

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use support::{bench, command};

/// Long enough for some drawings of the line.
const LINE: &str = "fifo -N 1 -D 0.5 -n 1000000000 -T 30 -c 0 --producers 1 --depth 64 --batch 1";

/// A terminal, and its other end.
fn terminal() -> (File, OwnedFd) {
    let screen = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&screen).unwrap();
    unlockpt(&screen).unwrap();
    let name = ptsname(&screen, Vec::new()).unwrap();
    let keyboard = File::options().read(true).write(true).open(name.to_str().unwrap()).unwrap();
    (File::from(screen), keyboard.into())
}

/// What comes until nobody has the other end: then reading is an error, EIO on Linux.
fn read_all(screen: &mut File) -> Vec<u8> {
    let (mut seen, mut buffer) = (Vec::new(), [0; 4096]);
    loop {
        match screen.read(&mut buffer) {
            Ok(0) => return seen,
            Ok(some) => seen.extend_from_slice(&buffer[..some]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => return seen,
        }
    }
}

#[test]
fn a_terminal_sees_what_is_measured_how_much_is_done_and_how_fast() {
    let (mut screen, end) = terminal();
    let mut child =
        command(LINE).env("TERM", "xterm").stdout(std::process::Stdio::null()).stderr(end).spawn().unwrap();
    let (send, receive) = mpsc::channel();
    std::thread::spawn(move || send.send(read_all(&mut screen)));
    // The terminal ends when the program does.
    let Ok(seen) = receive.recv_timeout(Duration::from_secs(60)) else {
        child.kill().unwrap();
        panic!("waited 60 s for the program to end");
    };
    let status = child.wait().unwrap();
    let seen = String::from_utf8_lossy(&seen);
    assert!(status.success(), "{seen}");
    let lines: Vec<_> = seen.split("\r\x1b[K").filter(|line| !line.is_empty()).collect();
    let full =
        |line: &&&str| line.contains("fifo throughput, ") && line.contains(" done, ") && line.ends_with("/s");
    assert!(lines.iter().filter(full).count() >= 2, "{lines:?}");
    assert!(lines.iter().all(|line| line.chars().count() < 80 && !line.contains('\n')), "{lines:?}");
    assert!(seen.ends_with("\r\x1b[K"), "the line is cleared at the end: {lines:?}");
}

#[test]
fn a_pipe_sees_nothing() {
    let output = bench(LINE);
    assert!(output.status.success());
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(!output.stdout.contains(&0x1b));
}
