//! Memory of all kinds: in which ways it reaches a peer, what is refused by name, and what the cache of imports notices.

#[path = "../../fifo/tests/libcuda/mod.rs"]
mod libcuda;
#[path = "support/wire.rs"]
mod wire;

use std::ffi::c_void;
use std::sync::Arc;

use portway_fifo::cuda::{Context, Kind, Stream};
use portway_fifo::{Heap, Platform, Region};
use portway_proxy::TransportError;
use portway_proxy::transport::{Binding, LocalMemory, RemoteMemory, Transport};
use portway_transport_ipc::{Config, Error, Ipc, Way, WordPlace};
use wire::{Machine, PATIENCE};

fn apart(machine: &Machine, config: Config) -> [Ipc; 2] {
    [0, 1].map(|at| Ipc::open(&machine.contexts[at], config.clone()).unwrap())
}

fn import(from: &Ipc, to: &Ipc, memory: &LocalMemory) -> Result<RemoteMemory, TransportError> {
    to.import(&from.export(memory)?)
}

fn own(error: &TransportError) -> &Error {
    Error::of(error).unwrap_or_else(|| panic!("{error:?}"))
}

#[test]
fn the_way_is_chosen_by_trying_and_described() {
    let machine = Machine::new();
    machine.standin.set("fabric allowed", 1);
    machine.standin.set("opens its own", 1);
    let all = [Way::SameProcess, Way::Descriptor, Way::Fabric, Way::Legacy];
    let cases: &[(Kind, &[Way], Option<Way>)] = &[
        (Kind::Vmm, &all, Some(Way::Descriptor)),
        (Kind::Vmm, &[Way::Fabric, Way::Descriptor], Some(Way::Fabric)),
        (Kind::Vmm, &[Way::Legacy], None),
        (Kind::Legacy, &[Way::Descriptor, Way::Fabric], None),
    ];
    for &(kind, ways, expected) in cases {
        let [near, far] = apart(&machine, Config { ways: ways.to_vec(), ..Config::default() });
        let memory = near.register(&machine.contexts[0].allocate(kind, 10_000).unwrap()).unwrap();
        match (import(&near, &far, &memory), expected) {
            (Ok(remote), Some(way)) => {
                let description = far.describe(&remote).unwrap();
                assert_eq!((description.way, description.pieces, description.len_bytes), (way, 1, 10_000));
                assert_eq!(description.device, machine.contexts[0].attributes().uuid);
                let text = description.to_string();
                assert!(text.contains(&format!("{way:?}")) && text.contains("GPU-10101010"), "{text}");
            }
            (Err(error), None) => {
                let Error::NoWay { tried, .. } = own(&error) else { panic!("{error:?}") };
                assert_eq!(tried.iter().map(|(way, _)| *way).collect::<Vec<_>>(), ways);
            }
            (other, _) => panic!("{kind:?} by {ways:?}: {other:?}"),
        }
    }
    // Between transports that know each other it is none of these.
    let [near, far] = machine.transports(Config::default());
    let memory = near.register(&machine.contexts[0].allocate(Kind::Legacy, 64).unwrap()).unwrap();
    let remote = import(&near, &far, &memory).unwrap();
    assert_eq!(far.describe(&remote).unwrap().way, Way::SameProcess);
}

/// Where the first way is closed the next is taken.
#[test]
fn a_way_that_fails_is_passed_over() {
    let machine = Machine::new();
    machine.standin.set("fabric allowed", 1);
    let [near, far] = apart(&machine, Config::default());
    let memory = near.register(&machine.contexts[0].allocate(Kind::Vmm, 64).unwrap()).unwrap();
    let bytes = near.export(&memory).unwrap();
    machine.standin.fail("cuMemImportFromShareableHandle", 1, 800);
    let remote = far.import(&bytes).unwrap();
    assert_eq!(far.describe(&remote).unwrap().way, Way::Fabric);
}

/// A function of the stand-in's, which has the type that the caller says.
fn function<F: Copy>(machine: &Machine, name: &[u8]) -> F {
    // SAFETY: the callers say the types that the functions have in the stand-in.
    *unsafe { machine.standin.library().get::<F>(name) }.unwrap()
}

/// Device memory made of several physical pieces, mapped side by side by the caller.
struct Pieces {
    context: Context,
    address: u64,
    len_bytes: u64,
}

const PIECE_BYTES: u64 = 2 << 20;

impl Pieces {
    fn new(machine: &Machine, count: u64) -> (Region, Arc<Pieces>) {
        #[repr(C)]
        struct Properties {
            kind: i32,
            handle_types: i32,
            location: [i32; 2],
            rest: [u64; 2],
        }
        let context = machine.contexts[0].clone();
        let _current = context.current().unwrap();
        type Reserve = unsafe extern "C" fn(*mut u64, usize, usize, u64, u64) -> i32;
        type Create = unsafe extern "C" fn(*mut u64, usize, *const Properties, u64) -> i32;
        type Map = unsafe extern "C" fn(u64, usize, usize, u64, u64) -> i32;
        let (reserve, create, map) = (
            function::<Reserve>(machine, b"cuMemAddressReserve\0"),
            function::<Create>(machine, b"cuMemCreate\0"),
            function::<Map>(machine, b"cuMemMap\0"),
        );
        let (mut address, len_bytes) = (0u64, count * PIECE_BYTES);
        // SAFETY: the address outlives the call.
        assert_eq!(unsafe { reserve(&mut address, len_bytes as usize, 0, 0, 0) }, 0);
        for piece in 0..count {
            let properties = Properties { kind: 1, handle_types: 1, location: [1, 0], rest: [0; 2] };
            let mut handle = 0u64;
            // SAFETY: both outlive the call.
            assert_eq!(unsafe { create(&mut handle, PIECE_BYTES as usize, &properties, 0) }, 0);
            let at = address + piece * PIECE_BYTES;
            // SAFETY: the range was reserved.
            assert_eq!(unsafe { map(at, PIECE_BYTES as usize, 0, handle, 0) }, 0);
        }
        let keep = Arc::new(Pieces { context: context.clone(), address, len_bytes });
        // SAFETY: the pieces stay mapped, and are accessed atomically only.
        let region = unsafe { context.import_raw(address, len_bytes, keep.clone()) }.unwrap();
        (region, keep)
    }
}

#[test]
fn every_physical_piece_is_exported() {
    // More than go with one reply, too.
    for count in [3, 70] {
        let machine = Machine::new();
        let (region, pieces) = Pieces::new(&machine, count);
        assert_eq!((pieces.address, pieces.len_bytes), (region.address(), count * PIECE_BYTES));
        let _ = &pieces.context;
        let [near, far] = apart(&machine, Config::default());
        // Neither begins nor ends with a piece.
        let part = region.slice(PIECE_BYTES - 100, (count - 2) * PIECE_BYTES + 200).unwrap();
        let memory = near.register(&part).unwrap();
        let remote = import(&near, &far, &memory).unwrap();
        let description = far.describe(&remote).unwrap();
        assert_eq!((description.way, description.pieces as u64), (Way::Descriptor, count));
        // A put across the seams arrives where the exporter sees it.
        let (near_end, near_bytes) = near.endpoint().unwrap();
        let (far_end, far_bytes) = far.endpoint().unwrap();
        let _near_port = near_end.connect(&far_bytes, PATIENCE).unwrap();
        let mut port = far_end.connect(&near_bytes, PATIENCE).unwrap();
        let len_bytes = part.len_bytes();
        let source = machine.contexts[1].allocate(Kind::Legacy, len_bytes).unwrap();
        let bytes: Vec<u8> = (0..len_bytes).map(|at| (at * 7 % 251) as u8).collect();
        source.write(0, &bytes).unwrap();
        let source = far.register(&source).unwrap();
        let word = near.signal_word().unwrap();
        let word = import(&near, &far, &word).unwrap();
        let binding = Binding { source: source.id, destination: remote.id, signal: word.id };
        let lane = port.bind(&binding).unwrap();
        let put =
            portway_proxy::transport::Put { source_offset_bytes: 0, destination_offset_bytes: 0, len_bytes };
        let op =
            portway_proxy::transport::Op { lane, sequence: 0, put: Some(put), signal: None, flush: true };
        assert!(format!("{port:?}").contains("way: Descriptor"), "{port:?}");
        port.submit(&op).unwrap();
        port.kick().unwrap();
        wire::wait_until("the put", || wire::poll(&mut *port).unwrap(), |done| *done == 1);
        let mut seen = vec![0; bytes.len()];
        part.read(0, &mut seen).unwrap();
        assert!(seen == bytes, "{count} pieces");
    }
}

#[test]
fn pool_memory_is_refused_by_name() {
    let machine = Machine::new();
    let context = &machine.contexts[0];
    let stream = Stream::new(context).unwrap();
    let _current = context.current().unwrap();
    let mut address = 0;
    type Allocate = unsafe extern "C" fn(*mut u64, usize, *mut c_void) -> i32;
    let allocate = function::<Allocate>(&machine, b"cuMemAllocAsync\0");
    // SAFETY: the address outlives the call, and the stream is one of the context.
    assert_eq!(unsafe { allocate(&mut address, 4096, stream.raw()) }, 0);
    // SAFETY: the memory stays, and is accessed atomically only.
    let region = unsafe { context.import_raw(address, 4096, Arc::new(())) }.unwrap();
    let ipc = Ipc::open(context, Config::default()).unwrap();
    // It can be put from.
    let memory = ipc.register(&region).unwrap();
    let error = ipc.export(&memory).unwrap_err();
    assert!(matches!(own(&error), Error::Pool { address: seen } if *seen == address), "{error:?}");
    assert!(own(&error).to_string().contains("stream-ordered pool (cuMemAllocAsync)"));
}

#[test]
fn memory_that_the_gpu_does_not_reach_and_that_of_another_device_are_refused() {
    let machine = Machine::new();
    let ipc = Ipc::open(&machine.contexts[0], Config::default()).unwrap();
    let error = ipc.register(&Heap.allocate(64).unwrap()).unwrap_err();
    assert!(matches!(own(&error), Error::Memory { .. }), "{error:?}");
    let other = machine.contexts[1].allocate(Kind::Legacy, 64).unwrap();
    let error = ipc.register(&other).unwrap_err();
    assert!(matches!(own(&error), Error::OtherDevice { expected: 0, seen: 1 }), "{error:?}");
}

#[test]
fn page_locked_memory_stays_within_its_process() {
    let machine = Machine::new();
    let [near, far] = apart(&machine, Config::default());
    let memory = near.register(&machine.contexts[0].host_memory(64).unwrap()).unwrap();
    let error = import(&near, &far, &memory).unwrap_err();
    assert!(matches!(own(&error), Error::NoWay { .. }), "{error:?}");
    let beside = near.beside(&machine.contexts[1]).unwrap();
    import(&near, &beside, &memory).unwrap();
}

#[test]
fn a_legacy_handle_of_this_very_process_is_named_with_the_remedy() {
    let machine = Machine::new();
    let [near, far] = apart(&machine, Config::default());
    let memory = near.register(&machine.contexts[0].allocate(Kind::Legacy, 64).unwrap()).unwrap();
    let error = import(&near, &far, &memory).unwrap_err();
    assert!(matches!(own(&error), Error::SameProcess), "{error:?}");
    assert!(own(&error).to_string().contains("Ipc::beside"));
}

#[test]
fn devices_that_do_not_reach_each_other_are_named() {
    let machine = Machine::new();
    machine.standin.set("peer access", 0);
    for [near, far] in [machine.transports(Config::default()), apart(&machine, Config::default())] {
        for kind in [Kind::Vmm, Kind::Legacy] {
            let memory = near.register(&machine.contexts[0].allocate(kind, 64).unwrap()).unwrap();
            let error = import(&near, &far, &memory).unwrap_err();
            let [theirs, ours] = [0, 1].map(|at| machine.contexts[at].attributes().uuid);
            match own(&error) {
                Error::NoPeerAccess { ours: a, theirs: b } => assert_eq!((*a, *b), (ours, theirs)),
                other => panic!("{other:?}"),
            }
        }
        let (_near_end, near_bytes) = near.endpoint().unwrap();
        let error = far.endpoint().unwrap().0.connect(&near_bytes, PATIENCE).unwrap_err();
        assert!(matches!(own(&error), Error::NoPeerAccess { .. }), "{error:?}");
    }
}

#[test]
fn a_device_that_this_process_does_not_see_is_named() {
    let machine = Machine::new();
    let [near, far] = apart(&machine, Config::default());
    let memory = near.register(&machine.contexts[0].allocate(Kind::Vmm, 64).unwrap()).unwrap();
    let bytes = near.export(&memory).unwrap();
    // From now on the driver shows other devices.
    machine.standin.set("uuid base", 0x60);
    // It is tried all the same, since the driver may open it.
    far.import(&bytes).unwrap();
    let other = near.register(&machine.contexts[0].allocate(Kind::Vmm, 64).unwrap()).unwrap();
    machine.standin.fail_always("cuMemImportFromShareableHandle", 101);
    let error = import(&near, &far, &other).unwrap_err();
    match own(&error) {
        Error::Hidden { device, why, .. } => {
            assert_eq!(*device, machine.contexts[0].attributes().uuid);
            assert!(why.contains("cuMemImportFromShareableHandle failed with status 101"), "{why}");
        }
        other => panic!("{other:?}"),
    }
    assert!(own(&error).to_string().contains("CUDA_VISIBLE_DEVICES=unset"), "{}", own(&error));
}

#[test]
fn what_the_peer_has_released_is_not_imported() {
    let machine = Machine::new();
    for [near, far] in [machine.transports(Config::default()), apart(&machine, Config::default())] {
        let region = machine.contexts[0].allocate(Kind::Vmm, 64).unwrap();
        let memory = near.register(&region).unwrap();
        let bytes = near.export(&memory).unwrap();
        near.release(&memory).unwrap();
        let error = far.import(&bytes).unwrap_err();
        assert!(matches!(own(&error), Error::Released { .. }), "{error:?}");
        // The same memory registered again is another one.
        let again = near.register(&region).unwrap();
        assert!(far.import(&bytes).is_err());
        import(&near, &far, &again).unwrap();
    }
}

/// One allocation is opened once, however many memories lie in it; and closed with the last of them.
#[test]
fn an_allocation_is_opened_once_and_closed_once() {
    let machine = Machine::new();
    let [near, far] = apart(&machine, Config::default());
    let region = machine.contexts[0].allocate(Kind::Vmm, 1 << 20).unwrap();
    let memories: Vec<_> =
        (0..10).map(|at| near.register(&region.slice(at * 100, 50).unwrap()).unwrap()).collect();
    let opened = || machine.standin.calls("cuMemImportFromShareableHandle");
    let remotes: Vec<_> = memories.iter().map(|memory| import(&near, &far, memory).unwrap()).collect();
    assert_eq!(opened(), 1);
    let context = &machine.contexts[1];
    for remote in &remotes {
        assert_eq!(context.quarantined().allocations, 0);
        far.forget(remote).unwrap();
        assert!(matches!(far.describe(remote), Err(TransportError::Unknown { .. })));
        assert!(matches!(far.forget(remote), Err(TransportError::Unknown { .. })));
    }
    assert_eq!(context.quarantined().allocations, 1);
    assert_eq!(context.reclaim().unwrap().allocations, 1);
    import(&near, &far, &memories[0]).unwrap();
    assert_eq!(opened(), 2);
    // Signal words lie close together, too.
    let words: Vec<_> = (0..20).map(|_| near.signal_word().unwrap()).collect();
    let locked = || machine.standin.calls("cuMemHostRegister_v2");
    let before = locked();
    for word in &words {
        import(&near, &far, word).unwrap();
    }
    assert_eq!(locked() - before, 1);
}

/// Memory is freed over there and its addresses are used again: the new one is not taken for the old one, and the old one
/// is refused from then on. The numbers are changed in the message, since addresses come again when the system likes.
#[test]
fn an_address_that_is_used_again_is_noticed() {
    const ALLOCATION: usize = 96;
    const BASE: usize = 104;
    let machine = Machine::new();
    let [near, far] = apart(&machine, Config::default());
    let region = machine.contexts[0].allocate(Kind::Vmm, PIECE_BYTES).unwrap();
    let memory = near.register(&region).unwrap();
    let export = near.export(&memory).unwrap();
    let word_at = |at: usize| u64::from_le_bytes(export[at..at + 8].try_into().unwrap());
    assert_eq!(word_at(BASE), region.address());
    let (near_end, near_bytes) = near.endpoint().unwrap();
    let (far_end, far_bytes) = far.endpoint().unwrap();
    let _near_port = near_end.connect(&far_bytes, PATIENCE).unwrap();
    let mut port = far_end.connect(&near_bytes, PATIENCE).unwrap();
    let source = far.register(&machine.contexts[1].allocate(Kind::Vmm, 64).unwrap()).unwrap();
    let word = import(&near, &far, &near.signal_word().unwrap()).unwrap();
    let mut bind = |destination: &RemoteMemory| {
        port.bind(&Binding { source: source.id, destination: destination.id, signal: word.id })
    };
    let opened = || machine.standin.calls("cuMemImportFromShareableHandle");
    // An allocation of which nothing is registered any more, while the message's memory is.
    let mut before = export.clone();
    before[ALLOCATION..BASE].copy_from_slice(&(u64::MAX - 1).to_le_bytes());
    let old = far.import(&before).unwrap();
    // Control: the same allocation again, and another one at other addresses, make nothing stale.
    far.import(&before).unwrap();
    let mut elsewhere = export.clone();
    elsewhere[ALLOCATION..BASE].copy_from_slice(&u64::MAX.to_le_bytes());
    elsewhere[BASE..BASE + 8].copy_from_slice(&(region.address() + PIECE_BYTES).to_le_bytes());
    far.import(&elsewhere).unwrap();
    assert_eq!(opened(), 2);
    bind(&old).unwrap();
    // Another allocation at the same addresses.
    let new = far.import(&export).unwrap();
    assert_eq!(opened(), 3, "what was open of the old one was taken for the new one");
    let error = bind(&old).unwrap_err();
    assert!(matches!(own(&error), Error::Stale { .. }), "{error:?}");
    bind(&new).unwrap();
}

/// Regions that the caller made one by one of the same pieces, as an allocator does that hands out parts of a block: each has
/// its own owner, all are live, and so none makes another stale.
#[test]
fn live_memories_of_the_same_pieces_make_each_other_not_stale() {
    let machine = Machine::new();
    let [near, far] = apart(&machine, Config::default());
    let (whole, _keep) = Pieces::new(&machine, 3);
    let part = |offset_bytes: u64, len_bytes: u64| {
        let address = whole.address() + offset_bytes;
        // SAFETY: the pieces stay mapped while `whole` lives, and are accessed atomically only.
        unsafe { machine.contexts[0].import_raw(address, len_bytes, Arc::new(whole.clone())) }.unwrap()
    };
    // The same pieces twice, then others that share one with them.
    let parts = [
        part(0, 64),
        part(PIECE_BYTES - 64, 32),
        part(PIECE_BYTES, 2 * PIECE_BYTES),
        part(0, 3 * PIECE_BYTES),
    ];
    let memories = parts.map(|part| near.register(&part).unwrap());
    let remotes: Vec<_> = memories.iter().map(|memory| import(&near, &far, memory).unwrap()).collect();
    let (_near_end, near_bytes) = near.endpoint().unwrap();
    let mut port = far.endpoint().unwrap().0.connect(&near_bytes, PATIENCE).unwrap();
    let source = far.register(&machine.contexts[1].allocate(Kind::Vmm, 64).unwrap()).unwrap();
    let word = import(&near, &far, &near.signal_word().unwrap()).unwrap();
    let mut bind = |destination: &RemoteMemory| {
        port.bind(&Binding { source: source.id, destination: destination.id, signal: word.id })
    };
    for remote in &remotes {
        bind(remote).unwrap();
    }
    // Control: the first is released, and one that shares its pieces is made known afterwards.
    near.release(&memories[0]).unwrap();
    near.release(&memories[1]).unwrap();
    let another = near.register(&part(0, PIECE_BYTES + 64)).unwrap();
    import(&near, &far, &another).unwrap();
    let error = bind(&remotes[0]).unwrap_err();
    assert!(matches!(own(&error), Error::Stale { .. }), "{error:?}");
    for remote in &remotes[2..] {
        bind(remote).unwrap();
    }
}

/// A part that the caller made a region of, in the middle of an allocation, in each way of export.
#[test]
fn a_part_of_an_allocation_is_exported_with_what_is_around_it() {
    let machine = Machine::new();
    machine.standin.set("opens its own", 1);
    for (kind, way) in [(Kind::Vmm, Way::Descriptor), (Kind::Legacy, Way::Legacy)] {
        let [near, far] = apart(&machine, Config::default());
        let whole = machine.contexts[0].allocate(kind, 1 << 20).unwrap();
        let keep = Arc::new(whole.clone());
        // SAFETY: `keep` keeps it allocated, and it is accessed atomically only.
        let part = unsafe { machine.contexts[0].import_raw(whole.address() + 4096, 100, keep) }.unwrap();
        let mut export = near.export(&near.register(&part).unwrap()).unwrap();
        if kind == Kind::Legacy {
            // Of a container's process, whose handle is opened.
            export[48] ^= 1;
        }
        let description = far.describe(&far.import(&export).unwrap()).unwrap();
        assert_eq!((description.way, description.len_bytes), (way, 100));
    }
}

/// A number of an allocation is never given twice, so that the above is what happens.
#[test]
fn memory_that_is_freed_and_made_again_has_another_number() {
    let machine = Machine::new();
    let ipc = Ipc::open(&machine.contexts[0], Config::default()).unwrap();
    let mut seen = Vec::new();
    for _ in 0..50 {
        let region = machine.contexts[0].allocate(Kind::Legacy, 64).unwrap();
        let [one, other] = [0, 1].map(|_| ipc.register(&region).unwrap());
        let number = |memory| ipc.export(memory).unwrap()[96..104].to_vec();
        assert_eq!(number(&one), number(&other));
        assert!(!seen.contains(&number(&one)));
        seen.push(number(&one));
        ipc.release(&one).unwrap();
        ipc.release(&other).unwrap();
        drop((one, other, region));
        machine.contexts[0].reclaim().unwrap();
    }
}

#[test]
fn words_are_apart_zeroed_and_never_given_twice() {
    let machine = Machine::new();
    for word_place in [WordPlace::Pinned, WordPlace::Device] {
        let ipc = Ipc::open(&machine.contexts[0], Config { word_place, ..Config::default() }).unwrap();
        let mut seen = Vec::new();
        let mut held = Vec::new();
        for round in 0..1200 {
            let word = ipc.signal_word().unwrap();
            assert_eq!((wire::value(&word.region), word.region.len_bytes()), (0, 8));
            assert_eq!(word.region.address() % 128, 0);
            if round % 3 == 0 {
                held.push(word.clone());
            }
            assert!(!seen.contains(&word.region.address()));
            seen.push(word.region.address());
            ipc.release(&word).unwrap();
        }
    }
}
