//! `portway-bench`: one microbenchmark a layer, and one of the whole stack. `portway-bench --help` lists the flags;
//! the output follows the field's own tools: `#` lines are not data, GB are 10^9 bytes, latency is one way.

mod args;
mod failure;
mod fifo;
mod gpu;
mod ib;
mod ipc;
mod layer;
mod machine;
mod proxy;
mod put;
mod rate;
mod report;
mod round;
mod stats;
mod table;
mod trial;

use std::fs::File;
use std::io::{self, Write};
use std::process::ExitCode;

use args::{Args, What};
use failure::Failure;
use layer::Layer;
use report::{Report, Status};

fn main() -> ExitCode {
    let args = Args::from_command_line();
    let outcome = match args.what() {
        What::List => say(&layer::list(&args)).map(|()| 0),
        What::Layers(layers) => run(&args, &layers),
    };
    match outcome {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            eprintln!("portway-bench: {failure}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the layers one after the other, prints each as it is done, and returns the exit status.
fn run(args: &Args, layers: &[&Layer]) -> Result<u8, Failure> {
    // Opened first: a path that cannot be written is said before the minutes are spent, not after.
    let json = match &args.json {
        Some(path) => Some((path, File::create(path).map_err(|source| Failure::json(path, source))?)),
        None => None,
    };
    let mut report = Report::new(args);
    say(&table::header(&report))?;
    for layer in layers {
        let first_row = report.results.len();
        let (status, reason) = match (layer.find)(args) {
            Err(lacking) => (Status::Waived, Some(lacking)),
            Ok(run) => match run(args, &mut report) {
                Err(failure) => (Status::Failed, Some(failure.in_full())),
                Ok(()) => (Status::Ran, None),
            },
        };
        report.layer_done(layer.name, status, reason);
        say(&table::layer(&report, layer, first_row))?;
    }
    report.finish();
    say(&table::footer(&report))?;
    if let Some((path, file)) = json {
        report.write_json(file).map_err(|source| Failure::json(path, source))?;
    }
    Ok(report.exit_status())
}

fn say(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(Failure::Output)
}
