//! The conformance suite with both ends in this process, each with a transport and a mapping of its own.

use portway_proxy::TransportError;
use portway_proxy::conformance::{self, CHECKS, End, Failing, Fixture, Pair};
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
