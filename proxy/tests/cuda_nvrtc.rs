//! The kernels of the device tests and of the example compile, where NVRTC is installed; a device is not needed. Where
//! it is not, this prints `waived:` and passes.

use std::io::Write;

use portway_fifo::Error;
use portway_fifo::cuda::nvrtc::Compiler;
use portway_proxy::header;

/// The text between the marks of the example's kernel.
fn kernel_of_the_example() -> &'static str {
    let program = include_str!("../examples/cuda_put.rs");
    let (_, rest) = program.split_once("KERNEL: &str = r#\"").unwrap();
    rest.split_once("\"#;").unwrap().0
}

#[test]
fn the_kernels_compile() {
    let compiler = match Compiler::load() {
        Ok(compiler) => compiler,
        Err(lacking @ Error::NoLibrary { .. }) => {
            // Not through `eprintln!`, which the test harness keeps to itself.
            let _ = writeln!(std::io::stderr(), "waived: the_kernels_compile: {lacking}");
            return;
        }
        Err(error) => panic!("{error}"),
    };
    for (name, kernels) in
        [("kernels.cu", include_str!("cuda_device/kernels.cu")), ("cuda_put.cu", kernel_of_the_example())]
    {
        let source = [header::PORT_CHANNEL, kernels].concat();
        for capability in [(8, 0), (9, 0)] {
            let cubin = compiler.compile(name, &source, capability, &[]).unwrap_or_else(|e| panic!("{e}"));
            assert!(cubin.starts_with(b"\x7fELF"));
            for line in kernels.lines().filter(|line| line.starts_with("extern \"C\" __global__")) {
                let kernel = line.split(['(', ' ']).nth(4).unwrap();
                let symbol = format!("\0{kernel}\0");
                let found = cubin.windows(symbol.len()).any(|window| window == symbol.as_bytes());
                assert!(found, "no {kernel} in {name} for {capability:?}");
            }
        }
    }
}
