//! Faults of the wire, the peer and the program: each ends in a typed error on the side that sends, in the time that the
//! settings say, and on the side that only waits by its deadline; other connections go on.

use std::time::{Duration, Instant};

use crate::conductor::{Hosts, Spoiled, system};
use crate::conform::wrong_key;
use crate::host::{hex, unhex};
use crate::{Outcome, random, run_all};

/// 2^14 x 4.096 us is 67 ms.
const TIMEOUT: u8 = 14;
const RETRIES: u8 = 3;
/// (RETRIES + 1) times 67 ms. A provider may take four times as long, and an emulated processor is slow on top.
const GIVES_UP: Duration = Duration::from_millis(268);
const SLACK: Duration = Duration::from_secs(5);
/// How long a side waits for a signal that does not come.
const WAIT: Duration = Duration::from_millis(1500);
const LEN: u64 = 64 << 10;

/// Host 0 sends to host 1 over `victim`; `other` goes between the two of `others`.
fn set_up(others: (usize, usize)) -> Result<Hosts, String> {
    let mut hosts = Hosts::start(3, TIMEOUT, RETRIES)?;
    hosts.connect("victim", 0, 1)?;
    hosts.connect("other", others.0, others.1)?;
    hosts.put("victim", 0, LEN, 4)?;
    hosts.put("other", others.0, LEN, 4)?;
    Ok(hosts)
}

/// The sender's stream ends with an error that has one of these words, in time; the other connection works.
fn sender_fails(hosts: &mut Hosts, since: Instant, words: &[&str], other: usize) -> Outcome {
    let (error, after) = hosts.end_of_stream("victim", 0, since, 4 * GIVES_UP + SLACK)?;
    println!("  after {:.2} s: {error}", after.as_secs_f64());
    if !words.iter().any(|word| error.contains(word)) {
        return Err(format!("the sender's error names none of {words:?}: {error}"));
    }
    if after > 4 * GIVES_UP + SLACK {
        return Err(format!("the error came after {after:?}"));
    }
    hosts.put("other", other, LEN, 16).map(drop)
}

/// The side that only waits gets its error by its deadline.
fn waiter_times_out(hosts: &mut Hosts) -> Outcome {
    let answer = hosts.ask(1, &format!("wait victim {}", WAIT.as_millis()))?;
    println!("  the side that waits: {answer}");
    if answer.contains("waited") || answer.contains("channel") { Ok(()) } else { Err(answer) }
}

const NO_ANSWER: &[&str] = &["RETRY_EXC_ERR"];
/// A provider reports a cause on its own side in one way or another.
const LOCAL: &[&str] = &["RETRY_EXC_ERR", "LOC_QP_OP_ERR", "WR_FLUSH_ERR"];

fn peers_link_down() -> Outcome {
    let mut hosts = set_up((0, 2))?;
    hosts.ask(0, &format!("stream victim {LEN}"))?;
    let _cut = Spoiled::link_down_at_the_switch(1)?;
    sender_fails(&mut hosts, Instant::now(), NO_ANSWER, 0)?;
    waiter_times_out(&mut hosts)
}

fn own_link_down() -> Outcome {
    let mut hosts = set_up((1, 2))?;
    hosts.ask(0, &format!("stream victim {LEN}"))?;
    let cut = Spoiled::link_down_at_the_host(0)?;
    sender_fails(&mut hosts, Instant::now(), LOCAL, 1)?;
    waiter_times_out(&mut hosts)?;
    let events = hosts.ask(0, "events")?;
    if events.trim() == "0 true" {
        return Err("the device reported no event".into());
    }
    drop(cut);
    Ok(())
}

fn total_loss() -> Outcome {
    let mut hosts = set_up((0, 2))?;
    hosts.ask(0, &format!("stream victim {LEN}"))?;
    let _cut = Spoiled::netem(&[1], "loss 100%")?;
    sender_fails(&mut hosts, Instant::now(), NO_ANSWER, 0)?;
    waiter_times_out(&mut hosts)
}

fn one_percent_loss() -> Outcome {
    random::two_hosts(5, 2_000, Some("loss 1%"))
}

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
    let mut hosts = Hosts::start(3, TIMEOUT, RETRIES)?;
    hosts.connect("other", 0, 2)?;
    hosts.endpoint("victim", 0)?;
    let end = hosts.endpoint("victim", 1)?;
    hosts.kill(1)?;
    hosts.ask(0, &format!("connect victim {end}"))?;
    hosts.ask(0, &format!("stream victim {LEN}"))?;
    sender_fails(&mut hosts, Instant::now(), NO_ANSWER, 0)
}

fn killed_after_connect() -> Outcome {
    let mut hosts = set_up((0, 2))?;
    hosts.kill(1)?;
    hosts.ask(0, &format!("stream victim {LEN}"))?;
    sender_fails(&mut hosts, Instant::now(), NO_ANSWER, 0)
}

fn killed_in_mid_put() -> Outcome {
    let mut hosts = set_up((0, 2))?;
    hosts.ask(0, &format!("stream victim {LEN}"))?;
    // Whatever moment this is, the stream puts.
    std::thread::sleep(Duration::from_millis(200));
    hosts.kill(1)?;
    sender_fails(&mut hosts, Instant::now(), NO_ANSWER, 0)
}

fn killed_in_flush() -> Outcome {
    let mut hosts = set_up((0, 2))?;
    // One put of 8 MiB, of which the flush waits for the most part of a second.
    hosts.tell(0, &format!("put victim {} 1", 8 << 20))?;
    std::thread::sleep(Duration::from_millis(50));
    hosts.kill(1)?;
    let since = Instant::now();
    match hosts.answer(0, 4 * GIVES_UP + SLACK) {
        Err(error) if error.contains("RETRY_EXC_ERR") => {
            println!("  after {:.2} s: {error}", since.elapsed().as_secs_f64());
        }
        other => return Err(format!("the flush: {other:?}")),
    }
    hosts.put("other", 0, LEN, 16).map(drop)
}

/// The side that sends is killed: the side that waits has its deadline.
fn sender_killed() -> Outcome {
    let mut hosts = set_up((1, 2))?;
    hosts.ask(0, &format!("stream victim {LEN}"))?;
    std::thread::sleep(Duration::from_millis(200));
    hosts.kill(0)?;
    waiter_times_out(&mut hosts)?;
    hosts.put("other", 1, LEN, 16).map(drop)
}

fn wrong_rkey() -> Outcome {
    let mut hosts = Hosts::start(2, TIMEOUT, RETRIES)?;
    hosts.connect("other", 0, 1)?;
    let (mine, theirs) = (hosts.endpoint("victim", 0)?, hosts.endpoint("victim", 1)?);
    let parts: Vec<&str> = theirs.split_whitespace().collect();
    let [end, destination, signal] = parts[..] else { return Err(format!("host 1 answered {theirs}")) };
    let destination = hex(&wrong_key(&unhex(destination)?));
    hosts.ask(0, &format!("connect victim {end} {destination} {signal}"))?;
    hosts.ask(1, &format!("connect victim {mine}"))?;
    hosts.ask(0, &format!("stream victim {LEN}"))?;
    sender_fails(&mut hosts, Instant::now(), &["REM_ACCESS_ERR"], 0)?;
    waiter_times_out(&mut hosts)
}

fn memory_taken_back() -> Outcome {
    let mut hosts = set_up((0, 1))?;
    hosts.ask(0, &format!("stream victim {LEN}"))?;
    std::thread::sleep(Duration::from_millis(200));
    hosts.ask(1, "release victim")?;
    sender_fails(&mut hosts, Instant::now(), &["REM_ACCESS_ERR"], 0)?;
    waiter_times_out(&mut hosts)
}

/// The peer's message with the number of a queue pair that belongs to another connection.
fn somebody_elses_queue_pair() -> Outcome {
    let mut hosts = Hosts::start(3, TIMEOUT, RETRIES)?;
    hosts.endpoint("other", 2)?;
    hosts.connect("other", 1, 2)?;
    let theirs = hosts.endpoint("third", 1)?;
    let third = hosts.endpoint("third", 2)?;
    hosts.ask(1, &format!("connect third {third}"))?;
    hosts.ask(2, &format!("connect third {theirs}"))?;
    hosts.put("third", 2, LEN, 4)?;
    // Host 0 connects to the queue pair of host 1 that host 2 is connected to.
    hosts.endpoint("victim", 0)?;
    hosts.ask(0, &format!("connect victim {theirs}"))?;
    hosts.ask(0, &format!("stream victim {LEN}"))?;
    sender_fails_alone(&mut hosts)?;
    hosts.put("third", 2, LEN, 16)?;
    hosts.put("third", 1, LEN, 16)?;
    hosts.put("other", 1, LEN, 16).map(drop)
}

fn sender_fails_alone(hosts: &mut Hosts) -> Outcome {
    let (error, after) = hosts.end_of_stream("victim", 0, Instant::now(), 4 * GIVES_UP + SLACK)?;
    println!("  after {:.2} s: {error}", after.as_secs_f64());
    if error.contains("_ERR") { Ok(()) } else { Err(format!("not an error of the transport: {error}")) }
}

/// The peer has no receive for what takes one, and says so again and again.
fn receiver_not_ready() -> Outcome {
    let mut hosts = Hosts::start_as(&["immediate", "plain", "plain"], TIMEOUT, RETRIES)?;
    hosts.connect("victim", 0, 1)?;
    hosts.connect("other", 1, 2)?;
    hosts.ask(0, &format!("stream victim {LEN}"))?;
    sender_fails(&mut hosts, Instant::now(), &["RNR_RETRY_EXC_ERR"], 1)?;
    waiter_times_out(&mut hosts)
}

/// The peer has its queue pair, and never connects it.
fn receiver_never_connected() -> Outcome {
    let mut hosts = Hosts::start(3, TIMEOUT, RETRIES)?;
    hosts.connect("other", 0, 2)?;
    hosts.endpoint("victim", 0)?;
    let end = hosts.endpoint("victim", 1)?;
    hosts.ask(0, &format!("connect victim {end}"))?;
    hosts.ask(0, &format!("stream victim {LEN}"))?;
    sender_fails(&mut hosts, Instant::now(), NO_ANSWER, 0)
}

/// The peer connects while the first puts are repeated.
fn receiver_connected_late() -> Outcome {
    let mut hosts = Hosts::start(2, 16, 6)?;
    let (mine, theirs) = (hosts.endpoint("victim", 0)?, hosts.endpoint("victim", 1)?);
    hosts.ask(0, &format!("connect victim {theirs}"))?;
    hosts.tell(0, "put victim 65536 4")?;
    std::thread::sleep(Duration::from_millis(300));
    hosts.ask(1, &format!("connect victim {mine}"))?;
    let took = hosts.answer(0, Duration::from_secs(20))?;
    println!("  the puts took {took} s");
    hosts.ask(1, "verify victim 65536").map(drop)
}

/// The control: the same stream over a wire that nobody touches does not end by itself.
fn nothing_wrong() -> Outcome {
    let mut hosts = set_up((0, 2))?;
    hosts.ask(0, &format!("stream victim {LEN}"))?;
    match hosts.end_of_stream("victim", 0, Instant::now(), Duration::from_secs(3)) {
        Err(still) if still.contains("no end of the stream") => {}
        other => return Err(format!("the stream ended: {other:?}")),
    }
    hosts.ask(0, "stop victim")?;
    let (end, _) = hosts.end_of_stream("victim", 0, Instant::now(), SLACK)?;
    hosts.ask(1, &format!("verify victim {LEN}"))?;
    if end == "stopped" { Ok(()) } else { Err(end) }
}

pub fn all(wanted: &[String]) -> Outcome {
    // The wires are whole before the first.
    system("ip link set br0 up")?;
    run_all(
        &[
            ("nothing_wrong", &nothing_wrong),
            ("a_changed_byte_is_found", &random::a_changed_byte_is_found),
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
