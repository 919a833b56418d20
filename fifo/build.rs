//! Tells dependants where the device headers lie: `DEP_PORTWAY_INCLUDE` in their build scripts.

fn main() {
    let root = std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR");
    println!("cargo::metadata=include={root}/device");
    println!("cargo::rerun-if-changed=build.rs");
}
