//! The run-time compiler, where NVRTC is installed; a device is not needed. Where it is not, each test prints `waived:`
//! and passes.
#![cfg(all(feature = "cuda", not(loom)))]

use std::io::Write;

use portway_fifo::Error;
use portway_fifo::cuda::nvrtc::Compiler;

fn compiler(test: &str) -> Option<Compiler> {
    match Compiler::load() {
        Ok(compiler) => Some(compiler),
        Err(lacking @ Error::NoLibrary { .. }) => {
            // Not through `eprintln!`, which the test harness keeps to itself.
            let _ = writeln!(std::io::stderr(), "waived: {test}: no NVRTC ({lacking})");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn the_device_headers_compile() {
    let Some(compiler) = compiler("the_device_headers_compile") else { return };
    assert!(compiler.version() >= (12, 0));
    for capability in [(8, 0), (9, 0)] {
        let source = include_str!("cuda_device/kernels.cu");
        let cubin = compiler.compile("kernels.cu", source, capability, &["--define-macro=UNUSED"]).unwrap();
        assert!(cubin.starts_with(b"\x7fELF"));
        let kernels = ["push_scalar", "push_warps", "push_batches", "push_until_it_fails", "stay"];
        for kernel in kernels {
            let name = format!("\0{kernel}\0");
            let found = cubin.windows(name.len()).any(|window| window == name.as_bytes());
            assert!(found, "no {kernel} for {capability:?}");
        }
    }
}

#[test]
fn what_does_not_compile_comes_with_the_compilers_messages() {
    let Some(compiler) = compiler("what_does_not_compile_comes_with_the_compilers_messages") else { return };
    let compile =
        |source, options: &[&str]| compiler.compile("wrong.cu", source, (9, 0), options).unwrap_err();
    let Error::Compile { log } = compile("#include \"portway/fifo.cuh\"\nint f() { return x; }", &[]) else {
        panic!()
    };
    assert!(log.contains("wrong.cu(2)") && log.contains("\"x\" is undefined"), "{log}");
    // An instruction that does not exist: the assembler is run as well.
    let bad = "__global__ void f() { asm volatile(\"st.bogus;\"); }";
    assert!(matches!(compile(bad, &[]), Error::Compile { .. } | Error::Driver { .. }));
    assert!(matches!(
        compile("", &["--no-such-option"]),
        Error::Driver { call: "nvrtcCompileProgram", status: 5, .. }
    ));
    assert!(matches!(compile("a\0b", &[]), Error::Unsupported { .. }));
}
