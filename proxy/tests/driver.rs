//! Device memory is reached through the driver, which may block for as long as a kernel runs. So the engine's thread
//! never touches it, not when channels are added and not when a FIFO is reset.

mod support;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use portway_fifo::memory::{DmaBuf, IpcHandle, IpcKind, Memory, Segment};
use portway_fifo::{Error, Fifo, Heap, Platform, Region};
use portway_proxy::{Config, Engine, Idle, Proxy, RunConfig, Stop};
use support::LIMIT;
use support::deadline::{Gate, until, within};
use support::script::{Scripted, scripted_channel};

/// A platform whose device memory is reached by calls that stay in the driver while the gate is closed, and that
/// notes on which threads they come.
#[derive(Clone, Debug, Default)]
struct Driver {
    gate: Arc<Mutex<Gate>>,
    callers: Arc<Mutex<Vec<String>>>,
}

impl Driver {
    fn call(&self) {
        let name = std::thread::current().name().unwrap_or("unnamed").to_owned();
        self.callers.lock().unwrap_or_else(PoisonError::into_inner).push(name);
        let gate = self.gate.lock().unwrap_or_else(PoisonError::into_inner).clone();
        gate.pass();
    }

    /// From now on calls block until the returned gate opens.
    fn block(&self) -> Gate {
        let gate = Gate::default();
        *self.gate.lock().unwrap_or_else(PoisonError::into_inner) = gate.clone();
        gate
    }

    fn callers(&self) -> Vec<String> {
        self.callers.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

#[derive(Debug)]
struct Behind {
    region: Region,
    driver: Driver,
}

impl Memory for Behind {
    fn segments(&self, range: Segment) -> Result<Vec<Segment>, Error> {
        Ok(vec![range])
    }

    fn dma_buf(&self, _: Segment) -> Result<DmaBuf, Error> {
        Err(Error::Unsupported { what: "this memory as dma-buf" })
    }

    fn ipc_handle(&self, _: Segment, _: IpcKind) -> Result<IpcHandle, Error> {
        Err(Error::Unsupported { what: "this memory as IPC handle" })
    }

    fn read(&self, address: u64, into: &mut [u8]) -> Result<(), Error> {
        self.driver.call();
        self.region.read(address - self.region.address(), into)
    }

    fn write(&self, address: u64, from: &[u8]) -> Result<(), Error> {
        self.driver.call();
        self.region.write(address - self.region.address(), from)
    }
}

impl Platform for Driver {
    fn host_memory(&self, len_bytes: u64) -> Result<Region, Error> {
        Heap.host_memory(len_bytes)
    }

    fn device_memory(&self, len_bytes: u64) -> Result<Region, Error> {
        let region = Heap.device_memory(len_bytes)?;
        let (address, place) = (region.address(), region.place());
        let owner = Arc::new(Behind { region, driver: self.clone() });
        // SAFETY: the range is that of a heap region that `owner` holds, which is accessed atomically only.
        unsafe { Region::new(address, len_bytes, place, owner) }
    }
}

#[test]
fn the_engines_thread_makes_no_driver_call() {
    within(2 * LIMIT, "calls to a proxy beside a blocked driver", || {
        let driver = Driver::default();
        driver.block().open();
        let mut engine = Engine::new(&driver, Config::default()).unwrap();
        let mut add_fifo = || {
            let config = portway_fifo::Config { timeout: LIMIT, ..Default::default() };
            let (fifo, consumer) = Fifo::new(&driver, config).unwrap();
            (engine.add_fifo(fifo.clone(), consumer).unwrap(), fifo)
        };
        let ((first, _), (second, ring)) = (add_fifo(), add_fifo());
        let port = engine.add_port(Scripted::new().port()).unwrap();
        let working = engine.add_channel(scripted_channel(first, port, 64)).unwrap().producer().unwrap();
        let idle = Idle::Yield;
        let proxy = Arc::new(Proxy::start(engine, RunConfig { idle, ..RunConfig::default() }).unwrap());
        working.flush().unwrap();

        // The driver blocks whoever comes: one thread that adds a channel, then one that resets a FIFO. The proxy
        // serves the kernel in the meantime, so the kernel can end and the driver let go.
        let blocked = driver.block();
        let adding = {
            let proxy = proxy.clone();
            let config = scripted_channel(second, port, 64);
            std::thread::Builder::new()
                .name("adding".into())
                .spawn(move || proxy.add_channel(config))
                .unwrap()
        };
        until(LIMIT, "a caller in the driver", || blocked.inside() == 1, || blocked.inside());
        (0..100).for_each(|_| working.flush().unwrap());
        assert!(!adding.is_finished());
        blocked.open();
        let added = adding.join().unwrap().unwrap();

        ring.abort();
        until(LIMIT, "the end of the channel", || added.error().is_some(), || added.error());
        let blocked = driver.block();
        let resetting = {
            let proxy = proxy.clone();
            std::thread::Builder::new()
                .name("resetting".into())
                .spawn(move || proxy.reset_fifo(second))
                .unwrap()
        };
        until(LIMIT, "a caller in the driver", || blocked.inside() == 1, || blocked.inside());
        (0..100).for_each(|_| working.flush().unwrap());
        // One reset at a time, and no channel in the meantime.
        assert_eq!(
            proxy.reset_fifo(second).unwrap_err().to_string(),
            "FIFO 1 is in use by a reset: try again when that has returned"
        );
        assert!(!resetting.is_finished());
        blocked.open();
        resetting.join().unwrap().unwrap();
        let added = proxy.add_channel(scripted_channel(second, port, 64)).unwrap();
        added.producer().unwrap().flush().unwrap();

        let proxy = Arc::into_inner(proxy).unwrap();
        assert!(proxy.stop(Stop::Drain { within: LIMIT }).drained);
        let callers = driver.callers();
        assert!(
            callers.iter().any(|name| name == "adding") && callers.iter().any(|name| name == "resetting")
        );
        assert!(!callers.iter().any(|name| name == "portway-proxy"), "{callers:?}");
    });
}

/// The control: the same driver blocks an engine whose own thread adds the channel, and a kernel that needs the proxy
/// gets nowhere.
#[test]
fn a_driver_call_on_the_engines_thread_would_stop_it() {
    within(2 * LIMIT, "the control", || {
        let driver = Driver::default();
        driver.block().open();
        let mut engine = Engine::new(&driver, Config::default()).unwrap();
        let config = portway_fifo::Config { timeout: LIMIT, ..Default::default() };
        let (fifo, consumer) = Fifo::new(&driver, config).unwrap();
        let fifo = engine.add_fifo(fifo, consumer).unwrap();
        let port = engine.add_port(Scripted::new().port()).unwrap();
        let working = engine.add_channel(scripted_channel(fifo, port, 64)).unwrap().producer().unwrap();
        let blocked = driver.block();
        let stepping = std::thread::spawn(move || {
            let added = engine.add_channel(scripted_channel(fifo, port, 64)).map(drop);
            for step in 0..1_000 {
                engine.step(Duration::from_millis(step));
            }
            added
        });
        until(LIMIT, "the thread in the driver", || blocked.inside() == 1, || blocked.inside());
        let late = working.with_timeout(Duration::from_millis(200)).unwrap();
        assert!(late.flush().is_err());
        blocked.open();
        stepping.join().unwrap().unwrap();
    });
}
