//! Gives random bytes to whatever reads bytes of others, and random calls to the engine.
//!
//! ```text
//! fuzz run SECONDS SEED            every target in turn, SECONDS in all
//! fuzz replay TARGET FILE          one input again
//! fuzz seeds                       writes the corpora anew, from messages that are right (feature `seeds`)
//! fuzz plants SEED                 the control: a target with a mistake in it is found out within its time
//! ```
//!
//! Inputs are the files of `corpus/TARGET`, changed at random: bits, bytes, numbers at their limits, cuts, copies and pieces of
//! another file. What a seed makes is the same each time. An input on which a target panics is written to `found/TARGET`
//! and ends the run. There is no feedback from coverage, so this works with the stable compiler.

mod decoders;
mod engine;
mod mutate;
#[cfg(feature = "seeds")]
mod seeds;

// The decoders are private, so their files are compiled again in here, with what they need of their crates around them.
#[path = "../../clique/src/bytes.rs"]
#[allow(dead_code, reason = "only its decoders are called here")]
mod bytes;
#[path = "../../transport-ib/src/gid.rs"]
#[allow(dead_code, reason = "only its decoders are called here")]
mod gid;
#[path = "../../transport-ib/src/message.rs"]
#[allow(dead_code, reason = "only its decoders are called here")]
mod ib_message;
#[path = "../../transport-ipc/src/identity.rs"]
#[allow(dead_code, reason = "only its decoders are called here")]
mod identity;
#[path = "../../transport-ipc/src/message.rs"]
#[allow(dead_code, reason = "only its decoders are called here")]
mod ipc_message;
#[path = "../../clique/src/message/mod.rs"]
#[allow(dead_code, reason = "only its decoders are called here")]
mod message;
mod error {
    pub use portway_transport_ipc::Error;
}
mod rendezvous;
#[path = "../../clique/src/text.rs"]
#[allow(dead_code, reason = "only its decoders are called here")]
mod text;
mod uses {
    pub use portway_clique::Use;
}
use portway_clique::{CliqueError, backend, state};

use std::error::Error;
use std::fs;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mutate::Random;

/// Something that takes bytes of others. It panics where it does what it must not.
struct Target {
    name: &'static str,
    /// Whether the bytes were right.
    run: fn(&[u8]) -> bool,
}

const TARGETS: [Target; 5] = [
    Target { name: "trigger", run: decoders::trigger },
    Target { name: "ib-connection", run: decoders::ib_connection },
    Target { name: "ipc-connection", run: decoders::ipc_connection },
    Target { name: "clique-messages", run: decoders::clique_messages },
    Target { name: "engine-calls", run: engine::calls },
];

fn folder(what: &str, target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(what).join(target)
}

/// The inputs of a target, in order of their names.
fn corpus(target: &str) -> Result<Vec<Vec<u8>>, Box<dyn Error>> {
    let folder = folder("corpus", target);
    let mut paths: Vec<PathBuf> =
        fs::read_dir(&folder)?.map(|entry| Ok(entry?.path())).collect::<Result<_, std::io::Error>>()?;
    paths.sort();
    if paths.is_empty() {
        return Err(format!("no inputs in {}", folder.display()).into());
    }
    Ok(paths.iter().map(fs::read).collect::<Result<_, _>>()?)
}

/// How many inputs a target took, and the one that it panicked on, if any.
type Outcome = (u64, Option<Vec<u8>>);

/// Runs a target until its time is over.
fn fuzz(target: &Target, seed: u64, time: Duration) -> Result<Outcome, Box<dyn Error>> {
    let corpus = corpus(target.name)?;
    let mut random = Random::new(seed);
    let (started, mut inputs) = (Instant::now(), 0);
    for input in &corpus {
        inputs += 1;
        if catch_unwind(|| (target.run)(input)).is_err() {
            return Ok((inputs, Some(input.clone())));
        }
    }
    while started.elapsed() < time {
        let input = random.changed(&corpus);
        inputs += 1;
        if catch_unwind(|| (target.run)(&input)).is_err() {
            return Ok((inputs, Some(input)));
        }
    }
    Ok((inputs, None))
}

fn run(seconds: u64, seed: u64) -> Result<(), Box<dyn Error>> {
    for target in &TARGETS {
        let stale = corpus(target.name)?.iter().filter(|input| !(target.run)(input)).count();
        if stale > 0 {
            println!("fuzz: {}: {stale} inputs of the corpus are right no more: fuzz seeds", target.name);
        }
        let time = Duration::from_secs(seconds) / TARGETS.len() as u32;
        let (inputs, found) = fuzz(target, seed, time)?;
        if let Some(input) = found {
            let folder = folder("found", target.name);
            fs::create_dir_all(&folder)?;
            let file = folder.join(format!("seed-{seed}-input-{inputs}"));
            fs::write(&file, input)?;
            return Err(format!("{}: panicked on {}", target.name, file.display()).into());
        }
        println!("fuzz: {}: ok, {inputs} inputs, seed {seed}", target.name);
    }
    Ok(())
}

/// That mistakes of this kind are found at all, and in little time.
fn plants(seed: u64) -> Result<(), Box<dyn Error>> {
    std::panic::set_hook(Box::new(|_| {})); // these panics are meant
    for target in [
        Target { name: "ib-connection", run: decoders::plant_trusts_a_count },
        Target { name: "clique-messages", run: decoders::plant_trusts_a_length },
        Target { name: "engine-calls", run: engine::plant_believes_an_offset },
    ] {
        match fuzz(&target, seed, Duration::from_secs(20))? {
            (inputs, Some(_)) => println!("fuzz: {}: the plant is found by input {inputs}", target.name),
            (inputs, None) => return Err(format!("{}: {inputs} inputs miss the plant", target.name).into()),
        }
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["run", seconds, seed] => run(seconds.parse()?, seed.parse()?),
        ["plants", seed] => plants(seed.parse()?),
        ["replay", name, file] => {
            let target = TARGETS.iter().find(|target| target.name == name).ok_or("no such target")?;
            (target.run)(&fs::read(file)?);
            println!("fuzz: {name}: ok");
            Ok(())
        }
        #[cfg(feature = "seeds")]
        ["seeds"] => {
            for (target, name, bytes) in seeds::seeds()? {
                fs::create_dir_all(folder("corpus", target))?;
                fs::write(folder("corpus", target).join(name), bytes)?;
            }
            Ok(())
        }
        _ => Err("usage: fuzz run SECONDS SEED | plants SEED | replay TARGET FILE | seeds".into()),
    }
}
