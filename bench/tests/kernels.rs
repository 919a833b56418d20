//! The layers that have kernels, on two GPUs that the processor plays: what they measure, verify and write.

mod standin;
mod support;

use serde_json::Value;
use standin::Standin;
use support::schema::errors;
use support::{file, json, text};

/// The rows and controls of a layer that ran and held.
struct Ran {
    rows: Vec<Value>,
    controls: Vec<Value>,
    printed: String,
}

impl Ran {
    fn new(gpus: &Standin, name: &str, line: &str) -> Self {
        let path = file(name);
        let output = gpus.bench(&format!("{line} -J {}", path.display()));
        let printed = text(&output);
        assert_eq!(output.status.code(), Some(0), "{printed}");
        let json = json(&path);
        let schema = serde_json::from_str(include_str!("../schema/result-1.json")).unwrap();
        assert_eq!(errors(&schema, &json), [""; 0], "{printed}");
        let list = |key: &str| json[key].as_array().unwrap().clone();
        Ran { rows: list("results"), controls: list("controls"), printed }
    }

    fn rows<'a>(&'a self, test: &'a str, phase: &'a str) -> impl Iterator<Item = &'a Value> {
        self.rows.iter().filter(move |row| row["test"] == test && row["phase"] == phase)
    }

    /// As many rows of a test in each phase, the counted ones checked, and a control for the test that was found.
    fn has(&self, test: &str, phases: &[(&str, usize)]) {
        for phase in ["warm", "cold", "ramp"] {
            let expected = phases.iter().find(|(name, _)| *name == phase).map_or(0, |(_, count)| *count);
            assert_eq!(self.rows(test, phase).count(), expected, "{test} {phase}: {}", self.printed);
        }
        let controls: Vec<_> = self.controls.iter().filter(|control| control["test"] == test).collect();
        assert!(!controls.is_empty(), "no control of {test}: {}", self.printed);
        assert!(controls.iter().all(|control| control["found"] == control["corrupted"]), "{controls:?}");
    }
}

#[test]
fn ipc_has_every_phase_every_check_and_a_control_for_each_test() {
    let Some(gpus) = Standin::new("ipc") else { return };
    let line = "ipc -N 1 -n 300 -w 300 -D 0.01 -T 60 -s 64 --proxies 1 -H -U";
    let ran = Ran::new(&gpus, "kernels-ipc.json", line);
    let all = |count| [("warm", count), ("cold", count), ("ramp", count)];
    ran.has("latency", &all(2));
    ran.has("signal", &all(2));
    ran.has("bandwidth", &all(2));
    ran.has("messages", &[("warm", 2), ("ramp", 2)]);
    ran.has("all-pairs", &all(3));
    for row in ran.rows.iter().filter(|row| row["phase"] == "warm") {
        assert_eq!(row["wrong"], 0, "{row}");
    }
    for row in ran.rows("latency", "warm").chain(ran.rows("signal", "warm")) {
        assert_eq!(row["iterations"], 300, "{row}");
        assert_eq!(row["samples_us"].as_array().map(Vec::len), Some(300), "{row}");
        let counts = row["histogram"].as_array().unwrap().iter().map(|bin| bin["count"].as_u64().unwrap());
        assert_eq!(counts.sum::<u64>(), 300, "{row}");
    }
    for (phase, count) in [("cold", 1), ("ramp", 99)] {
        assert!(ran.rows("signal", phase).all(|row| row["iterations"] == count), "{}", ran.printed);
    }
    // Windows of 128 puts: one cold, one between, and as many as 300 puts take.
    for (phase, windows) in [("cold", 1), ("ramp", 1), ("warm", 3)] {
        let of_subject = |row: &Value| if row["subject"] == "both ways" { 2 } else { 1 };
        let right = |row: &Value| row["iterations"] == windows * 128 * of_subject(row);
        assert!(ran.rows("bandwidth", phase).all(right), "{phase}: {}", ran.printed);
    }
    for (phase, count) in [("ramp", 300), ("warm", 300)] {
        for row in ran.rows("messages", phase) {
            assert_eq!(row["iterations"], count, "{row}");
            let (push, proc) = (&row["rate_mops"]["push"]["median"], &row["rate_mops"]["proc"]["median"]);
            assert!(push.as_f64() > Some(0.0) && proc.as_f64() > Some(0.0), "{row}");
        }
    }
}

#[test]
fn a_gpu_that_is_not_there_is_named_at_once() {
    let Some(gpus) = Standin::new("devices") else { return };
    let output = gpus.bench("ipc --devices 0,7");
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    assert!(
        text(&output).contains("# error: --devices names GPU 7: this machine has 2"),
        "{}",
        text(&output)
    );
}

#[test]
fn without_the_check_ipc_calls_nothing_right() {
    let Some(gpus) = Standin::new("unchecked") else { return };
    let ran = Ran::new(&gpus, "kernels-unchecked.json", "ipc -N 1 -n 5 -w 0 -T 60 -s 8 --proxies 1 -c 0");
    assert!(!ran.rows.is_empty() && ran.controls.is_empty(), "{}", ran.printed);
    assert!(ran.rows.iter().all(|row| row["wrong"].is_null() && row["phase"] == "warm"), "{}", ran.printed);
}

#[test]
fn put_by_kernels_holds_and_a_difference_of_two_clocks_has_a_share_alone() {
    let Some(gpus) = Standin::new("put") else { return };
    let line = "put -N 1 -n 40 -w 10 -D 0.2 -T 60 -s 64 --rate 0.002 --stages";
    let ran = Ran::new(&gpus, "kernels-put.json", line);
    ran.has("gpu-latency", &[("warm", 1), ("cold", 1), ("ramp", 1)]);
    // One window is enough for those that do not count.
    ran.has("gpu-throughput", &[("warm", 1), ("cold", 1)]);
    ran.has("gpu-load", &[("warm", 1)]);
    ran.has("gpu-stages", &[("warm", 4)]);
    let row = |subject: &str| ran.rows("gpu-stages", "warm").find(|row| row["subject"] == subject).unwrap();
    let share = |subject: &str| row(subject)["share_percent"].as_f64().unwrap();
    let rest = "push to pop, post to seen";
    assert!((share(rest) + share("pop to post") - 100.0).abs() < 1e-6, "{}", ran.printed);
    assert!(row(rest)["time_us"].is_null() && row("whole")["time_us"].is_object(), "{}", ran.printed);
}

#[test]
fn fifo_by_kernels_holds() {
    let Some(gpus) = Standin::new("fifo") else { return };
    let line = "fifo -N 1 -n 300 -w 20 -D 0.1 -T 60 --producers 1 --depth 64 --batch 1 --ctas 2 --threads 1 --rate 0.002 --proxies 1";
    let ran = Ran::new(&gpus, "kernels-fifo.json", line);
    ran.has("gpu-throughput", &[("warm", 1)]);
    ran.has("gpu-push-sync", &[("warm", 1), ("cold", 1), ("ramp", 1)]);
    ran.has("gpu-load", &[("warm", 1)]);
    assert!(ran.rows.iter().filter(|row| row["phase"] == "warm").all(|row| row["wrong"] == 0));
}

#[test]
fn the_list_has_what_two_gpus_have() {
    let Some(gpus) = Standin::new("list") else { return };
    let list = text(&gpus.bench("list"));
    for test in ["gpu-throughput", "gpu-stages", "all-pairs"] {
        let line = list.lines().find(|line| line.trim_start().starts_with(test)).unwrap();
        assert!(line.contains(" yes "), "{list}");
    }
}
