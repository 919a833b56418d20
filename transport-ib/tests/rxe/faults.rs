//! Faults of the wire, the peer and the program: each ends in a typed error on the side that sends, in the time that the
//! settings say, and on the side that only waits by its deadline.
//!
//! All the while a [`Witness`] carries verified puts over both devices of the fault: in the same processes, or where a
//! whole process is at fault, from and to another one on its device. Where a link is cut there can be none over it: its
//! witness goes between the devices that still have one. Where no end fails (loss, short cuts) there is none.

use std::time::{Duration, Instant};

use crate::conductor::{Hosts, Spoiled, system};
use crate::conform::wrong_key;
use crate::host::{hex, unhex};
use crate::witness::Witness;
use crate::{Outcome, random, run_all};

/// 2^14 x 4.096 us is 67 ms.
const TIMEOUT: u8 = 14;
const RETRIES: u8 = 3;
const ONE_TRY: Duration = Duration::from_millis(67);
/// (RETRIES + 1) times 67 ms. A provider may take four times as long, and an emulated processor is slow on top.
const GIVES_UP: Duration = Duration::from_millis(268);
const SLACK: Duration = Duration::from_secs(5);
/// How long a side waits for a signal that does not come.
const WAIT: Duration = Duration::from_millis(1500);
const LEN: u64 = 64 << 10;

/// So many hosts, of which host 0 sends to host 1 over `victim`.
fn set_up(count: usize) -> Result<Hosts, String> {
    let mut hosts = Hosts::start(count, TIMEOUT, RETRIES)?;
    hosts.connect("victim", 0, 1)?;
    hosts.put("victim", 0, LEN, 4)?;
    Ok(hosts)
}

/// A witness between the device of host 0 and that of host 1, for faults of one of the processes: there in another one.
fn witness_without(hosts: &mut Hosts, host: usize) -> Result<Witness, String> {
    let other = hosts.join(host, TIMEOUT, RETRIES)?;
    let (sender, receiver) = if host == 0 { (other, 1) } else { (0, other) };
    Witness::start(hosts, sender, receiver)
}

/// The moment before a fault, and the witness's rounds then.
struct Before(Instant, u64);

impl Before {
    fn now(hosts: &mut Hosts, witness: &Witness) -> Result<Before, String> {
        let rounds = witness.rounds(hosts)?.0;
        Ok(Before(Instant::now(), rounds))
    }
}

/// An error that the sender may see.
struct Expected {
    /// It has one of these words.
    words: &'static [&'static str],
    /// It comes no earlier than this.
    earliest: Duration,
}

const NO_ANSWER: Expected = Expected { words: &["RETRY_EXC_ERR"], earliest: ONE_TRY };
/// The peer asks for 0.64 ms each time.
const NOT_READY: Expected = Expected { words: &["RNR_RETRY_EXC_ERR"], earliest: Duration::from_micros(640) };
/// No time: the peer answers.
const REFUSED: Expected = Expected { words: &["REM_ACCESS_ERR"], earliest: Duration::ZERO };
/// A provider reports a cause on its own side in one way or another.
const LOCAL: Expected =
    Expected { words: &["RETRY_EXC_ERR", "LOC_QP_OP_ERR", "WR_FLUSH_ERR"], earliest: Duration::ZERO };

/// The sender's stream ends with that error, in time, and the witness goes on.
fn sender_fails(hosts: &mut Hosts, before: &Before, expected: &Expected, witness: &Witness) -> Outcome {
    let (error, after) = hosts.end_of_stream("victim", 0, before.0, 4 * GIVES_UP + SLACK)?;
    failed(hosts, before, (&error, after), expected, witness)
}

fn failed(
    hosts: &mut Hosts,
    before: &Before,
    (error, after): (&str, Duration),
    expected: &Expected,
    witness: &Witness,
) -> Outcome {
    // As long as this the fault lasted, so the witness's rounds are counted before anything else.
    let rounds = witness.rounds(hosts)?.0 - before.1;
    println!("  after {:.3} s, {rounds} rounds of the witness: {error}", after.as_secs_f64());
    if !expected.words.iter().any(|word| error.contains(word)) {
        return Err(format!("the sender's error names none of {:?}: {error}", expected.words));
    }
    if after < expected.earliest || after > 4 * GIVES_UP + SLACK {
        return Err(format!("the error came after {after:?}, earliest {:?}", expected.earliest));
    }
    if expected.earliest >= ONE_TRY { witness.went_on(before.1, before.1 + rounds) } else { Ok(()) }
}

/// The side that only waits gets its error by its deadline.
fn waiter_times_out(hosts: &mut Hosts) -> Outcome {
    let answer = hosts.ask(1, &format!("wait victim {}", WAIT.as_millis()))?;
    println!("  the side that waits: {answer}");
    if answer.contains("waited") || answer.contains("channel") { Ok(()) } else { Err(answer) }
}

fn stream(hosts: &mut Hosts) -> Outcome {
    hosts.ask(0, &format!("stream victim {LEN}")).map(drop)
}

/// The peer's link is cut: the witness goes from the sender's device to a third.
fn peers_link_down() -> Outcome {
    let mut hosts = set_up(3)?;
    let witness = Witness::start(&mut hosts, 0, 2)?;
    stream(&mut hosts)?;
    let before = Before::now(&mut hosts, &witness)?;
    let _cut = Spoiled::link_down_at_the_switch(1)?;
    sender_fails(&mut hosts, &before, &NO_ANSWER, &witness)?;
    waiter_times_out(&mut hosts)?;
    witness.end(&mut hosts)
}

/// The sender's link is cut: the witness goes from the peer's device to a third.
fn own_link_down() -> Outcome {
    let mut hosts = set_up(3)?;
    let witness = Witness::start(&mut hosts, 1, 2)?;
    stream(&mut hosts)?;
    let before = Before::now(&mut hosts, &witness)?;
    let cut = Spoiled::link_down_at_the_host(0)?;
    sender_fails(&mut hosts, &before, &LOCAL, &witness)?;
    waiter_times_out(&mut hosts)?;
    let events = hosts.ask(0, "events")?;
    if events.trim() == "0 true" {
        return Err("the device reported no event".into());
    }
    drop(cut);
    witness.end(&mut hosts)
}

/// As if the peer's link were cut.
fn total_loss() -> Outcome {
    let mut hosts = set_up(3)?;
    let witness = Witness::start(&mut hosts, 0, 2)?;
    stream(&mut hosts)?;
    let before = Before::now(&mut hosts, &witness)?;
    let _cut = Spoiled::netem(&[1], "loss 100%")?;
    sender_fails(&mut hosts, &before, &NO_ANSWER, &witness)?;
    waiter_times_out(&mut hosts)?;
    witness.end(&mut hosts)
}

/// Nothing fails, so there is nothing to witness: both flows have every byte checked.
fn one_percent_loss() -> Outcome {
    random::two_hosts(5, 2_000, Some("loss 1%"))
}

/// Nothing fails here either.
fn half_a_second_cut() -> Outcome {
    let mut hosts = Hosts::start(2, 16, 6)?;
    for flow in 0..2 {
        hosts.connect(&format!("flow{flow}"), 0, 1)?;
    }
    let cutter = std::thread::spawn(|| {
        for _ in 0..3 {
            std::thread::sleep(Duration::from_millis(700));
            let cut = Spoiled::netem(&[1], "loss 100%")?;
            std::thread::sleep(Duration::from_millis(500));
            drop(cut);
        }
        Ok::<(), String>(())
    });
    let outcome = random::between(&mut hosts, 9, 4_000);
    cutter.join().map_err(|_| "the cutter panicked".to_owned())??;
    outcome
}

fn killed_before_connect() -> Outcome {
    let mut hosts = Hosts::start(2, TIMEOUT, RETRIES)?;
    let witness = witness_without(&mut hosts, 1)?;
    hosts.endpoint("victim", 0)?;
    let end = hosts.endpoint("victim", 1)?;
    hosts.kill(1)?;
    hosts.ask(0, &format!("connect victim {end}"))?;
    let before = Before::now(&mut hosts, &witness)?;
    stream(&mut hosts)?;
    sender_fails(&mut hosts, &before, &NO_ANSWER, &witness)?;
    witness.end(&mut hosts)
}

fn killed_after_connect() -> Outcome {
    let mut hosts = set_up(2)?;
    let witness = witness_without(&mut hosts, 1)?;
    hosts.kill(1)?;
    let before = Before::now(&mut hosts, &witness)?;
    stream(&mut hosts)?;
    sender_fails(&mut hosts, &before, &NO_ANSWER, &witness)?;
    witness.end(&mut hosts)
}

fn killed_in_mid_put() -> Outcome {
    let mut hosts = set_up(2)?;
    let witness = witness_without(&mut hosts, 1)?;
    stream(&mut hosts)?;
    // Whatever moment this is, the stream puts.
    std::thread::sleep(Duration::from_millis(200));
    let before = Before::now(&mut hosts, &witness)?;
    hosts.kill(1)?;
    sender_fails(&mut hosts, &before, &NO_ANSWER, &witness)?;
    witness.end(&mut hosts)
}

fn killed_in_flush() -> Outcome {
    let mut hosts = set_up(2)?;
    let witness = witness_without(&mut hosts, 1)?;
    // One put of 8 MiB, of which the flush waits for the most part of a second.
    hosts.tell(0, &format!("put victim {} 1", 8 << 20))?;
    std::thread::sleep(Duration::from_millis(50));
    let before = Before::now(&mut hosts, &witness)?;
    hosts.kill(1)?;
    match hosts.answer(0, 4 * GIVES_UP + SLACK) {
        Err(error) => {
            failed(&mut hosts, &before, (&error, before.0.elapsed()), &NO_ANSWER, &witness)?;
        }
        other => return Err(format!("the flush: {other:?}")),
    }
    witness.end(&mut hosts)
}

/// The side that sends is killed: the side that waits has its deadline.
fn sender_killed() -> Outcome {
    let mut hosts = set_up(2)?;
    let witness = witness_without(&mut hosts, 0)?;
    stream(&mut hosts)?;
    std::thread::sleep(Duration::from_millis(200));
    let before = Before::now(&mut hosts, &witness)?;
    hosts.kill(0)?;
    waiter_times_out(&mut hosts)?;
    let rounds = witness.rounds(&mut hosts)?.0;
    witness.went_on(before.1, rounds)?;
    witness.end(&mut hosts)
}

fn wrong_rkey() -> Outcome {
    let mut hosts = Hosts::start(2, TIMEOUT, RETRIES)?;
    let witness = Witness::start(&mut hosts, 0, 1)?;
    let (mine, theirs) = (hosts.endpoint("victim", 0)?, hosts.endpoint("victim", 1)?);
    let parts: Vec<&str> = theirs.split_whitespace().collect();
    let [end, destination, signal] = parts[..] else { return Err(format!("host 1 answered {theirs}")) };
    let destination = hex(&wrong_key(&unhex(destination)?));
    hosts.ask(0, &format!("connect victim {end} {destination} {signal}"))?;
    hosts.ask(1, &format!("connect victim {mine}"))?;
    let before = Before::now(&mut hosts, &witness)?;
    stream(&mut hosts)?;
    sender_fails(&mut hosts, &before, &REFUSED, &witness)?;
    waiter_times_out(&mut hosts)?;
    witness.end(&mut hosts)
}

fn memory_taken_back() -> Outcome {
    let mut hosts = set_up(2)?;
    let witness = Witness::start(&mut hosts, 0, 1)?;
    stream(&mut hosts)?;
    std::thread::sleep(Duration::from_millis(200));
    let before = Before::now(&mut hosts, &witness)?;
    hosts.ask(1, "release victim")?;
    sender_fails(&mut hosts, &before, &REFUSED, &witness)?;
    waiter_times_out(&mut hosts)?;
    witness.end(&mut hosts)
}

/// The peer's message with the number of a queue pair that belongs to another connection, which is a witness too.
fn somebody_elses_queue_pair() -> Outcome {
    let mut hosts = Hosts::start(3, TIMEOUT, RETRIES)?;
    let witness = Witness::start(&mut hosts, 0, 1)?;
    let theirs = hosts.endpoint("third", 1)?;
    let third = hosts.endpoint("third", 2)?;
    hosts.ask(1, &format!("connect third {third}"))?;
    hosts.ask(2, &format!("connect third {theirs}"))?;
    let third = Witness::over(&mut hosts, "third", 2, 1)?;
    // Host 0 connects to the queue pair of host 1 that host 2 is connected to.
    hosts.endpoint("victim", 0)?;
    hosts.ask(0, &format!("connect victim {theirs}"))?;
    let (before, thirds) = (Before::now(&mut hosts, &witness)?, third.rounds(&mut hosts)?.0);
    stream(&mut hosts)?;
    sender_fails(&mut hosts, &before, &NO_ANSWER, &witness)?;
    let rounds = third.rounds(&mut hosts)?.0;
    third.went_on(thirds, rounds)?;
    third.end(&mut hosts)?;
    witness.end(&mut hosts)
}

/// The peer has no receive for what takes one, and says so again and again. All of the sender's process is like that.
fn receiver_not_ready() -> Outcome {
    let mut hosts = Hosts::start_as(&["immediate", "plain"], TIMEOUT, RETRIES)?;
    let witness = witness_without(&mut hosts, 0)?;
    hosts.connect("victim", 0, 1)?;
    let before = Before::now(&mut hosts, &witness)?;
    stream(&mut hosts)?;
    sender_fails(&mut hosts, &before, &NOT_READY, &witness)?;
    waiter_times_out(&mut hosts)?;
    witness.end(&mut hosts)
}

/// The peer has its queue pair, and never connects it.
fn receiver_never_connected() -> Outcome {
    let mut hosts = Hosts::start(2, TIMEOUT, RETRIES)?;
    let witness = Witness::start(&mut hosts, 0, 1)?;
    hosts.endpoint("victim", 0)?;
    let end = hosts.endpoint("victim", 1)?;
    hosts.ask(0, &format!("connect victim {end}"))?;
    let before = Before::now(&mut hosts, &witness)?;
    stream(&mut hosts)?;
    sender_fails(&mut hosts, &before, &NO_ANSWER, &witness)?;
    witness.end(&mut hosts)
}

/// The peer connects while the first puts are repeated.
fn receiver_connected_late() -> Outcome {
    let mut hosts = Hosts::start(2, 16, 6)?;
    let witness = Witness::start(&mut hosts, 0, 1)?;
    let (mine, theirs) = (hosts.endpoint("victim", 0)?, hosts.endpoint("victim", 1)?);
    hosts.ask(0, &format!("connect victim {theirs}"))?;
    let before = Before::now(&mut hosts, &witness)?;
    hosts.tell(0, "put victim 65536 4")?;
    std::thread::sleep(Duration::from_millis(300));
    let rounds = witness.rounds(&mut hosts)?.0;
    witness.went_on(before.1, rounds)?;
    hosts.ask(1, &format!("connect victim {mine}"))?;
    let took = hosts.answer(0, Duration::from_secs(20))?;
    println!("  the puts took {took} s");
    hosts.ask(1, "verify victim 65536")?;
    witness.end(&mut hosts)
}

type Break = fn(&mut Hosts, &Witness) -> Outcome;

/// No round comes after the last one, and that it did not go on is noticed before its own limit.
fn held(hosts: &mut Hosts, witness: &Witness) -> Outcome {
    witness.hold(hosts)?;
    // The receiver may still be in the last round.
    hosts.end_of_stream("witness", 0, Instant::now(), SLACK)?;
    let before = witness.rounds(hosts)?.0;
    std::thread::sleep(GIVES_UP);
    let after = witness.rounds(hosts)?.0;
    match witness.went_on(before, after) {
        Err(error) => {
            println!("  {error}");
            Ok(())
        }
        Ok(()) => Err(format!("a stopped witness went from round {before} to {after}")),
    }
}

/// The control of the witnesses: one that loses its own memory, gets a wrong byte or stands still fails its case.
fn a_broken_witness_is_found() -> Outcome {
    let breaks: [(&str, Break); 3] = [
        ("REM_ACCESS_ERR", |hosts, _| hosts.ask(1, "release witness").map(drop)),
        ("byte 4321", |hosts, witness| witness.spoil(hosts)),
        ("stands still", held),
    ];
    let mut hosts = Hosts::start(2, TIMEOUT, RETRIES)?;
    for (word, break_it) in breaks {
        // The same name each time, and so another connection.
        let witness = Witness::start(&mut hosts, 0, 1)?;
        break_it(&mut hosts, &witness)?;
        match witness.end(&mut hosts) {
            Err(error) if error.contains(word) => println!("  {error}"),
            other => return Err(format!("a broken witness, {word}: {other:?}")),
        }
    }
    Ok(())
}

/// The control: the same stream over a wire that nobody touches does not end by itself.
fn nothing_wrong() -> Outcome {
    let mut hosts = set_up(2)?;
    let witness = Witness::start(&mut hosts, 0, 1)?;
    stream(&mut hosts)?;
    match hosts.end_of_stream("victim", 0, Instant::now(), Duration::from_secs(3)) {
        Err(still) if still.contains("no end of the stream") => {}
        other => return Err(format!("the stream ended: {other:?}")),
    }
    hosts.ask(0, "stop victim")?;
    let (end, _) = hosts.end_of_stream("victim", 0, Instant::now(), SLACK)?;
    hosts.ask(1, &format!("verify victim {LEN}"))?;
    if end == "stopped" { witness.end(&mut hosts) } else { Err(end) }
}

pub fn all(wanted: &[String]) -> Outcome {
    // The wires are whole before the first.
    system("ip link set br0 up")?;
    run_all(
        &[
            ("nothing_wrong", &nothing_wrong),
            ("a_changed_byte_is_found", &random::a_changed_byte_is_found),
            ("a_broken_witness_is_found", &a_broken_witness_is_found),
            ("peers_link_down", &peers_link_down),
            ("own_link_down", &own_link_down),
            ("total_loss", &total_loss),
            ("one_percent_loss", &one_percent_loss),
            ("half_a_second_cut", &half_a_second_cut),
            ("killed_before_connect", &killed_before_connect),
            ("killed_after_connect", &killed_after_connect),
            ("killed_in_mid_put", &killed_in_mid_put),
            ("killed_in_flush", &killed_in_flush),
            ("sender_killed", &sender_killed),
            ("wrong_rkey", &wrong_rkey),
            ("memory_taken_back", &memory_taken_back),
            ("somebody_elses_queue_pair", &somebody_elses_queue_pair),
            ("receiver_not_ready", &receiver_not_ready),
            ("receiver_never_connected", &receiver_never_connected),
            ("receiver_connected_late", &receiver_connected_late),
        ],
        wanted,
    )
}
