//! `report`: the page of real results in a real browser, Chromium without a window.
//!
//! Waived where there is none, unless `PORTWAY_REQUIRE_BROWSER` is set. `PORTWAY_PAGE_FOLDER` keeps what was looked at.

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use support::{bench, json, text};

const DEADLINE: Duration = Duration::from_secs(120);

fn folder() -> PathBuf {
    let folder = std::env::var_os("PORTWAY_PAGE_FOLDER").map(PathBuf::from);
    let folder = folder.unwrap_or_else(|| support::file("page"));
    std::fs::create_dir_all(&folder).unwrap();
    folder.canonicalize().unwrap()
}

/// A browser on this machine.
fn browser() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let names = ["chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"];
    let found = std::env::split_paths(&path).flat_map(|dir| names.map(|name| dir.join(name)));
    found.into_iter().find(|file| file.is_file())
}

/// What a browser made of a page.
struct Seen {
    dom: String,
    /// What the page wrote to its console.
    console: Vec<String>,
    /// What it asked the network for.
    requests: Vec<String>,
}

/// Loads a page, with the network cut off, and takes a picture of it.
fn look(browser: &Path, page: &Path, dark: bool) -> Seen {
    let name = format!("{}{}", page.file_stem().unwrap().to_str().unwrap(), if dark { "-dark" } else { "" });
    let folder = page.parent().unwrap();
    let (log, profile) = (folder.join(format!("{name}-net.json")), folder.join(format!("{name}-profile")));
    let run = |action: String| {
        let mut command = Command::new(browser);
        command.args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]);
        command.args(["--no-first-run", "--disable-background-networking", "--disable-component-update"]);
        command.args(["--hide-scrollbars", "--window-size=1440,3600", "--enable-logging=stderr"]);
        // Every name is refused, so that a request fails at once, and is in the log all the same.
        command.arg("--host-resolver-rules=MAP * ~NOTFOUND");
        command.arg(format!("--blink-settings=preferredColorScheme={}", if dark { 0 } else { 1 }));
        command.arg(format!("--log-net-log={}", log.display()));
        command.arg(format!("--user-data-dir={}", profile.display()));
        command.arg(action).arg(format!("file://{}", page.display()));
        output(command)
    };
    let picture = folder.join(format!("{name}.png"));
    run(format!("--screenshot={}", picture.display()));
    let png = std::fs::read(&picture).expect("a picture was taken");
    assert!(png.starts_with(b"\x89PNG"), "{} is no picture", picture.display());
    let (dom, errors) = run("--dump-dom".into());
    let console = errors.lines().filter(|line| line.contains(":CONSOLE")).map(str::to_owned).collect();
    let log = std::fs::read_to_string(&log).expect("a log of the network was written");
    // The log has the names of all it went to, as `"url":"http://..."`.
    let urls = log.split("\"url\":\"").skip(1).filter_map(|rest| rest.split('"').next());
    let requests = urls.filter(|url| url.starts_with("http")).map(str::to_owned).collect::<BTreeSet<_>>();
    let _ = std::fs::remove_dir_all(&profile);
    Seen { dom, console, requests: requests.into_iter().collect() }
}

/// What a program writes to standard output and to standard error, if it ends in time.
fn output(mut command: Command) -> (String, String) {
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let read = |mut from: Box<dyn std::io::Read + Send>| {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            from.read_to_end(&mut bytes).map(|_| String::from_utf8_lossy(&bytes).into_owned())
        })
    };
    let out = read(Box::new(child.stdout.take().unwrap()));
    let err = read(Box::new(child.stderr.take().unwrap()));
    let begin = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if begin.elapsed() > DEADLINE {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("waited {DEADLINE:?} for the browser to end");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    (out.join().unwrap().unwrap(), err.join().unwrap().unwrap())
}

/// How many points the plots of a kind must have of these results, by what the rows say: those of every line that has more
/// than one abscissa in all of them together.
fn points(results: &[Value], kind: &str) -> usize {
    let mut lines: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    let rows = results.iter().flat_map(|result| result["results"].as_array().unwrap());
    for row in rows.filter(|row| row["phase"] == "warm") {
        let mut shape = row["shape"].as_object().unwrap().clone();
        let offered = shape.remove("offered_kops").is_some();
        let (x, value) = match kind {
            "latency-size" => (row["size_bytes"].as_u64(), row["time_us"]["p50"].as_f64()),
            "bandwidth-size" => (row["size_bytes"].as_u64(), row["bandwidth_gb_per_s"].as_f64()),
            _ => {
                let producers = shape.remove("producers").and_then(|value| value.as_u64());
                (producers, row["rate_mops"]["proc"]["median"].as_f64())
            }
        };
        let value = value.filter(|value| *value > 0.0 && !offered);
        let (Some(x), Some(_)) = (x.filter(|x| *x > 0), value) else { continue };
        shape.remove("window");
        let size = if kind == "rate-producers" { row["size_bytes"].clone() } else { Value::Null };
        let line = format!("{} {} {} {shape:?} {size}", row["layer"], row["test"], row["subject"]);
        lines.entry(line).or_default().push(x);
    }
    let is_line = |xs: &&Vec<u64>| xs.iter().any(|x| *x != xs[0]);
    lines.values().filter(is_line).map(Vec::len).sum()
}

/// The points in the pictures of a kind, as the browser has them.
fn drawn(dom: &str, kind: &str) -> usize {
    let pictures = dom.split("<svg").filter(|svg| svg.contains(&format!("data-plot=\"{kind}-")));
    pictures.map(|svg| svg.split("</svg>").next().unwrap().matches("class=\"point\"").count()).sum()
}

#[test]
fn a_browser_shows_the_page_and_is_asked_for_nothing_else() {
    let Some(browser) = browser() else {
        assert!(std::env::var_os("PORTWAY_REQUIRE_BROWSER").is_none(), "there is no browser");
        // Not through `eprintln!`, which the test harness keeps to itself.
        let _ = writeln!(std::io::stderr(), "waived: a page of results in a browser: there is no Chromium");
        return;
    };
    let folder = folder();
    let results: Vec<PathBuf> = ["first.json", "second.json"].map(|name| folder.join(name)).into();
    for path in &results {
        // `ib` and `ipc` may find devices here, and are not what is looked at.
        let mut rows = Vec::new();
        let mut all = Value::Null;
        for layer in ["fifo", "proxy", "put"] {
            let sizes = if layer == "put" { "-e 32K" } else { "--producers 1,2,4" };
            let output =
                bench(&format!("{layer} -D 0.01 -N 2 -T 60 {sizes} --rate 0.05 -J {}", path.display()));
            assert_eq!(output.status.code(), Some(0), "{}", text(&output));
            all = json(path);
            rows.extend(all["results"].as_array().unwrap().clone());
        }
        all["results"] = rows.into();
        add_loads(&mut all);
        std::fs::write(path, all.to_string()).unwrap();
    }
    for count in [1, 2] {
        let page = folder.join(format!("page-{count}.html"));
        let names: Vec<_> = results[..count].iter().map(|path| path.display().to_string()).collect();
        let output = bench(&format!("report {} -o {}", names.join(" "), page.display()));
        assert_eq!(output.status.code(), Some(0), "{}", text(&output));
        for dark in [false, true] {
            let seen = look(&browser, &page, dark);
            assert_eq!(seen.console, [""; 0]);
            assert_eq!(seen.requests, [""; 0]);
            for kind in ["latency-size", "bandwidth-size", "rate-producers"] {
                let shown: Vec<_> = results[..count].iter().map(|path| json(path)).collect();
                let expected = points(&shown, kind);
                assert!(expected >= 3 * count, "{kind}: {expected}");
                assert_eq!(drawn(&seen.dom, kind), expected, "{kind}");
            }
            // Eight loads, each with a median and a 99th percentile, and a mark on either line.
            assert_eq!(drawn(&seen.dom, "latency-load"), 16 * count);
            assert_eq!(seen.dom.matches("class=\"knee\"").count(), 2 * count);
            assert!(seen.dom.matches("<table").count() >= 5, "a table below each plot");
        }
    }
}

/// Rows of an offered load with a knee at 40, as no layer here may have them.
fn add_loads(result: &mut Value) {
    let rows = result["results"].as_array_mut().unwrap();
    let mut row = rows.iter().find(|row| row["rate_mops"].is_object()).unwrap().clone();
    let times = rows.iter().find(|row| row["time_us"].is_object()).unwrap()["time_us"].clone();
    for load in 1..=8_u32 {
        let p50 = if load <= 4 { 2.0 + f64::from(load) / 10.0 } else { 2.0 * f64::from(load - 3).powi(2) };
        row["test"] = "made-up load".into();
        row["shape"] = serde_json::json!({ "offered_kops": load * 10_000 });
        row["time_us"] = times.clone();
        row["time_us"]["p50"] = p50.into();
        row["time_us"]["p99"] = (p50 * 1.6).into();
        row["rate_mops"]["proc"]["median"] = (f64::from(load) * 9.99).into();
        row["reference"] = Value::Null;
        rows.push(row.clone());
    }
}

/// The control: a page with what must not be on ours is caught.
#[test]
fn a_request_and_an_error_on_the_console_are_seen() {
    let Some(browser) = browser() else { return };
    let page = folder().join("control.html");
    let html = "<!doctype html><img src=\"http://127.0.0.1:9/picture.png\"><script>missing()</script>";
    std::fs::write(&page, html).unwrap();
    let seen = look(&browser, &page, false);
    assert!(seen.console.iter().any(|line| line.contains("missing is not defined")), "{:?}", seen.console);
    assert_eq!(seen.requests, ["http://127.0.0.1:9/picture.png"]);
}
