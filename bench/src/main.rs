//! `portway-bench`: one microbenchmark a layer, and one of the whole stack. `portway-bench --help` lists the flags;
//! the output follows the field's own tools: `#` lines are not data, GB are 10^9 bytes, latency is one way.

mod args;
mod baseline;
mod clique;
mod csv;
mod devices;
mod failure;
mod fifo;
mod gpu;
mod ib;
mod ipc;
mod layer;
mod list;
mod load;
mod machine;
mod page;
mod progress;
mod proxy;
mod put;
mod rate;
mod report;
mod round;
mod running;
mod stats;
mod table;
mod trial;
mod values;

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use args::{Args, What};
use baseline::Comparison;
use failure::Failure;
use layer::Layer;
use page::Named;
use progress::Progress;
use report::{Report, Status};

fn main() -> ExitCode {
    let args = Args::from_command_line();
    let outcome = match args.what() {
        What::List => say(&list::list(&args)).map(|()| 0),
        What::Page(results) => page(&args, &results).map(|()| 0),
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
    // Opened first: a path that cannot be read or written is said before the minutes are spent, not after.
    let before = args.baseline.as_deref().map(result).transpose()?;
    let json = args.json.as_deref().map(Output::create).transpose()?;
    let csv = args.csv.as_deref().map(Output::create).transpose()?;
    if let Err(error) = running::report_at_signals() {
        eprintln!("portway-bench: SIGUSR1 is not served: {error}");
    }
    let mut report = Report::new(args);
    say(&table::header(&report))?;
    let progress = Progress::start();
    for layer in layers {
        let first_row = report.results.len();
        let (status, reason) = match (layer.find)(args) {
            Err(lacking) => (Status::Waived, Some(lacking)),
            Ok(run) => match run(args, &mut report) {
                Err(failure) => (Status::Failed, Some(failure.in_full())),
                Ok(()) => (Status::Ran, None),
            },
        };
        if let (Status::Waived, Some(lacking), true) = (status, &reason, args.require) {
            report.errors.push(format!("{}: required, but {lacking}", layer.name));
        }
        report.results[first_row..].iter_mut().for_each(|row| row.transport = layer.transport.into());
        report.layer_done(layer.name, status, reason);
        say(&table::layer(&report, layer, first_row))?;
    }
    drop(progress);
    report.finish();
    if let Some(before) = &before {
        let comparison = Comparison::of(&report, before, args.tolerance);
        say(&comparison.lines())?;
        report.errors.extend(comparison.failure());
    }
    say(&table::footer(&report))?;
    if let Some(json) = json {
        json.write(|file| report.write_json(file))?;
    }
    if let Some(csv) = csv {
        csv.write(|file| csv::write(&report, file))?;
    }
    Ok(report.exit_status())
}

/// Writes a page of results, or their plots.
fn page(args: &Args, paths: &[PathBuf]) -> Result<(), Failure> {
    let named = |path: &PathBuf| Ok(Named::new(path, result(path)?));
    let results = paths.iter().map(named).collect::<Result<Vec<_>, Failure>>()?;
    let write =
        |path: &Path, text: &str| Output::create(path)?.write(|mut file| file.write_all(text.as_bytes()));
    if let Some(folder) = &args.svg {
        std::fs::create_dir_all(folder).map_err(|source| Failure::write(folder, source))?;
        for (name, svg) in page::plots(&results) {
            write(&folder.join(name), &svg)?;
        }
    }
    match (&args.page, &args.svg) {
        (Some(path), _) => write(path, &page::page(&results)),
        (None, Some(_)) => Ok(()),
        (None, None) => say(&page::page(&results)),
    }
}

/// A result of `-J`.
fn result(path: &Path) -> Result<Report, Failure> {
    baseline::read(path).map_err(|source| Failure::read(path, source))
}

/// A file to be written when all is done.
struct Output<'a> {
    path: &'a Path,
    file: File,
}

impl<'a> Output<'a> {
    fn create(path: &'a Path) -> Result<Self, Failure> {
        match File::create(path) {
            Ok(file) => Ok(Output { path, file }),
            Err(source) => Err(Failure::write(path, source)),
        }
    }

    fn write(self, write: impl FnOnce(File) -> io::Result<()>) -> Result<(), Failure> {
        write(self.file).map_err(|source| Failure::write(self.path, source))
    }
}

fn say(text: &str) -> Result<(), Failure> {
    progress::instead(|| {
        let mut out = io::stdout().lock();
        out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(Failure::Output)
    })
}
