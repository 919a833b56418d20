//! The program as a user calls it.
#![allow(dead_code, reason = "each test file uses its share")]

pub mod schema;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

/// The program, with no GPU, which would add rows.
pub fn command(line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_portway-bench"));
    command.env("CUDA_VISIBLE_DEVICES", "").args(line.split_whitespace());
    command
}

pub fn bench(line: &str) -> Output {
    command(line).output().unwrap()
}

pub fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// A file name of this test's own in the folder that cargo keeps for tests.
pub fn file(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name)
}

pub fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}
