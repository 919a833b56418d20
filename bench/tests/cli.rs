//! The program as a user calls it: what it prints, what it writes, how it exits.

mod support;

use serde_json::Value;
use support::{bench, file, json, text};

/// The smallest run with everything in it.
const SMALL: &str = "fifo -n 300 -w 20 -N 2 -D 1 -T 30 --producers 1,2 --depth 64 --batch 1,16 --rate 0.05";

/// Its rows. Two numbers of producers and two batches, each with those that do not count; three latencies, each in three
/// phases; a load.
const ROWS: usize = 4 * 2 + 3 * 3 + 1;

#[test]
fn a_run_that_holds_exits_0_and_says_so_in_text_and_json() {
    let path = file("holds.json");
    let output = bench(&format!("{SMALL} -J {}", path.display()));
    let printed = text(&output);
    assert_eq!(output.status.code(), Some(0), "{printed}");
    assert!(printed.contains("# wrong: 0 OK"), "{printed}");
    assert!(printed.contains("1 found wrong OK"), "the negative control: {printed}");

    let json = json(&path);
    let rows = json["results"].as_array().unwrap();
    let data = printed.lines().filter(|line| !line.starts_with('#')).count();
    assert_eq!((rows.len(), data), (ROWS, ROWS), "{printed}");
    let counted = |row: &&Value| row["phase"] == "warm";
    assert!(rows.iter().filter(counted).all(|row| row["wrong"] == 0), "{json}");
    for phase in ["cold", "ramp"] {
        let times = rows.iter().filter(|row| row["phase"] == phase && row["time_us"].is_object());
        assert_eq!(times.count(), 3, "{phase}: {json}");
    }
    assert_eq!(json["layers"][0]["status"], "ran");
    for row in rows.iter().filter(|row| row["test"] == "throughput") {
        assert!(row["rate_mops"]["proc"]["median"].as_f64().unwrap() > 0.0, "{row}");
    }
    for row in rows.iter().filter(counted).filter(|row| row["test"] == "throughput") {
        assert!(row["reference"]["ratio"]["median"].as_f64().unwrap() > 0.0, "{row}");
    }
}

#[test]
fn the_engine_and_the_whole_stack_hold_too() {
    for (line, rows) in [
        (
            "proxy -n 300 -w 20 -N 2 -D 1 -T 30 --producers 1,2 --channels 1,3 --drain 1,32 --rate 0.05",
            8 * 2 + 3 + 1,
        ),
        // A size that is no multiple of the one before is the last one all the same.
        // One window is enough for those that do not count, and it is the first.
        ("put -n 300 -w 20 -N 2 -D 1 -T 30 -b 8 -e 3K -f 16 --rate 0.05 --stages", 4 * 3 + 4 * 2 + 1 + 4 * 5),
        // Three shapes, each of eight parts cold and warm; the barrier in three phases; the rendezvous.
        ("clique -n 2 -N 2 -T 60", 3 * 8 * 2 + 3 + 1),
    ] {
        let output = bench(line);
        let printed = text(&output);
        assert_eq!(output.status.code(), Some(0), "{printed}");
        assert!(printed.contains("# wrong: 0 OK") && !printed.contains("FAILED"), "{printed}");
        assert!(printed.contains("negative control"), "{printed}");
        let data = printed.lines().filter(|line| !line.starts_with('#')).count();
        assert_eq!(data, rows, "{printed}");
    }
}

#[test]
fn without_the_check_nothing_is_called_right() {
    let path = file("unchecked.json");
    let output = bench(&format!("{SMALL} -c 0 -J {}", path.display()));
    assert_eq!(output.status.code(), Some(0), "{}", text(&output));
    let json = json(&path);
    assert!(json["results"].as_array().unwrap().iter().all(|row| row["wrong"].is_null()), "{json}");
    assert_eq!(json["controls"].as_array().unwrap().len(), 0);
}

#[test]
fn waived_layers_exit_0_and_say_why() {
    // Where there is an RDMA device, `ib` runs.
    let has_device = std::fs::read_dir("/sys/class/infiniband").is_ok_and(|mut dir| dir.next().is_some());
    for layer in ["ib", "ipc"].into_iter().skip(has_device.into()) {
        let output = bench(layer);
        let printed = text(&output);
        assert_eq!(output.status.code(), Some(0), "{printed}");
        assert!(printed.contains(&format!("# {layer}: waived: ")), "{printed}");
    }
}

#[test]
fn what_cannot_be_done_is_named() {
    for (line, code, named) in [
        ("fifo --depth 65", 2, "65"),
        ("nothing", 2, "nothing"),
        ("ib --drain 4", 2, "--drain"),
        ("fifo -q 4", 2, "`fifo` does not use -q"),
        ("ib -d one,two,three", 2, "-d names 3 devices"),
        ("fifo -U", 2, "-J <FILE>"),
        ("proxy --ctas 4", 2, "`proxy` does not use --ctas"),
        ("ib --stages", 2, "`ib` does not use --stages"),
        ("ib -t 64 -l 65", 2, "-l 65 is more than -t 64"),
        ("ib -J /nonexistent/folder/file", 1, "/nonexistent/folder/file"),
        ("ib --csv /nonexistent/folder/file", 1, "/nonexistent/folder/file"),
        ("ib --baseline /nonexistent/file", 1, "cannot read /nonexistent/file"),
    ] {
        let output = bench(line);
        assert_eq!(output.status.code(), Some(code), "{line}: {}", text(&output));
        assert!(text(&output).contains(named), "{line}: {}", text(&output));
    }
}

#[test]
fn a_measurement_that_cannot_end_fails_by_name_at_its_deadline() {
    // More triggers than a second suffices for.
    let output = bench("fifo -n 4000000000 -N 1 -D 100 -T 1 --producers 1 --depth 64 --batch 1");
    let printed = text(&output);
    assert_eq!(output.status.code(), Some(1), "{printed}");
    assert!(printed.contains("fifo: FAILED: ") && printed.contains("waited 1s for "), "{printed}");
}

#[test]
fn csv_has_a_line_for_each_row_and_each_waived_layer() {
    let path = file("rows.csv");
    let output = bench(&format!("{SMALL} --csv {}", path.display()));
    assert_eq!(output.status.code(), Some(0), "{}", text(&output));
    let mut reader = csv::Reader::from_path(&path).unwrap();
    let names = reader.headers().unwrap().clone();
    let rows: Vec<_> = reader.records().collect::<Result<_, _>>().unwrap();
    assert_eq!(rows.len(), ROWS);
    let cell =
        |row: &csv::StringRecord, name: &str| row[names.iter().position(|n| n == name).unwrap()].to_owned();
    for row in &rows {
        assert_eq!(
            (cell(row, "layer"), cell(row, "status"), cell(row, "wrong")),
            (
                "fifo".into(),
                "ran".into(),
                if cell(row, "phase") == "warm" { "0".into() } else { String::new() }
            )
        );
        let p50 = cell(row, "t_p50_us").parse::<f64>();
        let rate = cell(row, "proc_mops").parse::<f64>();
        assert!(p50.is_ok() || rate.is_ok(), "{row:?}");
    }
    let output = bench(&format!("ipc --csv {}", path.display()));
    assert_eq!(output.status.code(), Some(0), "{}", text(&output));
    let written = std::fs::read_to_string(&path).unwrap();
    assert!(written.lines().nth(1).unwrap().contains(",waived,ipc,"), "{written}");
}

#[test]
fn a_required_layer_that_is_waived_fails() {
    let output = bench("ipc --require");
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    assert!(text(&output).contains("# error: ipc: required, but "), "{}", text(&output));
}

#[test]
fn every_row_that_this_machine_makes_is_a_measurement_of_the_list_that_it_has() {
    let list = bench("list");
    assert!(list.status.success(), "{}", text(&list));
    let list = text(&list);
    // Lines of measurements are further in than those of layers.
    let mut here = Vec::new();
    let mut layer = "";
    for line in list.lines().filter(|line| !line.starts_with('#')) {
        let (name, here_or_not) = (line[2..35].trim_end(), line[35..].split_whitespace().next().unwrap());
        match name.strip_prefix("  ") {
            None => layer = name,
            Some(test) if here_or_not == "yes" => here.push((layer.to_owned(), test.to_owned())),
            Some(_) => {}
        }
    }
    let path = file("listed.json");
    let output = bench(&format!(
        "-n 300 -w 20 -N 1 -T 60 -D 0.1 -s 8 --depth 64 --batch 1 --rate 0.05 --stages -J {}",
        path.display()
    ));
    assert_eq!(output.status.code(), Some(0), "{}", text(&output));
    let rows = json(&path)["results"].as_array().unwrap().clone();
    let mut made: Vec<_> = rows
        .iter()
        .map(|row| (row["layer"].as_str().unwrap().to_owned(), row["test"].as_str().unwrap().to_owned()))
        .collect();
    made.dedup();
    assert!(!made.is_empty());
    assert!(made.iter().all(|row| here.contains(row)), "{made:?} beside {here:?}");
    assert!(here.iter().all(|row| made.contains(row)), "{here:?} beside {made:?}");

    // The check of every measurement has been tried by a corruption.
    let json = json(&path);
    let controls = json["controls"].as_array().unwrap();
    for row in rows.iter().filter(|row| row["phase"] == "warm" && !row["wrong"].is_null()) {
        let tried = |control: &&Value| control["layer"] == row["layer"] && control["test"] == row["test"];
        assert!(controls.iter().any(|control| tried(&control)), "no control for {row}");
    }
    // And every measurement of these layers is checked.
    for row in rows.iter().filter(|row| row["phase"] == "warm" && row["layer"] != "clique") {
        let is_a_stage = row["test"] == "stages" && row["subject"] != "whole";
        assert!(is_a_stage || row["wrong"] == 0, "{row}");
    }
}
