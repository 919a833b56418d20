//! Bad input gets the typed error that names it, in every build profile, and nothing else happens.

use std::time::Duration;

use portway_fifo::memory::{IpcKind, Segment};
use portway_fifo::{
    Config, Error, Fifo, Heap, MAX_TIMEOUT, Place, Position, Region, Trigger, Watch, Words, layout,
};

const SLOTS: u64 = 64;

fn config() -> Config {
    Config { slots: SLOTS, timeout: Duration::ZERO, ..Config::default() }
}

/// Host and device memory for a ring of [`SLOTS`], each with a line to spare.
fn memories() -> (Region, Region) {
    let host = Heap.allocate(Fifo::host_len_bytes(SLOTS) + layout::LINE_BYTES).unwrap();
    (host, Heap.allocate(Fifo::DEVICE_LEN_BYTES + layout::LINE_BYTES).unwrap())
}

/// The same bytes, described as a device's.
fn on_device(region: &Region) -> Region {
    let (address, len_bytes) = (region.address(), region.len_bytes());
    // SAFETY: one allocation, which its owner, handed over here, keeps mapped; only its address ever left the heap.
    unsafe { Region::new(address, len_bytes, Place::Device(3), region.owner().clone()) }.unwrap()
}

fn in_memory(host: &Region, device: &Region) -> Result<(), Error> {
    Fifo::in_memory(host.clone(), device.clone(), config()).map(|_| ())
}

#[test]
fn ring_sizes() {
    for slots in [0, 1, 32, 63, 65, 100, (1 << 20) + 1, 1 << 21, 1 << 63, u64::MAX] {
        let result = Fifo::new(&Heap, Config { slots, ..config() });
        assert_eq!(result.err(), Some(Error::RingSize { slots }));
    }
    for slots in [64, 128, 1 << 20] {
        let (fifo, _) = Fifo::new(&Heap, Config { slots, ..config() }).unwrap();
        assert_eq!(fifo.slots(), slots);
    }
    // A size that no ring has makes a length that no memory has, and no panic.
    let len_bytes = Fifo::host_len_bytes(u64::MAX);
    assert!(
        matches!(Heap.allocate(len_bytes), Err(Error::Range { len_bytes: named, .. }) if named == len_bytes)
    );
}

#[test]
fn timeouts() {
    let (fifo, _consumer) = Fifo::new(&Heap, Config { timeout: MAX_TIMEOUT, ..config() }).unwrap();
    let producer = fifo.producer().unwrap();
    for timeout in [MAX_TIMEOUT + Duration::from_nanos(1), Duration::MAX] {
        let error = Error::TimeoutRange { timeout };
        assert_eq!(Fifo::new(&Heap, Config { timeout, ..config() }).err(), Some(error.clone()));
        assert_eq!(producer.with_timeout(timeout).err(), Some(error.clone()));
        let (words, _) = memories();
        let words = Words::new(words).unwrap();
        let watch = Watch::new((words.clone(), 0), (words.clone(), 1), (words, 16)).unwrap();
        assert_eq!(watch.wait("the word", Position(1), timeout), Err(error));
    }
    assert!(producer.with_timeout(Duration::ZERO).is_ok());
}

#[test]
fn memories_that_overlap() {
    let both = Heap.allocate(1 << 16).unwrap();
    let host_len_bytes = Fifo::host_len_bytes(SLOTS);
    let part = |offset_bytes, len_bytes| both.slice(offset_bytes, len_bytes).unwrap();
    let overlap = |host: &Region, device: &Region| Error::Overlap {
        a: "the FIFO's host memory",
        a_address: host.address(),
        b: "the FIFO's device memory",
        b_address: device.address(),
    };
    let host = part(4096, host_len_bytes);
    for device_at in [4096, 4096 + host_len_bytes - 128, 4096 - Fifo::DEVICE_LEN_BYTES + 128] {
        let device = part(device_at, Fifo::DEVICE_LEN_BYTES);
        assert_eq!(in_memory(&host, &device), Err(overlap(&host, &device)));
    }
    for device_at in [4096 + host_len_bytes, 4096 - Fifo::DEVICE_LEN_BYTES] {
        in_memory(&host, &part(device_at, Fifo::DEVICE_LEN_BYTES)).unwrap();
    }
}

#[test]
fn memories_that_are_misaligned() {
    let (host, device) = memories();
    for off in [1, 8, 64] {
        let shifted = |region: &Region| region.slice(off, region.len_bytes() - off).unwrap();
        let error = |what, region: &Region| Error::Alignment {
            what,
            address: region.address() + off,
            align_bytes: 128,
        };
        assert_eq!(in_memory(&shifted(&host), &device), Err(error("the FIFO's host memory", &host)));
        assert_eq!(in_memory(&host, &shifted(&device)), Err(error("the FIFO's device memory", &device)));
    }
    let odd = host.slice(4, 64).unwrap();
    let error = Error::Alignment { what: "memory as words", address: odd.address(), align_bytes: 8 };
    assert_eq!(Words::new(odd).err(), Some(error));
}

#[test]
fn memories_that_are_too_short() {
    let (host, device) = memories();
    let range = |what, len_bytes, region: &Region| Error::Range {
        what,
        offset_bytes: 0,
        len_bytes,
        address: region.address(),
        limit_bytes: region.len_bytes(),
    };
    let host_len_bytes = Fifo::host_len_bytes(SLOTS);
    let short = host.slice(0, host_len_bytes - 1).unwrap();
    assert_eq!(in_memory(&short, &device), Err(range("the FIFO's host memory", host_len_bytes, &short)));
    let short = device.slice(0, Fifo::DEVICE_LEN_BYTES - 1).unwrap();
    assert_eq!(
        in_memory(&host, &short),
        Err(range("the FIFO's device memory", Fifo::DEVICE_LEN_BYTES, &short))
    );
}

#[test]
fn memories_that_the_processor_does_not_reach() {
    let (host, device) = memories();
    let unreached =
        |region: &Region| Error::NotHostMemory { address: region.address(), place: Place::Device(3) };
    assert_eq!(in_memory(&on_device(&host), &device), Err(unreached(&host)));
    // The producers' words may lie there, but then only a kernel pushes.
    let (fifo, mut consumer) = Fifo::in_memory(host, on_device(&device), config()).unwrap();
    assert_eq!(fifo.producer().err(), Some(unreached(&device)));
    assert_eq!(fifo.handle().head, device.address());
    consumer.reset().unwrap();
}

#[test]
fn regions() {
    let heap = Heap.allocate(4096).unwrap();
    let new = |address, len_bytes| {
        // SAFETY: refused, so nothing is described by it.
        unsafe { Region::new(address, len_bytes, Place::Host, heap.owner().clone()) }.unwrap_err()
    };
    let refused = |what, address, len_bytes, limit_bytes| {
        let error = Error::Range { what, offset_bytes: 0, len_bytes, address, limit_bytes };
        assert_eq!(new(address, len_bytes), error);
    };
    refused("region", heap.address(), 0, u64::MAX - heap.address());
    refused("region", u64::MAX - 4095, 4097, 4095);
    refused("region", 4096, u64::MAX, u64::MAX - 4096);
    refused("region at address 0", 0, 4096, u64::MAX);

    for (offset_bytes, len_bytes) in
        [(0, 4097), (4096, 1), (1, 4096), (u64::MAX, 1), (1, u64::MAX), (4096, 0)]
    {
        let error =
            |what| Error::Range { what, offset_bytes, len_bytes, address: heap.address(), limit_bytes: 4096 };
        assert_eq!(heap.slice(offset_bytes, len_bytes).err(), Some(error("part of a region")));
        if len_bytes == 1 {
            assert_eq!(heap.read(offset_bytes, &mut [0]), Err(error("read from a region")));
            assert_eq!(heap.write(offset_bytes, &[0]), Err(error("write to a region")));
        }
    }
    let foreign = Error::Range {
        what: "part of a heap allocation",
        offset_bytes: u64::MAX,
        len_bytes: 1,
        address: heap.address(),
        limit_bytes: 4096,
    };
    assert_eq!(heap.owner().read(heap.address() - 1, &mut [0]), Err(foreign.clone()));
    assert_eq!(heap.owner().write(heap.address() - 1, &[0]), Err(foreign.clone()));

    for len_bytes in [0, u64::MAX, isize::MAX as u64] {
        let limit_bytes = isize::MAX as u64;
        let error =
            Error::Range { what: "heap allocation", offset_bytes: 0, len_bytes, address: 0, limit_bytes };
        assert_eq!(Heap.allocate(len_bytes).err(), Some(error));
    }
    assert_eq!(heap.owner().segments(Segment { address: heap.address() - 1, len_bytes: 1 }), Err(foreign));
    let segment = Segment { address: heap.address(), len_bytes: 4096 };
    assert_eq!(heap.owner().segments(segment), Ok(vec![segment]));
    assert!(matches!(
        heap.owner().dma_buf(segment),
        Err(Error::Unsupported { what: "heap memory as dma-buf" })
    ));
    assert!(matches!(heap.owner().ipc_handle(segment, IpcKind::Fd), Err(Error::Unsupported { .. })));
}

#[test]
fn payloads_and_batches() {
    for words in [[1 << 63, 0], [0, 1 << 63], [u64::MAX, 5]] {
        assert_eq!(Trigger::new(words), Err(Error::Payload { words }));
    }
    let (fifo, consumer) = Fifo::new(&Heap, config()).unwrap();
    let producer = fifo.producer().unwrap();
    let triggers = vec![Trigger::new([1, 2]).unwrap(); 2 * SLOTS as usize];
    for len in [0, SLOTS as usize + 1, 2 * SLOTS as usize] {
        assert_eq!(producer.push_batch(&triggers[..len]), Err(Error::BatchLength { len, slots: SLOTS }));
    }
    // None of them took a position.
    assert_eq!(consumer.peek(), None);
    assert_eq!(producer.push_batch(&triggers[..SLOTS as usize]), Ok(Position(0)));
}

#[test]
fn words_of_a_watch() {
    let (region, _) = memories();
    let words = Words::new(region.clone()).unwrap();
    let len = words.len();
    let watch = |value, stop, copy| {
        Watch::new((words.clone(), value), (words.clone(), stop), (words.clone(), copy)).map(|_| ())
    };
    let error = |index: u64, len_words: u64| {
        Err(Error::Range {
            what: "word of a watch",
            offset_bytes: index.saturating_mul(8),
            len_bytes: len_words * 8,
            address: region.address(),
            limit_bytes: len as u64 * 8,
        })
    };
    for index in [len, usize::MAX] {
        assert_eq!(watch(index, 1, 16), error(index as u64, 1));
        assert_eq!(watch(0, index, 16), error(index as u64, 1));
        assert_eq!(watch(0, 1, index), error(index as u64, layout::watch::WORDS as u64));
    }
    let last = len - layout::watch::WORDS;
    assert_eq!(watch(0, 1, last + 1), error(last as u64 + 1, layout::watch::WORDS as u64));
    assert_eq!(watch(0, 1, last), Ok(()));
}
