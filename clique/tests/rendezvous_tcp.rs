//! The TCP store: addresses, ends, and what is no store. Processes are in `processes`.

mod meeting;

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use meeting::{LOCALHOST, PATIENCE, free_address, ok, round, tcp};
use portway_clique::CliqueError;
use portway_clique::rendezvous::{JobToken, MAX_PARTICIPANTS, Post, Rendezvous, Tcp, TcpConfig};

fn start_error(config: TcpConfig) -> CliqueError {
    match Tcp::start(config) {
        Err(error) => error,
        Ok(started) => panic!("{started:?}"),
    }
}

fn short(config: TcpConfig) -> TcpConfig {
    TcpConfig { within: Duration::from_millis(300), ..config }
}

#[test]
fn the_store_listens_at_one_interface_and_never_at_all() {
    for all in ["0.0.0.0:0", "[::]:0", "[::ffff:0.0.0.0]:0"] {
        let error = start_error(tcp(0, 2, all.parse().unwrap()));
        assert!(matches!(error, CliqueError::Config { .. }), "{error}");
        assert!(error.to_string().contains("which is all of them"), "{error}");
    }
    let first = Tcp::start(tcp(0, 2, LOCALHOST)).unwrap();
    assert!(first.address().ip().is_loopback());
    let port = first.address().port();
    let elsewhere: SocketAddr = format!("127.0.0.2:{port}").parse().unwrap();
    assert!(std::net::TcpStream::connect(elsewhere).is_err(), "it listens at the address that it was told");
    // The control: there it does.
    assert!(std::net::TcpStream::connect(first.address()).is_ok());
}

#[test]
fn what_makes_no_sense_is_refused() {
    for (participant, participants) in [(0, 0), (2, 2), (0, MAX_PARTICIPANTS + 1)] {
        let error = start_error(tcp(participant, participants, LOCALHOST));
        assert!(matches!(error, CliqueError::Config { .. }), "{error}");
    }
    for token in [vec![0; 7], vec![0; 257]] {
        assert!(JobToken::new(token).unwrap_err().to_string().contains("8 to 256 bytes"));
    }
    assert_eq!(format!("{:?}", JobToken::new(*b"a secret token").unwrap()), "JobToken(14 bytes)");
    let taken = Tcp::start(tcp(0, 2, LOCALHOST)).unwrap();
    let error = start_error(tcp(0, 2, taken.address()));
    assert!(matches!(error, CliqueError::System { errno: Some(_), .. }), "{error}");
    assert!(error.to_string().contains(&taken.address().to_string()), "{error}");
}

/// Something else listens there: it says nothing, or not what a store says, or closes at once.
#[test]
fn what_is_no_store_is_an_error_in_time() {
    let other = |answer: &'static [u8], close: bool| {
        let listener = TcpListener::bind(LOCALHOST).unwrap();
        let address = listener.local_addr().unwrap();
        let serving = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(answer).unwrap();
            (!close).then_some(stream)
        });
        let began = Instant::now();
        let error = start_error(short(tcp(1, 2, address)));
        let took = began.elapsed();
        assert!(took < Duration::from_millis(400), "{took:?}");
        assert!(error.to_string().contains(&format!("the store of participant 0 at {address}")), "{error}");
        drop(serving.join().unwrap());
        error
    };
    assert!(matches!(other(b"", false), CliqueError::Timeout { .. }));
    assert!(matches!(other(b"SSH-2.0-something\r\n", false), CliqueError::Foreign { .. }));
    assert!(matches!(other(b"pwrv\x01\0\x02\0\xff\xff\xff\xff", false), CliqueError::Foreign { .. }));
    assert!(matches!(other(b"pwrv\x01\0\x05\0\0\0\0\0", false), CliqueError::Foreign { .. }));
    assert!(matches!(other(b"", true), CliqueError::System { .. }));
}

#[test]
fn nobody_listens_is_an_error_at_the_limit_and_whoever_is_early_waits() {
    let address = free_address();
    let began = Instant::now();
    let error = start_error(short(tcp(1, 2, address)));
    let took = began.elapsed();
    assert!(matches!(error, CliqueError::Timeout { .. }) && error.to_string().contains("refused"), "{error}");
    assert!((Duration::from_millis(300)..Duration::from_millis(400)).contains(&took), "{took:?}");
    std::thread::scope(|scope| {
        let early = scope.spawn(|| Tcp::start(tcp(1, 2, address)).unwrap());
        std::thread::sleep(Duration::from_millis(50));
        let first = Tcp::start(tcp(0, 2, address)).unwrap();
        drop(early.join().unwrap());
        first.close(PATIENCE).unwrap();
    });
}

#[test]
fn the_store_lives_until_everybody_has_left_and_no_longer_than_it_may() {
    let first = Tcp::start(tcp(0, 3, LOCALHOST)).unwrap();
    let address = first.address();
    let second = Tcp::start(tcp(1, 3, address)).unwrap();
    for member in [&first, &second] {
        member.post(&round(0, "a"), ok("x")).unwrap();
    }
    // Participant 0 leaves early; the other still gets what it needs.
    std::thread::scope(|scope| {
        let leaving = scope.spawn(|| first.close(PATIENCE));
        std::thread::sleep(Duration::from_millis(50));
        let said = second.gather(&round(0, "a"), Duration::from_millis(500)).unwrap();
        assert_eq!(said.0, [Some(ok("x")), Some(ok("x")), None]);
        assert!(!leaving.is_finished());
        drop(second);
        leaving.join().unwrap().unwrap();
    });

    // One that does not leave holds it up to the limit, and is named.
    let first = Tcp::start(tcp(0, 2, LOCALHOST)).unwrap();
    let second = Tcp::start(tcp(1, 2, first.address())).unwrap();
    let began = Instant::now();
    let error = first.close(Duration::from_millis(200)).unwrap_err();
    let took = began.elapsed();
    assert!((Duration::from_millis(200)..Duration::from_millis(300)).contains(&took), "{took:?}");
    assert!(error.to_string().contains("still here: participant 1, process"), "{error}");
    // Then the store is gone, which is an error at once.
    let began = Instant::now();
    let error = second.gather(&round(0, "a"), PATIENCE).unwrap_err();
    assert!(matches!(error, CliqueError::System { .. }), "{error}");
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
}

/// Dropping participant 0 ends the store when no round needs it, and not before: the control is one that somebody still has
/// to gather. Nor does it wait for ever.
#[test]
fn a_store_that_is_dropped_stays_as_long_as_a_round_needs_it() {
    let drop_takes = |first: Tcp| {
        let began = Instant::now();
        drop(first);
        began.elapsed()
    };
    let short = Duration::from_millis(500);
    let pair = || {
        let first = Tcp::start(tcp(0, 2, LOCALHOST)).unwrap();
        let second = Tcp::start(tcp(1, 2, first.address())).unwrap();
        for member in [&first, &second] {
            member.post(&round(0, "a"), ok("x")).unwrap();
        }
        assert!(first.gather(&round(0, "a"), PATIENCE).unwrap().0.iter().all(Option::is_some));
        (first, second)
    };
    let (first, second) = pair();
    second.gather(&round(0, "a"), PATIENCE).unwrap();
    let took = drop_takes(first);
    assert!(took < short, "{took:?}");

    let (first, second) = pair();
    std::thread::scope(|scope| {
        let leaving = scope.spawn(|| drop_takes(first));
        std::thread::sleep(short);
        assert!(!leaving.is_finished());
        // Participant 1 gets it all the same, and then nothing is left to wait for.
        assert_eq!(second.gather(&round(0, "a"), PATIENCE).unwrap().0, [Some(ok("x")), Some(ok("x"))]);
        let took = leaving.join().unwrap();
        assert!(took < short * 3, "{took:?}");
    });

    let (first, _second) = pair();
    let took = drop_takes(first);
    assert!((Duration::from_millis(2000)..Duration::from_millis(2600)).contains(&took), "{took:?}");
}

/// How long a gather may take to learn that it waits in vain.
const SOON: Duration = Duration::from_secs(1);

/// Three participants that have posted and gathered the first round; the last of them over a relay.
fn three_have_begun() -> (Tcp, Tcp, Tcp, Relay) {
    let first = Tcp::start(tcp(0, 3, LOCALHOST)).unwrap();
    let second = Tcp::start(tcp(1, 3, first.address())).unwrap();
    let relay = Relay::start(first.address());
    let third =
        Tcp::start(TcpConfig { within: Duration::from_millis(300), ..tcp(2, 3, relay.address) }).unwrap();
    for member in [&first, &second, &third] {
        member.post(&round(0, "a"), ok("x")).unwrap();
    }
    for member in [&first, &second, &third] {
        assert!(member.gather(&round(0, "a"), PATIENCE).unwrap().0.iter().all(Option::is_some));
    }
    for member in [&first, &second] {
        member.post(&round(0, "b"), ok("x")).unwrap();
    }
    (first, second, third, relay)
}

/// What a gather of the second round brings of the third participant, and how long it takes.
fn third_in(member: &Tcp, attempt: u64, phase: &'static str, within: Duration) -> (Option<Post>, Duration) {
    let began = Instant::now();
    let said = member.gather(&round(attempt, phase), within).unwrap();
    (said.0[2].clone(), began.elapsed())
}

#[test]
fn who_has_begun_an_attempt_and_left_is_waited_for_no_longer() {
    let (first, second, third, _relay) = three_have_begun();
    std::thread::scope(|scope| {
        // One waits already, the other begins after that.
        let waiting = scope.spawn(|| third_in(&second, 0, "b", PATIENCE));
        std::thread::sleep(Duration::from_millis(50));
        drop(third);
        for (said, took) in [third_in(&first, 0, "b", PATIENCE), waiting.join().unwrap()] {
            assert_eq!(said, None);
            println!("recorded: that a participant has left is heard after {took:?}");
            assert!(took < SOON, "{took:?}");
        }
    });
    assert!(first.whereabouts(2).unwrap().contains("has left"), "{:?}", first.whereabouts(2));
    // Short gathers that are repeated keep their pace.
    let short = Duration::from_millis(20);
    for _ in 0..20 {
        let (said, took) = third_in(&first, 0, "b", short);
        assert!(said.is_none() && took >= short, "{took:?}");
    }
    // In an attempt that it has not begun a successor may take its place, and is waited for.
    for member in [&first, &second] {
        member.post(&round(1, "a"), ok("x")).unwrap();
    }
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| third_in(&first, 1, "a", PATIENCE));
        std::thread::sleep(2 * SOON);
        assert!(!waiting.is_finished());
        let successor = Tcp::start(tcp(2, 3, first.address())).unwrap();
        successor.post(&round(1, "a"), ok("successor")).unwrap();
        assert_eq!(waiting.join().unwrap().0, Some(ok("successor")));
    });
}

/// A connection that breaks is not the end of a process, if it opens another one.
#[test]
fn who_loses_its_connections_and_comes_back_is_waited_for() {
    let (first, second, third, relay) = three_have_begun();
    let comes_back = |phase: &'static str, after: Duration| {
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| third_in(&first, 0, phase, PATIENCE));
            std::thread::sleep(Duration::from_millis(400)); // the gather has waited for long enough to be ended
            relay.cut();
            std::thread::sleep(after);
            third.look(&round(0, phase)).unwrap_err(); // it finds that the connection is broken
            third.look(&round(0, phase)).unwrap();
            std::thread::sleep(SOON);
            let is_over = waiting.is_finished();
            third.post(&round(0, phase), ok("back")).unwrap();
            (is_over, waiting.join().unwrap().0)
        })
    };
    assert_eq!(comes_back("b", Duration::ZERO), (false, Some(ok("back"))));
    // The control: one that stays away is given up. When it comes back the round is as it was.
    for member in [&first, &second] {
        member.post(&round(0, "c"), ok("x")).unwrap();
    }
    assert_eq!(comes_back("c", SOON), (true, None));
    assert_eq!(third_in(&first, 0, "c", PATIENCE).0, Some(ok("back")));
}

/// Requests that are not answered in time cost their connections, and not the one that says that a process is there.
#[test]
fn who_gets_no_answers_has_not_gone() {
    let (first, _second, third, relay) = three_have_begun();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| third_in(&first, 0, "b", PATIENCE));
        relay.shared.is_mute.store(true, Ordering::Release);
        let error = third.post(&round(0, "lost"), ok("x")).unwrap_err();
        assert!(matches!(error, CliqueError::Timeout { .. }), "{error}");
        std::thread::sleep(2 * SOON);
        assert!(!waiting.is_finished());
        relay.shared.is_mute.store(false, Ordering::Release);
        third.post(&round(0, "b"), ok("there")).unwrap();
        assert_eq!(waiting.join().unwrap().0, Some(ok("there")));
    });
}

/// The end of the store reaches a gather that waits, long before its limit.
#[test]
fn the_end_of_the_store_ends_every_gather() {
    let first = Tcp::start(tcp(0, 2, LOCALHOST)).unwrap();
    let second = Tcp::start(tcp(1, 2, first.address())).unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| second.gather(&round(0, "a"), PATIENCE));
        std::thread::sleep(Duration::from_millis(50));
        let began = Instant::now();
        first.close(Duration::ZERO).unwrap_err();
        let error = waiting.join().unwrap().unwrap_err();
        assert!(matches!(error, CliqueError::System { .. }), "{error}");
        assert!(error.to_string().contains("the store of participant 0 at 127.0.0.1:"), "{error}");
        assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    });
}

/// Threads and descriptors after many of them are as many as before.
#[test]
fn nothing_is_left_behind() {
    let count = |of: &str| std::fs::read_dir(of).unwrap().count();
    // Other tests run in this process at the same time, so it is asked in one of its own.
    if std::env::var_os("PORTWAY_TEST_ALONE").is_none() {
        let again = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["nothing_is_left_behind", "--exact"])
            .env("PORTWAY_TEST_ALONE", "1")
            .status();
        assert!(again.unwrap().success());
        return;
    }
    let mut seen = Vec::new();
    for _ in 0..200 {
        let first = Tcp::start(tcp(0, 2, LOCALHOST)).unwrap();
        let second = Tcp::start(tcp(1, 2, first.address())).unwrap();
        for member in [&first, &second] {
            member.post(&round(0, "a"), ok("x")).unwrap();
        }
        second.gather(&round(0, "a"), PATIENCE).unwrap();
        drop(second);
        first.close(PATIENCE).unwrap();
        seen.push((count("/proc/self/task"), count("/proc/self/fd")));
    }
    assert_eq!(seen[0], seen[199], "{seen:?}");
}

/// A connection that says nothing, or stops in the middle of its greeting, is closed in time.
#[test]
fn who_does_not_say_who_it_is_is_dropped() {
    let first = Tcp::start(tcp(0, 2, LOCALHOST)).unwrap();
    let mut streams = [b"".as_slice(), b"pwrv\x01"].map(|part| {
        let mut stream = std::net::TcpStream::connect(first.address()).unwrap();
        stream.write_all(part).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    });
    let began = Instant::now();
    for stream in &mut streams {
        // Closed with or without unread bytes of ours: an end or a reset.
        assert!(matches!(stream.read(&mut [0]), Ok(0) | Err(_)));
    }
    let took = began.elapsed();
    assert!((Duration::from_millis(4500)..Duration::from_secs(6)).contains(&took), "{took:?}");
    let seen = first.turned_away();
    assert_eq!(seen.len(), 2, "{seen:?}");
    for (error, bytes) in seen.iter().zip([0, 5]) {
        let expected = format!("wrong pace: expected a greeting within 5s, seen {bytes} bytes of it");
        assert!(error.to_string().contains(&expected), "{error}");
    }
}

/// A network between a participant and the store: passes the bytes of its connections on, and counts them.
struct Relay {
    address: SocketAddr,
    shared: Arc<Relayed>,
}

#[derive(Default)]
struct Relayed {
    bytes: AtomicUsize,
    /// Nothing that the store answers arrives.
    is_mute: AtomicBool,
    /// Both ends of each connection.
    streams: Mutex<Vec<[TcpStream; 2]>>,
}

impl Relay {
    fn start(store: SocketAddr) -> Self {
        let listener = TcpListener::bind(LOCALHOST).unwrap();
        let relay = Relay { address: listener.local_addr().unwrap(), shared: Arc::default() };
        let shared = relay.shared.clone();
        // Ends with the test's process.
        std::thread::spawn(move || {
            for near in listener.incoming() {
                let (near, far) = (near.unwrap(), TcpStream::connect(store).unwrap());
                for stream in [&near, &far] {
                    stream.set_nodelay(true).unwrap();
                    stream.set_read_timeout(Some(PATIENCE)).unwrap();
                }
                let copies = || [near.try_clone().unwrap(), far.try_clone().unwrap()];
                shared.streams.lock().unwrap().push(copies());
                for (is_answer, [mut from, mut to]) in [(false, copies()), (true, [far, near])] {
                    let shared = shared.clone();
                    std::thread::spawn(move || {
                        let mut some = [0; 4096];
                        while let Ok(len @ 1..) = from.read(&mut some) {
                            shared.bytes.fetch_add(len, Ordering::AcqRel);
                            let is_lost = is_answer && shared.is_mute.load(Ordering::Acquire);
                            if !is_lost && to.write_all(&some[..len]).is_err() {
                                return;
                            }
                        }
                        let _ = to.shutdown(Shutdown::Write);
                    });
                }
            }
        });
        relay
    }

    /// Breaks every connection, as a network does.
    fn cut(&self) {
        for stream in self.shared.streams.lock().unwrap().drain(..).flatten() {
            let _ = stream.shutdown(Shutdown::Both); // the other end's may have closed it already
        }
    }
}

/// The bytes of ten looks at a round that has not ended, and of ten gathers of it, with so many participants.
fn bytes_of_ten(participants: u32) -> (usize, usize) {
    let first = Tcp::start(tcp(0, participants, LOCALHOST)).unwrap();
    let others: Vec<Tcp> =
        (2..participants).map(|one| Tcp::start(tcp(one, participants, first.address())).unwrap()).collect();
    let relay = Relay::start(first.address());
    let bytes = &relay.shared.bytes;
    let one = Tcp::start(tcp(1, participants, relay.address)).unwrap();
    assert_eq!(one.look(&round(0, "life")).unwrap(), None); // it has its connections by now
    let mut counted = [0; 2];
    for (look, counted) in [true, false].into_iter().zip(&mut counted) {
        bytes.store(0, Ordering::Release);
        for _ in 0..10 {
            if look {
                assert_eq!(one.look(&round(0, "life")).unwrap(), None);
            } else {
                one.gather(&round(0, "life"), Duration::ZERO).unwrap();
            }
        }
        *counted = bytes.load(Ordering::Acquire);
    }
    drop((one, others));
    (counted[0], counted[1])
}

/// A heartbeat is a look: what it takes of the store's network must not grow with the participants, of whom each does it.
#[test]
fn a_heartbeat_takes_as_few_bytes_among_hundreds_as_among_three() {
    let ((few, few_gathered), (many, many_gathered)) = (bytes_of_ten(3), bytes_of_ten(300));
    println!("recorded: a heartbeat among 300 takes {} bytes, a gather {}", many / 10, many_gathered / 10);
    assert_eq!(few, many, "of ten looks");
    assert!(many <= 10 * 128, "{many} bytes of ten looks");
    // The control: who says where everybody is says more of more.
    assert!(many_gathered > 20 * few_gathered, "{many_gathered} and {few_gathered} bytes");
}
