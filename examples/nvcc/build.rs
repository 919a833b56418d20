//! Compiles the kernel with make, if there is an nvcc (the variable NVCC names another one than in the path).

use std::env;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=kernel");
    println!("cargo::rerun-if-env-changed=NVCC");
    println!("cargo::rerun-if-env-changed=NVCC_FLAGS");
    println!("cargo::rustc-check-cfg=cfg(kernel)");
    let nvcc = env::var("NVCC").unwrap_or("nvcc".into());
    if Command::new(&nvcc).arg("--version").output().is_err() {
        println!("cargo::warning=no kernel: there is no {nvcc}");
        return;
    }
    // portway-fifo says where its device headers lie to whoever depends on it directly.
    let include = env::var("DEP_PORTWAY_INCLUDE").expect("the include folder of portway-fifo");
    let out = env::var("OUT_DIR").expect("cargo sets OUT_DIR");
    let made = Command::new("make")
        .args(["-C", "kernel"])
        .args([format!("NVCC={nvcc}"), format!("PORTWAY_INCLUDE={include}"), format!("OUT={out}")])
        .output()
        .expect("make starts");
    assert!(made.status.success(), "make: {}", String::from_utf8_lossy(&made.stderr));
    println!("cargo::rustc-cfg=kernel");
}
