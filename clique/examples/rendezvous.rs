//! Every process of a job tells every other one its name, over TCP.
//!
//! ```text
//! cargo build -p portway-clique --example rendezvous
//! PORTWAY_STORE=127.0.0.1:29600 PORTWAY_JOB=any-job-42 mpirun -n 4 target/debug/examples/rendezvous
//! ```

use std::env;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use portway_clique::launch::Launch;
use portway_clique::rendezvous::{JobToken, Membership, Post, Rendezvous, Round, Tcp, TcpConfig};

/// The limit of each step.
const WITHIN: Duration = Duration::from_secs(30);

fn run() -> Result<(), Box<dyn std::error::Error>> {
    let launch = Launch::detect()?.ok_or("no launcher's variables are set")?;
    let token = JobToken::new(env::var("PORTWAY_JOB").map_err(|error| format!("PORTWAY_JOB: {error}"))?)?;
    let address = env::var("PORTWAY_STORE").map_err(|error| format!("PORTWAY_STORE: {error}"))?;
    let address = address.parse().map_err(|error| format!("PORTWAY_STORE={address:?}: {error}"))?;
    let member = Membership { token, participant: launch.rank, participants: launch.size };

    let began = Instant::now();
    let tcp = Tcp::start(TcpConfig { member, address, within: WITHIN })?;
    let round = Round { clique: "example".to_owned(), attempt: 0, phase: "names" };
    tcp.post(&round, Post::Ok(format!("rank {} of {}", launch.rank, launch.size).into_bytes()))?;
    let all = tcp.gather(&round, WITHIN)?;
    for (said, rank) in all.0.iter().zip(0..) {
        let expected = Post::Ok(format!("rank {rank} of {}", launch.size).into_bytes());
        if said.as_ref() != Some(&expected) {
            let whereabouts = tcp.whereabouts(rank).unwrap_or_else(|| "nothing known".to_owned());
            return Err(format!("rank {rank}: expected {expected:?}, seen {said:?}; {whereabouts}").into());
        }
    }
    tcp.close(WITHIN)?;
    println!(
        "{:?} rank {}: heard all {} in {:?}",
        launch.launcher,
        launch.rank,
        launch.size,
        began.elapsed()
    );
    Ok(())
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
