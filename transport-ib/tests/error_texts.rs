//! Every error text of this crate, to be read as a whole: who, what, expected, seen, and what to do.

use std::collections::BTreeSet;

use portway_proxy::TransportError;
use portway_transport_ib::Error;

fn texts() -> Vec<(Error, &'static str)> {
    use Error::*;
    let port = || "mlx5_0:1".to_owned();
    vec![
        (
            NoLibrary { message: "libibverbs.so.1: no such file".into() },
            "no verbs library: libibverbs.so.1: no such file; install it (Debian: libibverbs1, ibverbs-providers)",
        ),
        (
            NoKernelSupport,
            "the verbs library finds no kernel support: load ib_uverbs, and let this process see \
             /sys/class/infiniband and /dev/infiniband",
        ),
        (
            NoDevice { name: Some("mlx5_9".into()), present: vec!["mlx5_0".into(), "mlx5_1".into()] },
            "no RDMA device named mlx5_9; there are: mlx5_0, mlx5_1. Name one that is there, or load the driver of \
             another; `rdma link` shows them",
        ),
        (
            NoDevice { name: None, present: vec![] },
            "no RDMA device; there are: none. Name one that is there, or load the driver of another; `rdma link` \
             shows them",
        ),
        (
            NoActivePort { seen: vec!["mlx5_0:1 down".into()] },
            "no active RDMA port; seen: mlx5_0:1 down. Bring a link up; `rdma link` shows them",
        ),
        (
            Device { operation: "ibv_query_device", errno: 22 },
            "ibv_query_device failed with errno 22 (Invalid argument (os error 22)): the kernel's log may say why",
        ),
        (Device { operation: "ibv_alloc_pd", errno: 0 }, "ibv_alloc_pd failed: the kernel's log may say why"),
        (
            Unfit {
                device: "mlx5_0".into(),
                why: "64 requests a queue pair are configured and it holds 32".into(),
            },
            "device mlx5_0 is not fit: 64 requests a queue pair are configured and it holds 32; change that, or use \
             another device",
        ),
        (Config { what: "depth", value: 0, must_be: "a power of two" }, "depth is 0: must be a power of two"),
        (
            Gid { port: port(), why: "no entry of RoCE v2", seen: vec!["0 fe80::1 v1".into()] },
            "no GID to use on mlx5_0:1: no entry of RoCE v2; seen: 0 fe80::1 v1. Set gid_index to insist on one",
        ),
    ]
}

#[test]
fn every_text_is_what_is_written_here() {
    let mut seen = BTreeSet::new();
    for (error, text) in texts() {
        assert_eq!(error.to_string(), text);
        let debug = format!("{error:?}");
        seen.insert(debug.split([' ', '(', '{']).next().unwrap_or_default().to_owned());
    }
    let source = include_str!("../src/error.rs");
    let body = source.split("pub enum Error {").nth(1).expect("the enum");
    let variants = body.split("\n}").next().expect("its end").lines().filter_map(|line| {
        let rest = line.strip_prefix("    ")?;
        rest.starts_with(|first: char| first.is_ascii_uppercase())
            .then(|| rest.split([' ', '(', ',']).next())?
    });
    assert_eq!(seen, variants.map(str::to_owned).collect(), "every variant is read");
}

/// Behind the traits of the proxy each text is told whole, behind what was tried.
#[test]
fn the_proxys_error_ends_with_the_whole_text() {
    for (error, text) in texts() {
        let told = TransportError::from(error).to_string();
        assert!(told.ends_with(text) && told.len() > text.len(), "{told}");
    }
}
