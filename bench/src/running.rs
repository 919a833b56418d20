//! The proxies that are running. SIGUSR1 has what each of them is doing printed to standard error.

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use portway_proxy::{Engine, Error, Proxy, Report, RunConfig, Stop};
use signal_hook::consts::SIGUSR1;
use signal_hook::iterator::Signals;

use crate::progress;

type Slot = Mutex<Option<Proxy>>;

static ALL: Mutex<Vec<Weak<Slot>>> = Mutex::new(Vec::new());

/// A proxy that is found by [`report`] until it is stopped.
pub struct Running(Arc<Slot>);

impl Running {
    pub fn start(engine: Engine, config: RunConfig) -> Result<Self, Error> {
        let slot = Arc::new(Mutex::new(Some(Proxy::start(engine, config)?)));
        let mut all = lock(&ALL);
        all.retain(|other| other.strong_count() > 0);
        all.push(Arc::downgrade(&slot));
        Ok(Running(slot))
    }

    /// Stops it. None if it was stopped before.
    pub fn stop(self, how: Stop) -> Option<Report> {
        let proxy = lock(&self.0).take();
        proxy.map(|proxy| proxy.stop(how))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn all() -> Vec<Arc<Slot>> {
    lock(&ALL).iter().filter_map(Weak::upgrade).collect()
}

/// Ops that the running proxies have completed.
pub fn completions() -> u64 {
    let completions = |slot: &Arc<Slot>| lock(slot).as_ref().map_or(0, |proxy| proxy.stats().completions);
    all().iter().map(completions).sum()
}

/// Reports at each SIGUSR1 from now on, on a thread of its own: the signal's handler does no more than to wake it.
pub fn report_at_signals() -> io::Result<()> {
    let mut signals = Signals::new([SIGUSR1])?;
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        for _ in signals.forever() {
            let text = report();
            // Whoever closed standard error does not want to know.
            progress::instead(|| drop(io::stderr().write_all(text.as_bytes())));
        }
    })?;
    Ok(())
}

/// What the running proxies are doing.
fn report() -> String {
    let reports: Vec<_> =
        all().iter().filter_map(|slot| lock(slot).as_ref().map(|proxy| proxy.report().to_string())).collect();
    let mut text = format!("# SIGUSR1: {} proxies are running\n", reports.len());
    for (n, report) in reports.iter().enumerate() {
        let _ = writeln!(text, "# proxy {n}");
        for line in report.lines() {
            let _ = writeln!(text, "#   {line}");
        }
    }
    text
}
