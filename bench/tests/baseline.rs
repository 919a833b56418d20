//! `--baseline`: an equal result holds, a planted slower one fails with both numbers.

mod support;

use std::path::{Path, PathBuf};

use serde_json::Value;
use support::{bench, file, json, text};

const SMALL: &str = "proxy -n 300 -w 20 -N 1 -T 30 -D 1 --producers 1 --channels 1 --drain 32 --rate 0.05";

/// A result of this machine, changed, as a baseline.
fn baseline(name: &str, change: impl FnOnce(&mut Value)) -> PathBuf {
    let path = file(name);
    let output = bench(&format!("{SMALL} -J {}", path.display()));
    assert_eq!(output.status.code(), Some(0), "{}", text(&output));
    let mut result = json(&path);
    change(&mut result);
    std::fs::write(&path, result.to_string()).unwrap();
    path
}

/// Times of every row, divided by this, and rates multiplied.
fn faster(result: &mut Value, factor: f64) {
    for row in result["results"].as_array_mut().unwrap() {
        if let Some(p50) = row["time_us"]["p50"].as_f64() {
            row["time_us"]["p50"] = (p50 / factor).into();
        }
        if let Some(proc) = row["rate_mops"]["proc"]["median"].as_f64() {
            row["rate_mops"]["proc"]["median"] = (proc * factor).into();
        }
    }
}

fn compare(path: &Path, tolerance: f64) -> (Option<i32>, String) {
    let output = bench(&format!("{SMALL} --baseline {} --tolerance {tolerance}", path.display()));
    (output.status.code(), text(&output))
}

#[test]
fn a_result_no_slower_than_its_baseline_exits_0() {
    // A machine with other work on it may be some times slower from one run to the next; not a thousand times.
    let path = baseline("baseline-equal.json", |result| faster(result, 0.01));
    let (code, printed) = compare(&path, 999.0);
    assert_eq!(code, Some(0), "{printed}");
    assert!(printed.contains("# baseline: 2 numbers compared, 0 slower"), "{printed}");
    assert!(!printed.contains("# baseline: warning"), "{printed}");
}

/// The control.
#[test]
fn a_slower_result_exits_1_with_both_numbers() {
    let path = baseline("baseline-slower.json", |result| faster(result, 1e6));
    let (code, printed) = compare(&path, 999.0);
    assert_eq!(code, Some(1), "{printed}");
    let slower: Vec<_> = printed.lines().filter(|line| line.starts_with("# baseline: SLOWER: ")).collect();
    assert_eq!(slower.len(), 2, "{printed}");
    for (line, words) in slower.iter().zip(["proxy throughput", "proxy push-flush"]) {
        assert!(line.contains(words) && line.contains(" was ") && line.contains(", is "), "{line}");
    }
    assert!(printed.contains("2 of 2 numbers are slower than allowed"), "{printed}");
}

#[test]
fn rows_that_one_side_lacks_and_another_driver_are_told() {
    let path = baseline("baseline-other.json", |result| {
        result["results"].as_array_mut().unwrap()[0]["shape"]["drain"] = 7.into();
        result["machine"]["driver"] = "1.2.3".into();
        faster(result, 0.01);
    });
    let (code, printed) = compare(&path, 999.0);
    assert_eq!(code, Some(0), "{printed}");
    assert!(printed.contains("only in the baseline: proxy throughput channels=1 drain=7"), "{printed}");
    assert!(printed.contains("only in this result: proxy throughput channels=1 drain=32"), "{printed}");
    assert!(printed.contains("warning: another driver: was \"1.2.3\""), "{printed}");
}

#[test]
fn what_cannot_be_compared_is_no_success() {
    let nothing = baseline("baseline-nothing.json", |result| result["results"] = Value::Array(vec![]));
    let (code, printed) = compare(&nothing, 10.0);
    assert!(code == Some(1) && printed.contains("nothing was compared"), "{printed}");
    for (name, content, words) in [
        ("baseline-later.json", r#"{"schema": 2}"#, "its schema is 2"),
        ("baseline-text.json", "no JSON", "not a result"),
        ("baseline-half.json", r#"{"schema": 1}"#, "not a result: missing field"),
    ] {
        let path = file(name);
        std::fs::write(&path, content).unwrap();
        let (code, printed) = compare(&path, 10.0);
        assert!(code == Some(1) && printed.contains(words) && printed.contains(name), "{printed}");
    }
}
