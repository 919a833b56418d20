//! Two GPUs of the processor's own: a stand-in driver whose kernels run, and a stand-in compiler that compiles the bench's
//! kernels, as they are, with the C++ compiler of the machine. A thread plays a block. So the whole way is run, host and
//! kernels, except for what only a GPU has: many threads in a block, and time.
//!
//! Without compilers the tests print `waived:`; `PORTWAY_REQUIRE_CXX=1` makes that a failure.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;

use crate::support::{command, file};

/// The texts of the stand-in driver, in their order. What is replaced by functions whose kernels run has another name there.
const DRIVER: [(&str, &str); 8] = [
    ("renamed.c", RENAMED),
    ("calls.c", include_str!("../../../fifo/tests/libcuda/calls.c")),
    ("objects.c", include_str!("../../../fifo/tests/libcuda/objects.c")),
    ("devices.c", include_str!("../../../fifo/tests/libcuda/devices.c")),
    ("memory.c", include_str!("../../../fifo/tests/libcuda/memory.c")),
    ("streams.c", include_str!("../../../fifo/tests/libcuda/streams.c")),
    ("again.c", AGAIN),
    ("kernels.c", include_str!("kernels.c")),
];

const RENAMED: &str = "
#define cuModuleLoadData pretended_cuModuleLoadData
#define cuModuleGetFunction pretended_cuModuleGetFunction
#define cuLaunchKernel pretended_cuLaunchKernel
#define cuStreamQuery pretended_cuStreamQuery
";

const AGAIN: &str = "
#undef cuModuleLoadData
#undef cuModuleGetFunction
#undef cuLaunchKernel
#undef cuStreamQuery
";

/// The folder with both libraries.
pub struct Standin(&'static Path);

impl Standin {
    /// Builds both, once for all tests. None, and a line that says so, without compilers.
    pub fn new(test: &str) -> Option<Self> {
        for compiler in [cc(), cxx()] {
            let found = Command::new(&compiler).arg("--version").stdout(Stdio::null()).status();
            if found.is_err() {
                let required = std::env::var_os("PORTWAY_REQUIRE_CXX").is_some_and(|it| it == "1");
                assert!(!required, "there is no {compiler}");
                // Not through `eprintln!`, which the test harness keeps to itself.
                let _ = writeln!(std::io::stderr(), "waived: {test}: there is no {compiler}");
                return None;
            }
        }
        static FOLDER: OnceLock<PathBuf> = OnceLock::new();
        Some(Standin(FOLDER.get_or_init(build_both)))
    }

    /// The bench, on a machine with these GPUs.
    pub fn bench(&self, line: &str) -> Output {
        let mut command = command(line);
        command.env("LD_LIBRARY_PATH", self.0).env_remove("CUDA_VISIBLE_DEVICES");
        command.output().unwrap()
    }
}

fn build_both() -> PathBuf {
    let folder = file("standin");
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    let driver: String = DRIVER.iter().map(|(name, text)| format!("#line 1 \"{name}\"\n{text}\n")).collect();
    build(&cc(), "-x c -O1 -w -fvisibility=hidden", &driver, &folder.join("libcuda.so.1"));
    let compiler = include_str!("nvrtc.cpp");
    let flags = "-x c++ -std=c++17 -O1 -Wall -Wextra -fvisibility=hidden";
    build(&cxx(), flags, compiler, &folder.join("libnvrtc.so.13"));
    std::fs::write(folder.join("kernels.hpp"), include_str!("kernels.hpp")).unwrap();
    folder
}

fn cc() -> String {
    std::env::var("CC").unwrap_or_else(|_| "cc".into())
}

fn cxx() -> String {
    std::env::var("CXX").unwrap_or_else(|_| "c++".into())
}

fn build(compiler: &str, flags: &str, text: &str, library: &Path) {
    let mut child = Command::new(compiler)
        .args(flags.split(' '))
        .args(["-shared", "-fPIC", "-pthread", "-", "-o"])
        .arg(library)
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    assert!(child.wait().unwrap().success(), "{} does not compile", library.display());
}
