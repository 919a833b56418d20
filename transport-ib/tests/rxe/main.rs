//! The transport on a real kernel's RDMA devices: soft-RoCE, in the virtual machine of `ci/rxe-vm`.
//!
//! `ci/ib-rxe.sh` builds this program outside and runs it inside. It is a test without the usual harness, since it is
//! several processes in several network namespaces, and cuts wires between them. Run by itself, where there are no such
//! devices, it says so and that is all.

mod conductor;
mod conform;
mod faults;
mod host;
mod immediate;
mod random;
mod witness;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use portway_transport_ib::{Config, Ib};

/// What a part of this program says at its end.
type Outcome = Result<(), String>;

/// Runs named cases, each with its time, and says at the end how many failed.
fn run_all(cases: &[(&str, &dyn Fn() -> Outcome)], wanted: &[String]) -> Outcome {
    if let Some(unknown) = wanted.iter().find(|name| !cases.iter().any(|(case, _)| case == name)) {
        return Err(format!("no case {unknown}"));
    }
    let mut failed = Vec::new();
    for (name, case) in cases {
        if !wanted.is_empty() && !wanted.iter().any(|wanted| wanted == name) {
            continue;
        }
        let start = Instant::now();
        let outcome = case();
        let took = start.elapsed().as_secs_f64();
        match outcome {
            Ok(()) => println!("{name} ... ok ({took:.1} s)"),
            Err(why) => {
                println!("{name} ... FAILED ({took:.1} s): {why}");
                failed.push(*name);
            }
        }
    }
    if failed.is_empty() { Ok(()) } else { Err(format!("failed: {}", failed.join(", "))) }
}

/// The settings of the tests: an error comes after 67 ms x 7 at the earliest.
fn settings(device: &str) -> Config {
    Config { device: Some(device.into()), timeout: 14, retries: 6, ..Config::default() }
}

fn number(arguments: &[String], at: usize, default: u64) -> u64 {
    arguments.get(at).and_then(|text| text.parse().ok()).unwrap_or(default)
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let rest = arguments.get(1..).unwrap_or_default();
    let outcome = match arguments.first().map_or("", String::as_str) {
        // In the virtual machine.
        "conformance" => conform::two_devices(),
        "conformance-hosts" => conform::two_hosts(),
        "random" => {
            random::two_hosts(number(rest, 0, 1), number(rest, 1, 100_000), rest.get(2).map(String::as_str))
        }
        "faults" => faults::all(rest),
        // The parts that run on a host of it.
        "conform" => conform::suite(),
        "serve" => conform::serve(&rest[0]),
        "host" => host::run(&rest[0], Duration::from_secs(number(rest, 1, 300))),
        // Programs that list tests: there is none to run without a word.
        _ if arguments.iter().any(|argument| argument == "--list") => Ok(()),
        _ => {
            match Ib::open(settings("rxe0")) {
                Ok(_) => println!("waived: nothing was asked for; see ci/ib-rxe.sh"),
                Err(error) => {
                    println!("waived: the transport over soft-RoCE ({error}); ci/ib-rxe.sh runs it")
                }
            }
            Ok(())
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("{why}");
            ExitCode::FAILURE
        }
    }
}
