//! Peers in other processes: killed in the middle of a put, gone before, of another user, or talking nonsense.

#[path = "../../fifo/tests/libcuda/mod.rs"]
mod libcuda;
#[path = "support/peer.rs"]
mod peer;
mod support;
#[path = "support/wire.rs"]
mod wire;

use std::io::Write;
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use peer::Peer;
use portway_fifo::cuda::{Driver, Kind};
use portway_proxy::TransportError;
use portway_proxy::transport::Transport;
use portway_transport_ipc::{Config, Error, Ipc};
use wire::{Machine, PATIENCE, wait_until};

#[test]
fn a_peer_that_is_killed_in_the_middle_of_a_put_ends_the_port_by_name() {
    if let Some(path) = support::child() {
        peer::child(&Driver::open(&path).unwrap(), 1);
    }
    let machine = Machine::new();
    let name = "a_peer_that_is_killed_in_the_middle_of_a_put_ends_the_port_by_name";
    for (paused, legacy) in [(false, false), (true, false), (false, true)] {
        let hold = |hold: bool| machine.standin.set("paused", (paused && hold).into());
        peer::killed_in_the_middle_of_a_put(name, machine.standin.path(), &machine.contexts[0], legacy, hold);
        // The process goes on.
        let transports = machine.transports(Config::default());
        let mut fresh = machine.wire(&transports);
        fresh.submit(64, Some(1), true);
        fresh.complete(1);
    }
}

#[test]
fn handles_of_a_dead_process_are_named() {
    if let Some(path) = support::child() {
        peer::child(&Driver::open(&path).unwrap(), 1);
    }
    let machine = Machine::new();
    let ipc = Ipc::open(&machine.contexts[0], Config::default()).unwrap();
    let mut peer = Peer::start("handles_of_a_dead_process_are_named", machine.standin.path());
    peer.kill();
    let gone = |error: TransportError| match error {
        TransportError::Remote { peer, .. } => assert!(peer.contains("its process has ended"), "{peer}"),
        other => panic!("{other:?}"),
    };
    for bytes in [&peer.vmm, &peer.legacy, &peer.word] {
        gone(ipc.import(bytes).unwrap_err());
    }
    gone(ipc.endpoint().unwrap().0.connect(&peer.endpoint, PATIENCE).unwrap_err());
}

/// A message whose process has this one's number and another namespace: a container. Nothing of it is taken for ours.
#[test]
fn the_same_number_in_another_container_is_another_process() {
    let machine = Machine::new();
    let [near, far] = [0, 1].map(|at| Ipc::open(&machine.contexts[at], Config::default()).unwrap());
    machine.standin.set("opens its own", 1);
    let memory = near.register(&machine.contexts[0].allocate(Kind::Legacy, 64).unwrap()).unwrap();
    let mut bytes = near.export(&memory).unwrap();
    let error = far.import(&bytes).unwrap_err();
    assert!(matches!(Error::of(&error), Some(Error::SameProcess)), "{error:?}");
    bytes[48] ^= 1;
    // The driver would open the handle, as it does one of another process.
    let remote = far.import(&bytes).unwrap();
    let peer = far.describe(&remote).unwrap().peer;
    assert!(peer.contains("of PID namespace"), "{peer}");
    // Another machine is yet another thing.
    bytes[32] ^= 1;
    let error = far.import(&bytes).unwrap_err();
    assert!(matches!(Error::of(&error), Some(Error::OtherMachine { .. })), "{error:?}");
}

/// The name of the abstract socket that the transport listens on.
fn socket_name(ipc: &Ipc) -> String {
    let (_endpoint, bytes) = ipc.endpoint().unwrap();
    let hub = u64::from_le_bytes(bytes[24..32].try_into().unwrap());
    format!("portway-ipc-{hub:016x}")
}

mod raw {
    //! A client that does not keep to the protocol.
    use super::*;
    use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};

    pub fn connect(name: &str) -> OwnedFd {
        let flags = SocketFlags::CLOEXEC;
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
        rustix::net::connect(&socket, &address).unwrap();
        socket
    }

    pub fn send(socket: &OwnedFd, bytes: &[u8]) {
        let _ = rustix::net::send(socket, bytes, SendFlags::NOSIGNAL);
    }

    /// What it answers; `None` if it closes the connection.
    pub fn receive(socket: &OwnedFd) -> Option<u32> {
        let mut bytes = [0u8; 64];
        let mut receive =
            || rustix::net::recv(socket, &mut bytes[..], RecvFlags::empty()).map(|(len, _)| len);
        // A reset is told once, before what was sent last.
        let len = receive().or_else(|_| receive()).unwrap_or(0);
        (len == 16).then(|| u32::from_le_bytes(bytes[8..12].try_into().unwrap()))
    }
}

#[test]
fn the_hub_survives_bad_requests_and_leaves_no_file() {
    let machine = Machine::new();
    let [near, far] = [0, 1].map(|at| Ipc::open(&machine.contexts[at], Config::default()).unwrap());
    let name = socket_name(&near);
    let sockets = std::fs::read_to_string("/proc/net/unix").unwrap();
    let line = sockets.lines().find(|line| line.ends_with(&name)).unwrap();
    assert!(line.ends_with(&format!("@{name}")), "an abstract name, with no file: {line}");
    const BAD: u32 = 2;
    let mut good = [0u8; 40];
    good[..8].copy_from_slice(b"pw-ipc\0\x01");
    let requests: Vec<Vec<u8>> =
        vec![vec![1], vec![0xa5; 39], vec![0; 40], vec![0xff; 41], vec![7; 5000], good.to_vec()];
    for request in requests {
        let socket = raw::connect(&name);
        raw::send(&socket, &request);
        assert_eq!(raw::receive(&socket), Some(BAD), "{} bytes", request.len());
        raw::send(&socket, &request);
        assert_eq!(raw::receive(&socket), None, "the connection stays open after a bad request");
    }
    // Those who say nothing, and leave, harm nobody either.
    let silent: Vec<OwnedFd> = (0..50).map(|_| raw::connect(&name)).collect();
    let memory = near.register(&machine.contexts[0].allocate(Kind::Vmm, 64).unwrap()).unwrap();
    far.import(&near.export(&memory).unwrap()).unwrap();
    drop(silent);
    far.import(&near.export(&memory).unwrap()).unwrap();
    drop((near, memory));
    wait_until(
        "the end of the hub",
        || std::fs::read_to_string("/proc/net/unix").unwrap(),
        |all| !all.contains(&name),
    );
}

/// A process of another user asks; only root can start one.
#[test]
fn a_process_of_another_user_gets_nothing() {
    const NOBODY: u32 = 65_534;
    if let Some(name) = support::child() {
        let socket = raw::connect(&name);
        raw::send(&socket, &[0; 40]);
        std::process::exit(match raw::receive(&socket) {
            Some(status) => 10 + status as i32,
            None => 1,
        });
    }
    if !rustix::process::geteuid().is_root() {
        let _ = writeln!(std::io::stderr(), "waived: a_process_of_another_user_gets_nothing: needs root");
        return;
    }
    let machine = Machine::new();
    let ipc = Ipc::open(&machine.contexts[0], Config::default()).unwrap();
    let program = std::env::current_exe().unwrap();
    // Where nobody may run it.
    let copy = std::env::temp_dir().join(format!("portway-ipc-{}", std::process::id()));
    std::fs::copy(program, &copy).unwrap();
    let status = {
        use std::os::unix::process::CommandExt;
        Command::new(&copy)
            .args(["--exact", "a_process_of_another_user_gets_nothing", "--nocapture"])
            .env("PORTWAY_IPC_CHILD", socket_name(&ipc))
            .uid(NOBODY)
            .stdout(Stdio::null())
            .status()
    };
    std::fs::remove_file(&copy).unwrap();
    const REFUSED: i32 = 3;
    assert_eq!(status.unwrap().code(), Some(10 + REFUSED));
}

/// A peer that answers nothing is waited for no longer than was said.
#[test]
fn a_hub_that_does_not_answer_is_not_waited_for_without_end() {
    let machine = Machine::new();
    let ask_timeout = Duration::from_millis(100);
    let far = Ipc::open(&machine.contexts[1], Config { ask_timeout, ..Config::default() }).unwrap();
    let near = Ipc::open(&machine.contexts[0], Config::default()).unwrap();
    let (_endpoint, bytes) = near.endpoint().unwrap();
    let memory = near.register(&machine.contexts[0].allocate(Kind::Vmm, 64).unwrap()).unwrap();
    let mut export = near.export(&memory).unwrap();
    let mut endpoint = bytes;
    // A socket that listens and never answers, under the name of a hub.
    let hub = 0x1234_5678_9abc_def0u64 ^ u64::from(std::process::id());
    for message in [&mut export, &mut endpoint] {
        message[24..32].copy_from_slice(&hub.to_le_bytes());
    }
    let address =
        rustix::net::SocketAddrUnix::new_abstract_name(format!("portway-ipc-{hub:016x}").as_bytes()).unwrap();
    let (family, kind) = (rustix::net::AddressFamily::UNIX, rustix::net::SocketType::SEQPACKET);
    // Not for the children of other tests, which would keep it open.
    let flags = rustix::net::SocketFlags::CLOEXEC;
    let listener = rustix::net::socket_with(family, kind, flags, None).unwrap();
    rustix::net::bind(&listener, &address).unwrap();
    rustix::net::listen(&listener, 4).unwrap();
    let start = Instant::now();
    let silent = |error: TransportError| match error {
        TransportError::Timeout { after, .. } => assert_eq!(after, ask_timeout),
        other => panic!("{other:?}"),
    };
    silent(far.import(&export).unwrap_err());
    silent(far.endpoint().unwrap().0.connect(&endpoint, ask_timeout).unwrap_err());
    assert!(start.elapsed() < Duration::from_secs(5));
    // And one that nobody listens on; a child that another test starts just now may hold it open until it runs its program.
    drop(listener);
    wait_until(
        "a name without a listener",
        || far.import(&export).unwrap_err().to_string(),
        |error| error.contains("nobody listens"),
    );
}

/// A wait longer than any that is meant is refused; it is no panic, and no wait without end.
#[test]
fn a_timeout_without_end_is_refused() {
    let machine = Machine::new();
    let [near, far] = [0, 1].map(|at| Ipc::open(&machine.contexts[at], Config::default()).unwrap());
    let (_endpoint, bytes) = near.endpoint().unwrap();
    for timeout in [Duration::MAX, Duration::from_secs(3601)] {
        let error = far.endpoint().unwrap().0.connect(&bytes, timeout).unwrap_err();
        assert!(
            matches!(error, TransportError::Memory(portway_fifo::Error::TimeoutRange { timeout: seen }) if seen == timeout),
            "{error:?}"
        );
    }
    far.endpoint().unwrap().0.connect(&bytes, PATIENCE).unwrap();
}

#[test]
fn an_endpoint_that_is_gone_is_named() {
    let machine = Machine::new();
    for apart in [false, true] {
        let near = Ipc::open(&machine.contexts[0], Config::default()).unwrap();
        let far = match apart {
            true => Ipc::open(&machine.contexts[1], Config::default()).unwrap(),
            false => near.beside(&machine.contexts[1]).unwrap(),
        };
        let (endpoint, bytes) = near.endpoint().unwrap();
        drop(endpoint);
        let error = far.endpoint().unwrap().0.connect(&bytes, PATIENCE).unwrap_err();
        assert!(
            matches!(&error, TransportError::Remote { peer, .. } if peer.contains("endpoint is closed")),
            "{error:?}"
        );
        // One does not connect to itself.
        let (endpoint, bytes) = near.endpoint().unwrap();
        assert!(matches!(endpoint.connect(&bytes, PATIENCE), Err(TransportError::Malformed { .. })));
    }
}
