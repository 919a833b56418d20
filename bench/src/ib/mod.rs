//! The `ib` layer: the stack over the InfiniBand transport, beside a raw loop over plain verbs and beside perftest.

pub mod perftest;
mod raw;
mod recorded;
mod rows;

use portway_fifo::Heap;
use portway_proxy::TransportError;
use portway_transport_ib::{Config, Error, Ib, Verbs};

use crate::args::Args;
use crate::failure::Failure;
use crate::layer::{Layer, Run};
use crate::machine::Pinning;
use crate::put::latency::{Spoil, through};
use crate::put::wired::{Wired, Wiring};
use crate::put::{load, throughput};
use crate::report::{Control, Report, TimeUnit};

/// See the module.
pub const LAYER: Layer = Layer {
    name: NAME,
    measures: "the InfiniBand transport: put and signal over a device, until the peer has both",
    needs: "libibverbs and an RDMA device",
    find,
    flags: &[
        "begin",
        "end",
        "factor",
        "devices",
        "gid_index",
        "queue_pairs",
        "tx_depth",
        "inline_bytes",
        "post_list",
        "rate",
        "histogram",
        "unsorted",
    ],
    transport: "ib",
    unit: TimeUnit::Microseconds,
};

const NAME: &str = "ib";

/// Waived where there is no device; one that was asked for by name and is not there is a mistake.
fn find(args: &Args) -> Result<Run, String> {
    let opened = Verbs::load().and_then(|verbs| open(args, &verbs, 0));
    match opened {
        Err(Error::NoDevice { name: Some(_), present }) if !present.is_empty() => Ok(run),
        Err(
            lacking @ (Error::NoLibrary { .. }
            | Error::NoKernelSupport
            | Error::NoDevice { .. }
            | Error::NoActivePort { .. }),
        ) => Err(lacking.to_string()),
        _ => Ok(run),
    }
}

/// The transport of an end.
fn open(args: &Args, verbs: &Verbs, end: usize) -> Result<Ib, Error> {
    let device = args.devices.get(end).or(args.devices.last()).cloned();
    let config = Config {
        device,
        gid_index: args.gid_index,
        queue_pairs: args.queue_pairs as usize,
        // A put and its signal are a request each.
        depth: 2 * args.tx_depth as u32,
        ..Config::default()
    };
    Ib::open_with(verbs, config)
}

/// Both ends' transports.
fn open_both(args: &Args, verbs: &Verbs, measurement: &str) -> Result<[Ib; 2], Failure> {
    let open = |end| open(args, verbs, end).map_err(|error| failed(measurement, error.into()));
    Ok([open(0)?, open(1)?])
}

fn failed(measurement: &str, error: TransportError) -> Failure {
    Failure::proxy(measurement, error.into())
}

/// Two ends over the device, with an engine.
fn wire(args: &Args, measurement: &str, len_bytes: u64, pinning: &Pinning) -> Result<Wired, Failure> {
    let verbs = Verbs::load().map_err(|error| failed(measurement, error.into()))?;
    let [a, b] = open_both(args, &verbs, measurement)?;
    let channels = args.queue_pairs as usize;
    let wiring = Wiring {
        transports: [&a, &b],
        signal_word: &|transport| Ok(transport.signal_word()?),
        channels,
        engine: portway_proxy::Config {
            batch: args.post_list as usize,
            window: (args.tx_depth as usize).next_power_of_two(),
            max_channels: 2 * channels,
            deadline: args.deadline(),
        },
        core: pinning.engine(),
    };
    Wired::between(&Heap, len_bytes, wiring).map_err(|source| Failure::proxy(measurement, source))
}

fn run(args: &Args, report: &mut Report) -> Result<(), Failure> {
    let pinning = Pinning::new(&report.machine);
    let setup = raw::setup(args)?;
    let gid = |end: usize| setup.gid_indices[end].map_or("none".into(), |index| index.to_string());
    let [a, b] = &setup.devices;
    report.note(NAME, format!("device {a}, GID index {}, to {b}, GID index {}", gid(0), gid(1)));
    let (q, t, l) = (args.queue_pairs, args.tx_depth, args.post_list);
    report.note(NAME, format!("-q {q} queue pairs, each with -t {t} puts under way, -l {l} posted together"));
    report.note(NAME, pinning.describe(1).replace("consumer", "engine").replace("producers", "both ends"));
    report.note(
        NAME,
        "one thread plays both ends; one engine serves both. raw-verbs = the same messages by the",
    );
    report.note(
        NAME,
        "same thread without an engine: the same chain of write and inline signal, posted and polled by",
    );
    report.note(NAME, "it over queue pairs of the same settings. wrong counts both");
    let perftest = perftest::Perftest::find();
    match &perftest {
        Some(_) => {
            report.note(
                NAME,
                "ib_write_lat, ib_write_bw = perftest, two processes: one write a message and no signal",
            );
        }
        None => report.note(NAME, "perftest: waived: ib_write_lat and ib_write_bw are not installed"),
    }
    rows::latency(args, &pinning, &setup, perftest.as_ref(), report)?;
    rows::throughput(args, &pinning, &setup, perftest.as_ref(), report)?;
    report.note(NAME, "load = puts with signals due at a fixed rate, of the smallest size; from due to the signal seen by the");
    report.note(NAME, "peer, lateness included: ONE WAY, not halved");
    report.results.extend(load::rows_of(args, NAME, |size, kops| {
        let name = load::name(NAME, size, kops);
        let wired = wire(args, &name, size * throughput::window(size), &pinning)?;
        load::through(args, &name, wired, size, kops, None, &pinning)
    })?);
    if args.check() {
        for control in controls(args, &pinning, perftest.is_some())? {
            report.control(control);
        }
    }
    Ok(())
}

/// Runs in which one payload has a flipped bit, and one signal comes without its data, to see that they are found.
fn controls(args: &Args, pinning: &Pinning, has_perftest: bool) -> Result<Vec<Control>, Failure> {
    const SIZE_BYTES: u64 = 64;
    let mut args = args.clone();
    args.iterations = Some(100);
    let args = &args;
    let name = "ib, negative control";
    let mut latency = 0;
    for spoil in [Spoil::FlippedBit, Spoil::NoData] {
        let wired = wire(args, name, SIZE_BYTES, pinning)?;
        latency += through(args, name, wired, SIZE_BYTES, Some((spoil, 0)), pinning)?.wrong;
    }
    let wired = || wire(args, name, SIZE_BYTES * throughput::window(SIZE_BYTES), pinning);
    let throughput = throughput::through(args, name, wired()?, SIZE_BYTES, Some(0), pinning)?;
    let load = load::through(args, name, wired()?, SIZE_BYTES, load::KOPS.0, Some(0), pinning)?;
    let throughput = throughput.wrong.unwrap_or(0);
    let mut controls = vec![
        Control::new(NAME, "latency beside raw verbs", 2, latency),
        Control::new(NAME, "throughput beside raw verbs", 1, throughput),
        Control::new(NAME, "load", 1, load.wrong),
    ];
    if has_perftest {
        // The same messages of ours, beside another reference.
        controls.push(Control::new(NAME, "latency beside ib_write_lat", 2, latency));
        controls.push(Control::new(NAME, "throughput beside ib_write_bw", 1, throughput));
    }
    Ok(controls)
}
