//! The conformance suite with both ends in this process, each with a transport and a mapping of its own.

use portway_proxy::conformance::{self, CHECKS, End, Failing, Fixture, Pair};
use portway_proxy::{Transport, TransportError};
use shm_transport::Shm;

struct Ends {
    a: Shm,
    b: Shm,
}

fn end(shm: &Shm) -> End {
    let memory = shm.clone();
    End::new(shm.clone(), move |len_bytes| memory.allocate(len_bytes))
}

impl Fixture for Ends {
    fn pair(&self) -> Result<Pair, TransportError> {
        Ok(Pair { a: end(&self.a), b: end(&self.b) })
    }

    fn failing_pair(&self) -> Result<Failing, TransportError> {
        Ok(Failing::Pair(Pair { a: end(&self.a.failing_after(30)), b: end(&self.b) }))
    }
}

#[test]
fn both_ends_in_one_process() {
    let report = conformance::run(&Ends { a: Shm::new().unwrap(), b: Shm::new().unwrap() });
    println!("{report}");
    report.assert();
    assert_eq!((report.entries.len(), report.waived().count()), (CHECKS.len(), 0));
}

#[test]
fn an_export_that_claims_what_is_not_there_is_refused() {
    let (here, there) = (Shm::new().unwrap(), Shm::new().unwrap());
    let memory = there.register(&there.allocate(64).unwrap()).unwrap();
    let good = there.export(&memory).unwrap();
    assert_eq!(here.import(&good).unwrap().len_bytes, 64);
    for (what, at, number) in [
        ("more than the object", 32, 65u64),
        ("an offset behind it", 24, 1 << 40),
        ("an end beyond the address space", 24, u64::MAX),
        ("nothing", 32, 0),
    ] {
        let mut bytes = good.clone();
        bytes[at..at + 8].copy_from_slice(&number.to_le_bytes());
        match here.import(&bytes) {
            Err(TransportError::Malformed { .. }) => {}
            result => panic!("{what}: {result:?}"),
        }
    }
    // An object that nobody has made: the system's answer, with its number.
    let mut bytes = good;
    bytes[16..24].copy_from_slice(&1u64.to_le_bytes());
    match here.import(&bytes) {
        Err(TransportError::Device { operation: "shm_open of the peer's memory", status: 2, .. }) => {}
        result => panic!("{result:?}"),
    }
    // Memory of another allocator cannot be registered.
    let heap = portway_fifo::Heap.allocate(64).unwrap();
    assert!(matches!(here.register(&heap), Err(TransportError::Memory(_))));
}
