//! What a rank runs on: a transport, and memory of the kind that it is for.

use std::error::Error;

use portway_fifo::cuda::{Context, Driver};
use portway_fifo::{Heap, Platform, Region};
use portway_proxy::{Loopback, Transport, loopback};
use portway_transport_ib::{self as ib, Ib};
use portway_transport_ipc::{self as ipc, Ipc};

type Allocate = dyn Fn(u64) -> Result<Region, portway_fifo::Error> + Send;

pub struct Machine {
    pub transport: Box<dyn Transport>,
    pub allocate: Box<Allocate>,
}

/// The machines of a run, or why this machine cannot have them.
pub enum Found {
    Machines(Vec<Machine>),
    Lacking(String),
}

fn on_heap(transport: impl Transport + 'static) -> Machine {
    Machine { transport: Box::new(transport), allocate: Box::new(|len_bytes| Heap.allocate(len_bytes)) }
}

pub fn over_loopback(ranks: usize) -> Result<Found, Box<dyn Error>> {
    let loopback = Loopback::new(loopback::Config::default())?;
    Ok(Found::Machines((0..ranks).map(|_| on_heap(loopback.clone())).collect()))
}

/// Verbs: InfiniBand, RoCE, or soft-RoCE. The ranks take the devices in turn; without names, the first device.
pub fn over_ib(ranks: usize, devices: &[String]) -> Result<Found, Box<dyn Error>> {
    let mut machines = Vec::new();
    for rank in 0..ranks {
        let device = devices.get(rank % devices.len().max(1)).cloned();
        match Ib::open(ib::Config { device, ..ib::Config::default() }) {
            Ok(opened) => machines.push(on_heap(opened)),
            Err(
                lacking @ (ib::Error::NoLibrary { .. }
                | ib::Error::NoKernelSupport
                | ib::Error::NoDevice { name: None, .. }),
            ) => return Ok(Found::Lacking(lacking.to_string())),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(Found::Machines(machines))
}

/// CUDA IPC: a rank in the memory of each of these GPUs, one of which may be named twice; without names, a rank a GPU.
pub fn over_ipc(ranks: usize, devices: &[String]) -> Result<Found, Box<dyn Error>> {
    let driver = match Driver::load() {
        Ok(driver) => driver,
        Err(lacking) => return Ok(Found::Lacking(lacking.to_string())),
    };
    let gpus = driver.device_count()?;
    let ordinals = ordinals(ranks, gpus, devices)?;
    if ordinals.len() < 2 || ordinals.iter().any(|&ordinal| ordinal >= gpus) {
        let lacking =
            format!("two GPUs are needed, {gpus} found; `collectives ipc 0 0` has two ranks on one");
        return Ok(Found::Lacking(lacking));
    }
    let mut first: Option<Ipc> = None;
    let mut machines = Vec::new();
    for ordinal in ordinals {
        let context = Context::new(&driver, ordinal)?;
        let transport = match &first {
            None => Ipc::open(&context, ipc::Config::default())?,
            Some(first) => first.beside(&context)?,
        };
        first.get_or_insert_with(|| transport.clone());
        let allocate = move |len_bytes| context.device_memory(len_bytes);
        machines.push(Machine { transport: Box::new(transport), allocate: Box::new(allocate) });
    }
    Ok(Found::Machines(machines))
}

/// The GPUs by these names, or, without names, the first ones, one a rank.
pub fn ordinals(ranks: usize, gpus: u32, names: &[String]) -> Result<Vec<u32>, Box<dyn Error>> {
    if names.is_empty() {
        return Ok((0..gpus.min(ranks as u32)).collect());
    }
    names.iter().map(|name| Ok(name.parse().map_err(|_| format!("{name} is no GPU's number"))?)).collect()
}
