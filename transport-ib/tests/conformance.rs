//! The port contract, held by the transport over RDMA devices in software.

mod support;

use portway_fifo::Heap;
use portway_proxy::TransportError;
use portway_proxy::conformance::{self, End, Failing, Fixture, Pair};
use portway_transport_ib::{Config, Ib, sys};
use support::fabric::{Make, World};

/// Two devices of one world; with requests that are carried out a few at a time, or many.
struct OverSoftware {
    config: Config,
    portion: usize,
    max_message_bytes: u32,
}

impl OverSoftware {
    fn world(&self) -> World {
        let make = |name| Make { name, max_message_bytes: self.max_message_bytes, ..Make::default() };
        let world = World::new(&[make("soft0"), make("soft1")]);
        world.set_portion(self.portion);
        world
    }

    fn end(&self, world: &World, name: &str) -> Result<End, TransportError> {
        let config = Config { device: Some(name.into()), ..self.config.clone() };
        let ib = Ib::open_with(&world.verbs(), config)?;
        Ok(End::new(ib, |len_bytes| Heap.allocate(len_bytes)))
    }
}

impl Fixture for OverSoftware {
    fn pair(&self) -> Result<Pair, TransportError> {
        let world = self.world();
        Ok(Pair { a: self.end(&world, "soft0")?, b: self.end(&world, "soft1")? })
    }

    fn failing_pair(&self) -> Result<Failing, TransportError> {
        let world = self.world();
        world.fail_after(20, sys::IBV_WC_RETRY_EXC_ERR);
        Ok(Failing::Pair(Pair { a: self.end(&world, "soft0")?, b: self.end(&world, "soft1")? }))
    }
}

#[test]
fn over_one_queue_pair() {
    let fixture = OverSoftware { config: Config::default(), portion: 64, max_message_bytes: 8 << 20 };
    conformance::run(&fixture).assert();
}

#[test]
fn over_three_short_queue_pairs_and_short_messages() {
    let config = Config { queue_pairs: 3, depth: 64, signal_every: 5, ..Config::default() };
    let fixture = OverSoftware { config, portion: 1, max_message_bytes: 4096 };
    conformance::run(&fixture).assert();
}
