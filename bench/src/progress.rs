//! What is measured right now, on one line of the terminal that standard error is. Silent where it is none.
//!
//! A thread of its own draws the line a few times a second; measuring threads only store how far they are, where they read
//! the clock anyway.

use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::running;

/// Between two drawings.
const TICK: Duration = Duration::from_millis(200);

/// How long the end waits for the drawing thread: a terminal that takes nothing blocks it.
const PATIENCE: Duration = Duration::from_secs(1);

/// Columns of a terminal that does not say how many it has.
const COLUMNS: usize = 80;

/// Takes the cursor to the line's begin and clears the line.
const CLEAR: &str = "\r\x1b[K";

static STATE: Mutex<State> = Mutex::new(State { now: None, begun: 0, drawn: false });

struct State {
    now: Option<Now>,
    /// Measurements so far.
    begun: u64,
    /// Whether the line is on the screen.
    drawn: bool,
}

struct Now {
    name: String,
    began: Instant,
    done: Arc<AtomicU64>,
    /// How many were done at the last drawing, and when that was.
    last: (u64, Instant),
}

/// A measurement begins. It stores in what it gets here how many of its iterations are done.
pub fn begin(name: &str) -> Arc<AtomicU64> {
    let (done, now) = (Arc::new(AtomicU64::new(0)), Instant::now());
    let mut state = state();
    state.begun += 1;
    state.now = Some(Now { name: name.into(), began: now, done: done.clone(), last: (0, now) });
    done
}

/// What [`begin`] returned last, for a thread that serves a kernel.
pub fn current() -> Arc<AtomicU64> {
    state().now.as_ref().map(|now| now.done.clone()).unwrap_or_default()
}

/// Writes something else to the terminal, in place of the line.
pub fn instead<T>(write: impl FnOnce() -> T) -> T {
    let mut state = state();
    if std::mem::take(&mut state.drawn) {
        draw(CLEAR);
    }
    write()
}

/// Draws until it is dropped.
pub struct Progress {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Progress {
    /// Begins to draw if standard error is a terminal that can clear a line.
    pub fn start() -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
        let thread = (io::stderr().is_terminal() && !dumb).then(|| {
            let stop = stop.clone();
            std::thread::spawn(move || {
                while !stop.load(Ordering::Acquire) {
                    std::thread::park_timeout(TICK);
                    tick(&stop);
                }
            })
        });
        Progress { stop, thread }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        self.stop.store(true, Ordering::Release);
        thread.thread().unpark();
        let began = Instant::now();
        while !thread.is_finished() && began.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(1));
        }
        if thread.is_finished() {
            instead(|| ());
        }
    }
}

fn tick(stop: &AtomicBool) {
    let mut state = state();
    let begun = state.begun;
    if stop.load(Ordering::Acquire) {
        return;
    }
    let Some(now) = &mut state.now else { return };
    let columns = rustix::termios::tcgetwinsize(io::stderr()).map_or(0, |size| usize::from(size.ws_col));
    // The last column stays free: a terminal may go to the next line when it is written.
    let columns = if columns == 0 { COLUMNS } else { columns } - 1;
    let text = line(now, begun, running::completions(), Instant::now(), columns);
    draw(&format!("{CLEAR}{text}"));
    state.drawn = true;
}

/// The layer, the test and its size, which are its name; how many iterations are done, and how many a second. A kernel does
/// not tell how far it is: what engines have completed for it stands there instead. Where there is no room for all, the name is cut.
fn line(now: &mut Now, begun: u64, by_engines: u64, at: Instant, columns: usize) -> String {
    let Now { name, began, done, last } = now;
    let count = match done.load(Ordering::Relaxed) {
        0 => by_engines,
        count => count,
    };
    let before = *last;
    *last = (count, at);
    let mut end = format!(": {:.1} s", at.duration_since(*began).as_secs_f64());
    if count > 0 {
        let pace =
            count.saturating_sub(before.0) as f64 / at.duration_since(before.1).as_secs_f64().max(1e-9);
        end += &format!(", {count} done, {}", per_second(pace));
    }
    let begin = format!("[{begun}] {name}");
    let room = columns.saturating_sub(end.len());
    let begin: String = match begin.char_indices().nth(room) {
        None => begin,
        Some(_) => begin.chars().take(room.saturating_sub(1)).chain(['…']).collect(),
    };
    (begin + &end).chars().take(columns).collect()
}

fn per_second(pace: f64) -> String {
    match pace {
        1e6.. => format!("{:.2} M/s", pace / 1e6),
        1e3.. => format!("{:.2} k/s", pace / 1e3),
        _ => format!("{pace:.0} /s"),
    }
}

fn draw(text: &str) {
    // A terminal that went away is no reason to end a measurement.
    let _ = io::stderr().write_all(text.as_bytes());
}

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_says_what_is_measured_how_much_is_done_and_how_fast() {
        let began = Instant::now();
        let done = Arc::new(AtomicU64::new(0));
        let mut now =
            Now { name: "put latency, 64 bytes".into(), began, done: done.clone(), last: (0, began) };
        let at = |ms| began + Duration::from_millis(ms);
        assert_eq!(line(&mut now, 1, 0, at(100), 79), "[1] put latency, 64 bytes: 0.1 s");
        assert_eq!(line(&mut now, 1, 7, at(100), 79).split(", ").nth(2), Some("7 done"), "by engines");
        now.last = (0, began + Duration::from_millis(100));
        done.store(5_000, Ordering::Relaxed);
        assert_eq!(
            line(&mut now, 1, 0, at(200), 79),
            "[1] put latency, 64 bytes: 0.2 s, 5000 done, 50.00 k/s"
        );
        done.store(405_000, Ordering::Relaxed);
        assert_eq!(
            line(&mut now, 1, 0, at(400), 79),
            "[1] put latency, 64 bytes: 0.4 s, 405000 done, 2.00 M/s"
        );
        assert_eq!(line(&mut now, 1, 0, at(400), 40), "[1] put laten…: 0.4 s, 405000 done, 0 /s");
        assert_eq!(line(&mut now, 1, 0, at(400), 3).chars().count(), 3);
    }
}
