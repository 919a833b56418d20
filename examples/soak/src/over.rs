//! [`Over`]: what a run goes over.

use std::error::Error;
use std::time::{Duration, Instant};

use portway_fifo::Error::{Driver as Refused, NoLibrary};
use portway_fifo::cuda::Driver;
use portway_proxy::{Loopback, Transport, loopback};
use portway_transport_ib::{self as ib, Ib};
use portway_transport_ipc::{self as ipc, Ipc, WordPlace};

use crate::episode::{self, Ground, LIMIT};
use crate::gpu::Gpu;
use crate::plan::Plan;

pub enum Over {
    /// Between memories of this process; with GPUs, in pinned memory.
    Loopback(Option<[Gpu; 2]>),
    Ib([String; 2]),
    Ipc([Gpu; 2]),
}

/// What was asked for, or what this machine lacks for it.
pub enum Found {
    Over(Over),
    Lacking(String),
}

impl Over {
    pub fn find(arguments: &[&str]) -> Result<Found, Box<dyn Error>> {
        let (ordinals, ipc) = match *arguments {
            [] => return Ok(Found::Over(Over::Loopback(None))),
            ["ib", a, b] => return Ok(Found::Over(Over::Ib([a.into(), b.into()]))),
            ["gpu"] => ([0, 0], false),
            ["ipc", a, b] => ([a.parse()?, b.parse()?], true),
            _ => {
                return Err(format!("no transport {arguments:?}: nothing, gpu, ib A B or ipc A B").into());
            }
        };
        let gpus = Driver::load().and_then(|driver| {
            let count = driver.device_count()?;
            let there = ordinals.iter().all(|&ordinal| ordinal < count);
            if !there {
                return Ok(Err(format!("GPUs {ordinals:?} are needed, {count} found")));
            }
            Ok(Ok([Gpu::open(&driver, ordinals[0])?, Gpu::open(&driver, ordinals[1])?]))
        });
        Ok(match gpus {
            Ok(Ok(gpus)) if ipc => Found::Over(Over::Ipc(gpus)),
            Ok(Ok(gpus)) => Found::Over(Over::Loopback(Some(gpus))),
            Ok(Err(lacking)) => Found::Lacking(lacking),
            Err(lacking @ (NoLibrary { .. } | Refused { call: "cuInit", status: 100, .. })) => {
                Found::Lacking(lacking.to_string())
            }
            Err(error) => return Err(error.into()),
        })
    }

    pub fn plan(&self, seed: u64, episode: u64) -> Plan {
        Plan::draw(seed, episode, matches!(self, Over::Loopback(_)))
    }

    /// Runs an episode on transports of its own: they start anew each time too.
    pub fn run(&self, plan: &Plan) -> Result<(), Box<dyn Error + Send + Sync>> {
        match self {
            Over::Loopback(gpus) => {
                let whole = Loopback::new(loopback::Config { depth: 16, ..Default::default() })?;
                run(plan, [&whole.with_faults(plan.faults), &whole], gpus.as_ref(), false)
            }
            Over::Ib(devices) => {
                let open = |device: &String| {
                    Ib::open(ib::Config { device: Some(device.clone()), ..ib::Config::default() })
                };
                run(plan, [&open(&devices[0])?, &open(&devices[1])?], None, false)
            }
            Over::Ipc(gpus) => {
                let word_place = if plan.words_on_device { WordPlace::Device } else { WordPlace::Pinned };
                let config = ipc::Config { word_place, depth: 16, ..ipc::Config::default() };
                let near = Ipc::open(&gpus[0].context, config)?;
                let far = near.beside(&gpus[1].context)?;
                run(plan, [&near, &far], Some(gpus), true)?;
                for transport in [near, far] {
                    quiet(&transport)?;
                }
                Ok(())
            }
        }?;
        // All of the episode is dropped.
        self.gpus().into_iter().flatten().try_for_each(Gpu::reclaim)
    }

    fn gpus(&self) -> Option<&[Gpu; 2]> {
        match self {
            Over::Loopback(gpus) => gpus.as_ref(),
            Over::Ib(_) => None,
            Over::Ipc(gpus) => Some(gpus),
        }
    }
}

fn run(
    plan: &Plan,
    transports: [&dyn Transport; 2],
    gpus: Option<&[Gpu; 2]>,
    in_device_memory: bool,
) -> Result<(), Box<dyn Error + Send + Sync>> {
    let ground =
        |at: usize| Ground { transport: transports[at], gpu: gpus.map(|gpus| &gpus[at]), in_device_memory };
    episode::run(plan, &[ground(0), ground(1)])
}

/// What closed ports hold is given back in time.
fn quiet(transport: &Ipc) -> Result<(), String> {
    let started = Instant::now();
    loop {
        match transport.quarantined() {
            none if none == Default::default() => return Ok(()),
            some if started.elapsed() > LIMIT => return Err(format!("after {LIMIT:?}: {some:?}")),
            _ => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}
