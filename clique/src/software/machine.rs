//! The devices, their memory, and each process's driver with its lock.

use std::collections::HashMap;

/// Which allocation, communicator or caller holds a driver's lock.
pub(super) type Holder = u64;

/// What all processes of a fabric share. One lock around it stands for nothing: it is never held while something waits.
#[derive(Debug)]
pub(super) struct Machine {
    pub(super) uuids: Vec<String>,
    /// How many kernels are resident on each device.
    pub(super) resident: Vec<u32>,
    /// By process: who holds the driver's lock.
    pub(super) drivers: Vec<Option<Holder>>,
    /// By address.
    pub(super) memory: HashMap<u64, Vec<u8>>,
    /// By stream: kernels that are not done.
    pub(super) streams: HashMap<usize, u32>,
    next: u64,
}

/// The distance between two allocations.
const STRIDE: u64 = 1 << 32;

impl Machine {
    pub(super) fn new(devices: u32) -> Self {
        Machine {
            uuids: (0..devices).map(|device| format!("GPU-software-{device}")).collect(),
            resident: vec![0; devices as usize],
            drivers: Vec::new(),
            memory: HashMap::new(),
            streams: HashMap::new(),
            next: 1,
        }
    }

    /// A number that nothing else has.
    pub(super) fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// One step of an allocation: takes the driver's lock, and, with it, waits until the device runs no kernel. True once
    /// it is done; the lock is free again then.
    ///
    /// That it waits with the lock is what makes a kernel that waits for another participant dangerous.
    pub(super) fn allocate(&mut self, process: usize, device: u32, holder: Holder) -> bool {
        match self.drivers[process] {
            None => self.drivers[process] = Some(holder),
            Some(other) if other != holder => return false,
            Some(_) => {}
        }
        if self.resident[device as usize] > 0 {
            return false;
        }
        self.drivers[process] = None;
        true
    }

    /// Gives the lock up if this one has it.
    pub(super) fn release(&mut self, process: usize, holder: Holder) {
        if self.drivers[process] == Some(holder) {
            self.drivers[process] = None;
        }
    }

    pub(super) fn map(&mut self, len_bytes: usize) -> u64 {
        let address = self.number() * STRIDE;
        self.memory.insert(address, vec![0; len_bytes]);
        address
    }

    /// Memory by an address inside an allocation.
    pub(super) fn bytes(&mut self, address: u64, len_bytes: usize) -> Option<&mut [u8]> {
        let base = address / STRIDE * STRIDE;
        let offset = (address - base) as usize;
        self.memory.get_mut(&base)?.get_mut(offset..offset.checked_add(len_bytes)?)
    }

    pub(super) fn launch(&mut self, device: u32, stream: usize) {
        self.resident[device as usize] += 1;
        *self.streams.entry(stream).or_default() += 1;
    }

    pub(super) fn complete(&mut self, device: u32, stream: usize) {
        self.resident[device as usize] -= 1;
        if let Some(count) = self.streams.get_mut(&stream) {
            *count -= 1;
        }
    }
}
