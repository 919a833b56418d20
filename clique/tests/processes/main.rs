//! Participants that are processes: killed and stopped at each step, and others that do not belong there.

mod child;
#[path = "../meeting/mod.rs"]
mod meeting;

use std::io::Write;
use std::net::TcpStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use child::{Kind, Part, Participant};
use rustix::process::Signal;

/// The limit of each step of a child.
const LIMIT: Duration = Duration::from_millis(1000);
/// How much later a busy machine may be with it.
const LATE: Duration = Duration::from_millis(1000);

/// Not a test: what a child process runs.
#[test]
fn participant() {
    child::play();
}

/// A place to meet that nobody else uses.
struct Place {
    kind: Kind,
    text: String,
    folder: Option<PathBuf>,
}

impl Place {
    fn new(kind: Kind) -> Self {
        match kind {
            Kind::Tcp => Place { kind, text: meeting::free_address().to_string(), folder: None },
            Kind::SharedFile => {
                let folder = meeting::fresh_folder();
                Place { kind, text: folder.to_str().unwrap().to_owned(), folder: Some(folder) }
            }
        }
    }

    fn part(&self, participant: u32, participants: u32) -> Part {
        Part {
            kind: self.kind,
            place: self.text.clone(),
            participant,
            participants,
            token: "the token of this job".to_owned(),
            attempt: 0,
            limit: LIMIT,
        }
    }

    fn start(&self, participant: u32, participants: u32) -> Participant {
        Participant::start(&self.part(participant, participants))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(folder) = &self.folder {
            let _ = std::fs::remove_dir_all(folder);
        }
    }
}

/// The lines that begin like this, without that beginning.
fn lines<'a>(said: &'a [String], beginning: &str) -> Vec<&'a str> {
    said.iter().filter_map(|line| line.strip_prefix(beginning)).collect()
}

/// No step took longer than it may.
fn in_time(said: &[String]) {
    for took in lines(said, "took ") {
        let (step, millis) = took.split_once(' ').unwrap();
        let took = Duration::from_millis(millis.parse().unwrap());
        assert!(took < LIMIT + LATE, "{step} took {took:?}; {said:#?}");
    }
}

/// When a participant gets its signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum When {
    BeforeConnect,
    AfterConnect,
    AfterPost,
    InGather,
}

/// Three participants; one gets a signal, the others go on. Returns what the others said, and the victim's process id.
fn with_signal(kind: Kind, victim: u32, when: When, signal: Option<Signal>) -> (Vec<Vec<String>>, u32) {
    with_signal_and_limit(kind, victim, when, signal, LIMIT)
}

fn with_signal_and_limit(
    kind: Kind,
    victim: u32,
    when: When,
    signal: Option<Signal>,
    limit: Duration,
) -> (Vec<Vec<String>>, u32) {
    let place = Place::new(kind);
    let part = |participant| Part { limit, ..place.part(participant, 3) };
    let mut all: Vec<Participant> =
        (0..3).map(|participant| Participant::start(&part(participant))).collect();
    let step = match when {
        When::BeforeConnect => "connect",
        When::AfterConnect | When::InGather => "post-a",
        When::AfterPost => "gather-a",
    };
    // Connecting may need the others, so all are brought there at the same time.
    std::thread::scope(|scope| {
        for one in &mut all {
            scope.spawn(|| one.bring_to(step));
        }
    });
    let mut victim = all.remove(victim as usize);
    if when == When::InGather {
        victim.go();
        victim.wait_for("gather-a");
        victim.go();
        // Either side of the call is a fine moment too; most times it is within.
        std::thread::sleep(Duration::from_millis(50));
    }
    let pid = victim.pid();
    match signal {
        Some(signal) => victim.signal(signal),
        None => drop(std::thread::spawn(move || victim.finish())),
    }
    let said = std::thread::scope(|scope| {
        let finishing: Vec<_> = all.iter_mut().map(|one| scope.spawn(|| one.finish())).collect();
        finishing.into_iter().map(|one| one.join().unwrap()).collect()
    });
    (said, pid)
}

#[test]
fn the_control_nobody_gets_a_signal_and_everybody_hears_all() {
    for kind in [Kind::Tcp, Kind::SharedFile] {
        for when in [When::BeforeConnect, When::AfterConnect, When::AfterPost, When::InGather] {
            for said in with_signal(kind, 1, when, None).0 {
                assert!(lines(&said, "error").is_empty() && lines(&said, "missing").is_empty(), "{said:#?}");
                assert_eq!(lines(&said, "ok close"), [""], "{kind:?} {when:?} {said:#?}");
            }
        }
    }
}

/// Everybody else misses the one in the same round, in time, and says what is known of it.
fn others_miss(kind: Kind, when: When, signal: Signal) {
    let (all, pid) = with_signal(kind, 1, when, Some(signal));
    let round =
        if matches!(when, When::BeforeConnect | When::AfterConnect) { "gather-a" } else { "gather-b" };
    let whereabouts = match (kind, when, signal) {
        (Kind::Tcp, When::BeforeConnect, _) => "has not connected".to_owned(),
        (Kind::Tcp, _, Signal::KILL) => "has gone without a goodbye".to_owned(),
        (Kind::Tcp, ..) => "is connected and has not posted".to_owned(),
        (Kind::SharedFile, ..) => format!("process {pid} on "),
    };
    for said in all {
        in_time(&said);
        let context = format!("{kind:?} {when:?} {signal:?}: {said:#?}");
        if kind == Kind::SharedFile && when == When::BeforeConnect {
            // Coming up waits for all.
            let errors = lines(&said, "error connect ");
            assert!(errors.len() == 1 && errors[0].contains("participant 1 has not come"), "{context}");
            continue;
        }
        let missing = lines(&said, &format!("missing {round} 1 "));
        assert!(missing.len() == 1 && missing[0].contains(&whereabouts), "{whereabouts}; {context}");
        if when != When::BeforeConnect {
            assert!(missing[0].contains(&format!("process {pid} on ")), "{context}");
        }
        assert!(
            lines(&said, "error post").is_empty() && lines(&said, "error gather").is_empty(),
            "{context}"
        );
    }
}

/// How long the others' gathers took in which they missed the one who got the signal.
fn missed_after(when: When, signal: Signal, limit: Duration) -> Vec<Duration> {
    let round = if when == When::AfterConnect { "gather-a" } else { "gather-b" };
    let said = with_signal_and_limit(Kind::Tcp, 1, when, Some(signal), limit).0;
    let took = said.iter().map(|said| {
        assert_eq!(lines(said, &format!("missing {round} 1 ")).len(), 1, "{when:?} {signal:?}: {said:#?}");
        let millis = lines(said, &format!("took {round} "))[0].parse().unwrap();
        Duration::from_millis(millis)
    });
    took.collect()
}

/// The end of a process that has begun an attempt is heard long before the limit. Of three tries one has to be in time: a
/// machine that is shared is late now and then.
#[test]
fn a_killed_participant_is_heard_of_at_once() {
    std::thread::scope(|scope| {
        for when in [When::AfterPost, When::InGather] {
            scope.spawn(move || {
                let in_time = (0..3).any(|_| {
                    let took = missed_after(when, Signal::KILL, meeting::PATIENCE);
                    println!("recorded: killed {when:?}, heard after {took:?}, of {:?}", meeting::PATIENCE);
                    took.iter().all(|took| *took < Duration::from_secs(1))
                });
                assert!(in_time, "{when:?}");
            });
        }
        // The controls: one that is stopped may go on, and one that had said nothing may have a successor.
        let limit = 2 * LIMIT;
        for (when, signal) in [(When::AfterPost, Signal::STOP), (When::AfterConnect, Signal::KILL)] {
            scope.spawn(move || {
                for took in missed_after(when, signal, limit) {
                    assert!(took >= limit, "{when:?} {signal:?}: {took:?}");
                }
            });
        }
    });
}

/// A process that was killed before it said anything has a successor, and the others wait for that.
#[test]
fn a_successor_takes_part_in_what_its_predecessor_had_not_begun() {
    let place = Place::new(Kind::Tcp);
    let part = |participant| Part { limit: meeting::PATIENCE, ..place.part(participant, 3) };
    let mut all: Vec<Participant> =
        (0..3).map(|participant| Participant::start(&part(participant))).collect();
    for one in &mut all {
        one.bring_to("post-a");
    }
    let killed = all.remove(1);
    killed.signal(Signal::KILL);
    drop(killed);
    let said = std::thread::scope(|scope| {
        let finishing: Vec<_> = all.iter_mut().map(|one| scope.spawn(|| one.finish())).collect();
        std::thread::sleep(Duration::from_secs(1)); // they wait by then, most times
        let mut successor = Participant::start(&part(1));
        let mut said = vec![successor.finish()];
        said.extend(finishing.into_iter().map(|one| one.join().unwrap()));
        said
    });
    for said in said {
        assert!(lines(&said, "error").is_empty() && lines(&said, "missing").is_empty(), "{said:#?}");
    }
}

/// Everybody else gets an error in time that names the store.
fn others_lose_the_store(when: When, signal: Signal) {
    let (all, _) = with_signal(Kind::Tcp, 0, when, Some(signal));
    for said in all {
        in_time(&said);
        let context = format!("{when:?} {signal:?}: {said:#?}");
        let errors = lines(&said, "error ");
        assert!(errors.len() == 1 && errors[0].contains("the store of participant 0 at 127."), "{context}");
        if when == When::BeforeConnect {
            assert!(
                errors[0].starts_with("connect ") && errors[0].contains("Connection refused"),
                "{context}"
            );
        }
    }
}

macro_rules! signals {
    ($($name:ident: $test:expr, $signal:expr;)*) => {$(
        #[test]
        fn $name() {
            // They wait most of the time, so they do it side by side.
            std::thread::scope(|scope| {
                for when in [When::BeforeConnect, When::AfterConnect, When::AfterPost, When::InGather] {
                    scope.spawn(move || $test(when, $signal));
                }
            });
        }
    )*};
}

signals! {
    a_killed_participant_is_missed: |when, signal| others_miss(Kind::Tcp, when, signal), Signal::KILL;
    a_stopped_participant_is_missed: |when, signal| others_miss(Kind::Tcp, when, signal), Signal::STOP;
    a_killed_store_is_an_error: others_lose_the_store, Signal::KILL;
    a_stopped_store_is_an_error: others_lose_the_store, Signal::STOP;
    a_killed_participant_is_missed_by_file: |when, signal| others_miss(Kind::SharedFile, when, signal), Signal::KILL;
    a_stopped_participant_is_missed_by_file: |when, signal| others_miss(Kind::SharedFile, when, signal), Signal::STOP;
}

/// Two participants that go on all the same, and a third process that does not belong there.
fn with_stranger(change: impl Fn(&mut Part), error: &str, turned_away: &str) {
    let place = Place::new(Kind::Tcp);
    let mut all: Vec<Participant> = (0..2).map(|participant| place.start(participant, 2)).collect();
    for one in &mut all {
        one.bring_to("post-a");
    }
    let mut part = place.part(1, 2);
    change(&mut part);
    let mut stranger = Participant::start(&part);
    let pid = stranger.pid();
    let said = stranger.finish();
    in_time(&said);
    let errors = lines(&said, "error connect ");
    assert!(errors.len() == 1 && errors[0].contains(error), "{error}; {said:#?}");
    let said = std::thread::scope(|scope| {
        let finishing: Vec<_> = all.iter_mut().map(|one| scope.spawn(|| one.finish())).collect();
        finishing.into_iter().map(|one| one.join().unwrap()).collect::<Vec<_>>()
    });
    for said in &said {
        assert!(lines(said, "error").is_empty() && lines(said, "missing").is_empty(), "{said:#?}");
    }
    // Participant 0 knows who that was.
    let seen = lines(&said[0], "turned away ");
    let names = |seen: &&str| seen.contains(turned_away) && seen.contains(&format!("process {pid} on "));
    assert!(seen.iter().any(names), "{turned_away}; {seen:#?}");
}

#[test]
fn a_second_participant_of_the_same_number_is_turned_away() {
    with_stranger(
        |_| {},
        "expected one that is not here yet; participant 1, process ",
        "sent a wrong participant",
    );
}

#[test]
fn another_number_of_participants_is_turned_away() {
    with_stranger(
        |part| part.participants = 3,
        "number of participants: expected 2, seen 3",
        "sent a wrong number of participants",
    );
}

#[test]
fn another_token_is_turned_away() {
    with_stranger(
        |part| part.token = "of some other job".to_owned(),
        "job token: expected that of this job, seen another one, of 17 bytes",
        "sent a wrong job token",
    );
}

/// Bytes that are none of ours, and connections that say nothing or stop in the middle.
#[test]
fn what_is_no_participant_is_turned_away_and_hurts_nobody() {
    let place = Place::new(Kind::Tcp);
    let mut all: Vec<Participant> = (0..2).map(|participant| place.start(participant, 2)).collect();
    for one in &mut all {
        one.bring_to("post-a");
    }
    let connect = |bytes: &[u8]| {
        let mut stream = TcpStream::connect(&place.text).unwrap();
        stream.write_all(bytes).unwrap();
        stream
    };
    let garbage: Vec<u8> = (0..4096u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let header = |version: u8, len: u32| {
        let mut header = b"pwrv".to_vec();
        header.extend([version, 0, 1, 0]);
        header.extend(len.to_le_bytes());
        header
    };
    let streams = [
        connect(b""),
        connect(&garbage),
        connect(b"GET / HTTP/1.1\r\n\r\n"),
        connect(&header(9, 10)),       // another version
        connect(&header(1, u32::MAX)), // longer than there is memory for
        connect(&header(1, 100)),      // a header without the rest
        connect(&header(1, 100)[..7]), // less than a header
    ];
    // One ends in the middle: truncated.
    drop(connect(&header(1, 100)));
    let said = std::thread::scope(|scope| {
        let finishing: Vec<_> = all.iter_mut().map(|one| scope.spawn(|| one.finish())).collect();
        finishing.into_iter().map(|one| one.join().unwrap()).collect::<Vec<_>>()
    });
    drop(streams);
    for said in &said {
        in_time(said);
        assert!(lines(said, "error").is_empty() && lines(said, "missing").is_empty(), "{said:#?}");
    }
    let seen = lines(&said[0], "turned away ").join("\n");
    for part in [
        "wrong magic: expected 0x76727770",
        "wrong protocol version: expected 1, seen 9",
        "wrong length: expected at most 2048 bytes, seen 4294967295 bytes",
        "wrong frame: expected 112 bytes, seen 12 bytes",
    ] {
        assert!(seen.contains(part) && seen.contains("somebody at 127.0.0.1:"), "{part}; {seen}");
    }
}

/// A process that takes the place of a killed one cannot use its rounds again; the next attempt is its own.
#[test]
fn a_later_process_does_not_use_a_round_again() {
    let place = Place::new(Kind::Tcp);
    let mut first = place.start(0, 2);
    let mut killed = place.start(1, 2);
    first.bring_to("post-a");
    killed.bring_to("gather-a");
    killed.signal(Signal::KILL);
    drop(killed);
    let mut again = place.start(1, 2);
    let said = again.finish();
    let errors = lines(&said, "error post-a ");
    assert!(errors.len() == 1 && errors[0].contains("expected one post, seen a second one"), "{said:#?}");
    let mut next = Participant::start(&Part { attempt: 1, ..place.part(1, 2) });
    next.bring_to("gather-a");
    let said = first.finish();
    let errors = lines(&said, "error post-a ");
    assert!(errors.len() == 1 && errors[0].contains("participant 1 has begun attempt 1"), "{said:#?}");
}

#[test]
fn many_processes_meet_in_a_second() {
    const PROCESSES: u32 = 64;
    let place = Place::new(Kind::Tcp);
    let part = |participant| Part { limit: meeting::PATIENCE, ..place.part(participant, PROCESSES) };
    let mut all: Vec<Participant> =
        (0..PROCESSES).map(|participant| Participant::start(&part(participant))).collect();
    for one in &all {
        one.wait_for("connect");
    }
    let began = Instant::now();
    for one in &mut all {
        (0..3).for_each(|_| one.go());
    }
    for one in &all {
        one.wait_for("post-b");
    }
    let took = began.elapsed();
    println!("{PROCESSES} processes: {took:?}");
    assert!(took < Duration::from_secs(1), "{took:?}");
}
