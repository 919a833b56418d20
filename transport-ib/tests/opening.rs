//! What is missing gets a name of its own, and connections are set up as the configuration says.

mod support;

use portway_proxy::TransportError;
use portway_proxy::transport::{Close, Port, Transport};
use portway_transport_ib::{Config, Error, Ib, sys};
use support::fabric::{Make, World};
use support::link::{LIMIT, Link, close, connect};

fn open(world: &World, config: Config) -> Result<Ib, Error> {
    Ib::open_with(&world.verbs(), config)
}

fn named(name: &str) -> Config {
    Config { device: Some(name.into()), ..Config::default() }
}

#[test]
fn this_machine_gives_one_of_the_answers() {
    match Ib::open(Config::default()) {
        Ok(ib) => println!("device {} port {}", ib.device(), ib.port()),
        Err(error @ (Error::NoLibrary { .. } | Error::NoKernelSupport | Error::NoDevice { .. })) => {
            println!("waived: a real device, {error}");
        }
        Err(error @ Error::NoActivePort { .. }) => println!("waived: a real device, {error}"),
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn what_is_missing_is_told_apart() {
    let error = Ib::open_with(&World::verbs_without_kernel(), Config::default()).unwrap_err();
    assert!(matches!(error, Error::NoKernelSupport), "{error}");

    let error = open(&World::new(&[]), Config::default()).unwrap_err();
    assert!(matches!(error, Error::NoDevice { name: None, .. }), "{error}");

    let error = open(&World::new(&[Make::default()]), named("soft9")).unwrap_err();
    assert_eq!(
        error.to_string(),
        "no RDMA device named soft9; there are: soft0. Name one that is there, or load the driver of another; \
         `rdma link` shows them"
    );

    let down = Make { state: sys::IBV_PORT_DOWN, ..Make::default() };
    let waiting = Make { name: "soft1", state: sys::IBV_PORT_INIT, roce: false, ..Make::default() };
    let error = open(&World::new(&[down, waiting]), Config::default()).unwrap_err();
    let Error::NoActivePort { seen } = &error else { panic!("{error}") };
    assert_eq!(seen[0], "soft0:1 down");
    assert!(seen[1].starts_with("soft1:1 initialising"), "{seen:?}");
}

#[test]
fn a_device_that_cannot_serve_is_passed_over() {
    let world = World::new(&[
        Make { name: "iwarp0", transport: sys::IBV_TRANSPORT_IWARP, ..Make::default() },
        Make { name: "down0", state: sys::IBV_PORT_DOWN, ..Make::default() },
        Make { name: "hidden0", open: 13, ..Make::default() },
        Make { name: "up0", ..Make::default() },
    ]);
    assert_eq!(open(&world, Config::default()).unwrap().device(), "up0");
    let error = open(&world, named("iwarp0")).unwrap_err();
    assert!(error.to_string().contains("not an InfiniBand or RoCE device"), "{error}");
    let error = open(&world, named("hidden0")).unwrap_err();
    assert!(error.to_string().contains("hidden0: ibv_open_device failed with errno 13"), "{error}");
    let error = open(&world, Config { port: Some(2), ..named("up0") }).unwrap_err();
    assert!(error.to_string().contains("up0 with 1 ports"), "{error}");
}

#[test]
fn queues_longer_than_the_device_holds_are_refused() {
    let world = World::new(&[Make { max_requests: 100, ..Make::default() }]);
    let error = open(&world, Config::default()).unwrap_err();
    assert!(matches!(error, Error::Unfit { .. }), "{error}");
    assert!(error.to_string().contains("512 requests a queue pair"), "{error}");
    let error = open(&world, Config { depth: 64, queue_pairs: 7, ..Config::default() }).unwrap_err();
    assert!(error.to_string().contains("448 completions"), "{error}");
}

#[test]
fn both_ends_take_the_smaller_mtu_and_each_others_numbers() {
    let world =
        World::new(&[Make { mtu: 5, ..Make::default() }, Make { name: "soft1", mtu: 3, ..Make::default() }]);
    let config = Config {
        timeout: 15,
        retries: 3,
        rnr_timer: 9,
        rnr_retries: 2,
        service_level: 5,
        traffic_class: 0x68,
        ..named("soft0")
    };
    let (a, b) = (open(&world, config).unwrap(), open(&world, named("soft1")).unwrap());
    let _ports = connect(&a, &b).unwrap();
    let ready = world.log().ready;
    // RTR and RTS of a, then of b.
    let [a_rtr, a_rts, b_rtr, b_rts] = ready[..] else { panic!("{} steps", ready.len()) };
    assert_eq!((a_rtr.path_mtu.0, b_rtr.path_mtu.0), (3, 3));
    assert_eq!((a_rtr.rq_psn, b_rtr.rq_psn), (b_rts.sq_psn, a_rts.sq_psn));
    assert_ne!(a_rts.sq_psn, b_rts.sq_psn, "drawn at random");
    assert_eq!((a_rts.timeout, a_rts.retry_cnt, a_rts.rnr_retry, a_rtr.min_rnr_timer), (15, 3, 2, 9));
    assert_eq!((b_rts.timeout, b_rts.retry_cnt), (17, 6));
    let address = a_rtr.ah_attr;
    assert_eq!((address.sl, address.grh.traffic_class, address.is_global), (5, 0x68, 1));
    assert_eq!((address.grh.sgid_index, address.grh.hop_limit), (1, 255));
}

fn ipv4(last: [u8; 4]) -> [u8; 16] {
    let mut gid = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0, 0, 0, 0];
    gid[12..].copy_from_slice(&last);
    gid
}

#[test]
fn the_gids_of_one_subnet_are_found() {
    let (v1, v2) = (sys::IBV_GID_TYPE_ROCE_V1, sys::IBV_GID_TYPE_ROCE_V2);
    let mut link_local = [0; 16];
    link_local[..2].copy_from_slice(&[0xfe, 0x80]);
    link_local[15] = 1;
    let a = vec![
        (0, link_local, v1),
        (1, link_local, v2),
        (2, ipv4([10, 1, 0, 5]), v1),
        (3, ipv4([10, 1, 0, 5]), v2),
        (5, ipv4([10, 2, 0, 5]), v2),
    ];
    let b = vec![(0, link_local, v2), (7, ipv4([10, 2, 0, 6]), v2)];
    let world = World::new(&[
        Make { gids: a, ..Make::default() },
        Make { name: "soft1", gids: b.clone(), ..Make::default() },
        Make { name: "soft2", gids: vec![(0, link_local, v2)], ..Make::default() },
    ]);
    let (a, b) = (open(&world, named("soft0")).unwrap(), open(&world, named("soft1")).unwrap());
    let _ports = connect(&a, &b).unwrap();
    let ready = world.log().ready;
    assert_eq!(ready[0].ah_attr.grh.sgid_index, 5);
    assert_eq!(ready[2].ah_attr.grh.sgid_index, 7);
    // SAFETY: every 16 bytes are a GID.
    assert_eq!(unsafe { ready[0].ah_attr.grh.dgid.raw }, ipv4([10, 2, 0, 6]));

    let alone = open(&world, named("soft2")).unwrap();
    let error = alone.endpoint().unwrap_err();
    let TransportError::Device { operation: "choosing a GID", source: Some(source), .. } = &error else {
        panic!("{error:?}")
    };
    assert!(source.to_string().contains("every RoCE v2 entry is link-local"), "{source}");
    let insists = open(&world, Config { gid_index: Some(0), ..named("soft2") }).unwrap();
    insists.endpoint().unwrap();
}

#[test]
fn an_old_library_without_sysfs_does_not_guess_a_gid() {
    let world = World::new(&[Make::default()]);
    let ib = Ib::open_with(&world.old_verbs(), Config::default()).unwrap();
    let TransportError::Device { source: Some(source), .. } = ib.endpoint().unwrap_err() else { panic!() };
    assert!(source.to_string().contains("neither the library nor sysfs"), "{source}");
    let ib = Ib::open_with(&world.old_verbs(), Config { gid_index: Some(1), ..Config::default() }).unwrap();
    let mut link = Link::new(&ib, &ib, 4096);
    link.offer(Some((0, 0, 100)), Some(1), false).unwrap();
    link.until_complete(1).unwrap();
    assert!(world.log().pages.iter().all(|(_, _, access)| access & sys::IBV_ACCESS_RELAXED_ORDERING.0 == 0));
}

#[test]
fn infiniband_is_addressed_by_lid() {
    let gids = vec![(0, [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8], sys::IBV_GID_TYPE_IB)];
    let world = World::new(&[Make { roce: false, gids, ..Make::default() }]);
    let ib = open(&world, Config::default()).unwrap();
    let mut link = Link::new(&ib, &ib, 4096);
    let ready = world.log().ready;
    assert_eq!((ready[0].ah_attr.is_global, ready[0].ah_attr.dlid), (0, 3));
    link.offer(Some((0, 0, 100)), Some(1), false).unwrap();
    link.until_complete(1).unwrap();
    assert_eq!(link.word(), 1);
}

#[test]
fn ends_that_do_not_belong_together_are_refused() {
    let roce = Make::default();
    let gids = vec![(0, [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8], sys::IBV_GID_TYPE_IB)];
    let world = World::new(&[roce, Make { name: "soft1", roce: false, gids, ..Make::default() }]);
    let a = open(&world, named("soft0")).unwrap();
    let infiniband = open(&world, named("soft1")).unwrap();
    let twofold = open(&world, Config { queue_pairs: 2, ..named("soft0") }).unwrap();
    let refusal = |peer: &[u8]| {
        let (end, _) = a.endpoint().unwrap();
        match end.connect(peer, LIMIT).unwrap_err() {
            TransportError::Malformed { what: "endpoint", expected, seen } => (expected, seen),
            other => panic!("{other}"),
        }
    };
    let bytes = |ib: &Ib| ib.endpoint().unwrap().1;
    assert_eq!(refusal(&bytes(&infiniband)), ("RoCE".into(), "InfiniBand".into()));
    assert_eq!(refusal(&bytes(&twofold)), ("1 queue pairs".into(), "2 queue pairs".into()));
    let (own, own_bytes) = a.endpoint().unwrap();
    assert!(matches!(own.connect(&own_bytes, LIMIT), Err(TransportError::Malformed { .. })));
    let whole = bytes(&a);
    assert_eq!(refusal(&whole[..20]).1, "20 bytes");
    assert_eq!(refusal(b"not ours, and long enough to have a header"), {
        let magic = u64::from_le_bytes(*b"portway\0");
        (format!("magic {magic:#x}"), format!("{:#x}", u64::from_le_bytes(*b"not ours")))
    });
    // Nothing is left of the ends that came to nothing.
    drop(whole);
    assert_eq!(world.left().1, 0);
}

#[test]
fn everything_is_taken_down_in_order() {
    let world = World::new(&[Make::default()]);
    {
        let ib = open(&world, Config::default()).unwrap();
        let mut link = Link::new(&ib, &ib, 4096);
        link.offer(Some((0, 0, 4096)), Some(1), true).unwrap();
        link.until_complete(1).unwrap();
        let busy = ib.release(&link.source).unwrap_err();
        assert!(matches!(busy, TransportError::Busy { ports: 1, .. }), "{busy}");
        world.clear_log();
        close(&mut *link.a);
        assert_eq!(world.log().calls, ["to ERR", "destroy_qp", "destroy_cq"]);
        ib.release(&link.source).unwrap();
        assert!(matches!(ib.release(&link.source), Err(TransportError::Unknown { .. })));
        world.clear_log();
        // The other port and the memory are dropped without a close.
    }
    let start = std::time::Instant::now();
    while world.left() != (0, 0, 0, 0) {
        assert!(start.elapsed() < LIMIT, "left over: {:?}", world.left());
        std::thread::yield_now();
    }
    let calls = world.log().calls;
    let place =
        |name| calls.iter().rposition(|&call| call == name).unwrap_or_else(|| panic!("{name}: {calls:?}"));
    assert!(place("destroy_qp") < place("destroy_cq"));
    assert!(place("destroy_cq") < place("dealloc_pd") && place("dereg_mr") < place("dealloc_pd"));
    assert!(place("dealloc_pd") < place("close_device"));
}

#[test]
fn a_device_that_does_not_let_go_keeps_the_memory() {
    let world = World::new(&[Make::default()]);
    let ib = open(&world, Config::default()).unwrap();
    let mut link = Link::new(&ib, &ib, 4096);
    world.refuse_destroy();
    let start = std::time::Instant::now();
    let error = loop {
        match link.a.close() {
            Ok(Close::Pending) => assert!(start.elapsed() < LIMIT, "neither closed nor refused"),
            Ok(Close::Quiesced) => panic!("the queue pair is still there"),
            Err(error) => break error,
        }
    };
    // 16 is EBUSY: what the device said.
    assert!(error.to_string().ends_with("stays bound, failed with status 16"), "{error}");
    assert!(matches!(ib.release(&link.source), Err(TransportError::Busy { .. })));
}

#[test]
fn memory_of_another_transport_is_refused_at_the_binding() {
    let world = World::new(&[Make::default(), Make { name: "soft1", ..Make::default() }]);
    let (a, b) = (open(&world, named("soft0")).unwrap(), open(&world, named("soft1")).unwrap());
    let mut link = Link::new(&a, &b, 4096);
    let stranger = open(&world, named("soft1")).unwrap();
    let memory = stranger.register(&portway_fifo::Heap.allocate(4096).unwrap()).unwrap();
    let imported = a.import(&stranger.export(&memory).unwrap()).unwrap();
    let word = a.import(&b.export(&link.signal).unwrap()).unwrap();
    let mut bind = |source, destination, signal| {
        link.a.bind(&portway_proxy::transport::Binding { source, destination, signal })
    };
    let error = bind(link.source.id, imported.id, word.id).unwrap_err();
    assert!(matches!(error, TransportError::Malformed { what: "destination", .. }), "{error}");
    // Of this side where one of the peer is needed, the other way round, and of another transport altogether.
    let error = bind(link.source.id, link.source.id, word.id).unwrap_err();
    assert!(matches!(error, TransportError::Unknown { what: "destination", .. }), "{error}");
    let error = bind(word.id, imported.id, word.id).unwrap_err();
    assert!(matches!(error, TransportError::Unknown { what: "source", .. }), "{error}");
    let error = bind(memory.id, imported.id, word.id).unwrap_err();
    assert!(matches!(error, TransportError::Unknown { what: "source", .. }), "{error}");
    // A signal word has 8 bytes.
    let long = a.import(&b.export(&link.destination).unwrap()).unwrap();
    let error = bind(link.source.id, long.id, long.id).unwrap_err();
    assert!(matches!(error, TransportError::Malformed { what: "signal word", .. }), "{error}");
    // Eight bytes of data are none: writes to them may pass each other.
    let eight = b.register(&portway_fifo::Heap.allocate(8).unwrap()).unwrap();
    let eight = a.import(&b.export(&eight).unwrap()).unwrap();
    let error = bind(link.source.id, long.id, eight.id).unwrap_err();
    assert!(error.to_string().contains("seen memory for data, 8 bytes"), "{error}");
}

#[test]
fn a_source_that_is_its_own_destination_is_refused() {
    let world = World::new(&[Make::default()]);
    let ib = open(&world, Config::default()).unwrap();
    let (mut port, _other): (Box<dyn Port>, _) = connect(&ib, &ib).unwrap();
    let memory = ib.register(&portway_fifo::Heap.allocate(4096).unwrap()).unwrap();
    let word = ib.signal_word().unwrap();
    let import = |memory| ib.import(&ib.export(memory).unwrap()).unwrap().id;
    let binding = portway_proxy::transport::Binding {
        source: memory.id,
        destination: import(&memory),
        signal: import(&word),
    };
    assert!(matches!(port.bind(&binding), Err(TransportError::Overlap { .. })));
}
