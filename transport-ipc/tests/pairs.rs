//! All pairs of four and of eight devices at once, over a driver in software.

#[path = "../../fifo/tests/libcuda/mod.rs"]
mod libcuda;
#[path = "support/pairs.rs"]
mod pairs;

use libcuda::Standin;
use portway_fifo::cuda::{Context, Driver};

fn contexts(devices: u32) -> (Standin, Vec<Context>) {
    let standin = Standin::new();
    standin.set("devices", devices.into());
    let driver = Driver::open(standin.path()).unwrap();
    let contexts = (0..devices).map(|ordinal| Context::new(&driver, ordinal).unwrap()).collect();
    (standin, contexts)
}

#[test]
fn every_pair_of_many_devices_has_what_was_meant_for_it() {
    for devices in [2, 4, 8] {
        let (_standin, contexts) = contexts(devices);
        assert_eq!(pairs::all_at_once(&contexts, |_, _, _| ()), [""; 0], "{devices} devices");
    }
    // Control: a flipped byte of one pair is found in each round, and nowhere else.
    let (_standin, contexts) = contexts(4);
    let found = pairs::all_at_once(&contexts, |source, from, to| {
        if (from, to) == (3, 1) {
            let mut byte = [0];
            source.region.read(70_000, &mut byte).unwrap();
            source.region.write(70_000, &[byte[0] ^ 1]).unwrap();
        }
    });
    assert!(found.len() == 4 && found.iter().all(|text| text.starts_with("3 to 1")), "{found:?}");
}
