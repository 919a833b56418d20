//! [`Gpu`]: a device whose kernels make the calls of a side, a block of one thread for each caller.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use bytemuck::bytes_of;
use portway_fifo::cuda::nvrtc::Compiler;
use portway_fifo::cuda::{Context, Driver, Function, Module, Stream};
use portway_fifo::{Platform, Region, Words};
use portway_proxy::{PortChannel, PortChannelHandle, header};

use crate::episode::{LIMIT, Result, Role};
use crate::plan::{Call, PLACE_BYTES};

/// Behind the text of `portway/port_channel.cuh`.
const KERNEL: &str = include_str!("kernel.cu");

pub struct Gpu {
    pub context: Context,
    kernel: Function,
    stream: Stream,
}

/// What a block gets: `Role` of `kernel.cu`, of which the handle is the first part.
const NUMBERS: usize = 4;
const ROLE_BYTES: u64 = (size_of::<PortChannelHandle>() + 8 * NUMBERS) as u64;
/// What a block leaves, in pinned memory: 1 + its status, and how many calls it made.
const RESULT_WORDS: u64 = 2;

impl Gpu {
    pub fn open(driver: &Arc<Driver>, ordinal: u32) -> core::result::Result<Self, portway_fifo::Error> {
        let context = Context::new(driver, ordinal)?;
        for warning in context.warnings() {
            eprintln!("warning: {warning} {}", warning.remedy());
        }
        let image = compile(&Compiler::load()?, context.attributes().compute_capability)?;
        // SAFETY: the image comes from the compiler.
        let module = unsafe { Module::load(&context, &image) }?;
        Ok(Gpu { kernel: module.function("call")?, stream: Stream::new(&context)?, context })
    }

    /// Writes down what the callers are to do. Allocates, so nothing may run by then that waits for this thread.
    pub fn prepare(&self, callers: &[(&PortChannel, Role<'_>)]) -> Result<Prepared> {
        let count = callers.len() as u64;
        let roles = self.context.host_memory(ROLE_BYTES * count)?;
        let results = Words::new(self.context.host_memory(8 * RESULT_WORDS * count)?)?;
        let mut texts = Vec::new();
        for (number, (channel, role)) in callers.iter().enumerate() {
            let (kind, dialogue) = match *role {
                Role::Receive(dialogue) => (0u64, dialogue),
                Role::Send(dialogue) => (1, dialogue),
                Role::Once(dialogue) => (2, dialogue),
            };
            let words: Vec<u64> = match role {
                Role::Receive(_) => vec![dialogue.signals()],
                _ => dialogue.calls.iter().map(encode).collect(),
            };
            let text = self.context.host_memory(8 * words.len() as u64)?;
            text.write(0, bytemuck::cast_slice(&words))?;
            let result = results.region().address() + 8 * RESULT_WORDS * number as u64;
            let numbers: [u64; NUMBERS] = [text.address(), words.len() as u64, kind, result];
            let role = [bytes_of(&channel.handle()), bytes_of(&numbers)].concat();
            roles.write(ROLE_BYTES * number as u64, &role)?;
            texts.push(text);
        }
        Ok(Prepared { blocks: callers.len() as u32, roles, texts, results })
    }

    /// Launches the callers. The kernel must be [ended](Running::end) before anything is reclaimed.
    pub fn launch(&self, prepared: Prepared) -> Result<Running> {
        let Prepared { blocks, roles, texts, results } = prepared;
        let (roles_at, place_bytes) = (roles.address(), PLACE_BYTES);
        let parameters = [bytes_of(&roles_at), bytes_of(&place_bytes)];
        // SAFETY: the kernel takes an address and a number. Roles, texts and results live in what is returned, and the
        // words of the channels in the episode's; what of them is dropped earlier their context keeps until it
        // reclaims, which waits for the kernel.
        unsafe { self.kernel.launch(&self.stream, [blocks, 1, 1], [1; 3], 0, &parameters) }?;
        Ok(Running { stream: self.stream.clone(), results, _memories: (roles, texts) })
    }

    /// Frees what an episode has dropped. Nothing of it may be left, once threads that are ending have ended.
    pub fn reclaim(&self) -> Result<()> {
        let started = Instant::now();
        loop {
            self.context.reclaim()?;
            match self.context.quarantined() {
                none if none == Default::default() => return Ok(()),
                left if started.elapsed() > LIMIT => {
                    return Err(format!("waited {LIMIT:?} to free what an episode left: {left:?}").into());
                }
                _ => thread::sleep(Duration::from_millis(1)),
            }
        }
    }
}

pub fn compile(
    compiler: &Compiler,
    capability: (u32, u32),
) -> core::result::Result<Vec<u8>, portway_fifo::Error> {
    compiler.compile("kernel.cu", &[header::PORT_CHANNEL, KERNEL].concat(), capability, &[])
}

/// A call as a word: the length above two bits.
fn encode(call: &Call) -> u64 {
    match *call {
        Call::Flush => 0,
        Call::Signal => 1,
        Call::Put { len_bytes, signal } => len_bytes << 2 | 2 | u64::from(signal),
    }
}

/// What a kernel is to do.
pub struct Prepared {
    blocks: u32,
    roles: Region,
    texts: Vec<Region>,
    results: Words,
}

/// A kernel that was launched.
pub struct Running {
    stream: Stream,
    results: Words,
    _memories: (Region, Vec<Region>),
}

impl Running {
    /// Waits for a block's end.
    pub fn result(&self, number: usize) -> Result<()> {
        let word = |at: usize| -> &AtomicU64 { &self.results[RESULT_WORDS as usize * number + at] };
        let started = Instant::now();
        loop {
            match word(0).load(Ordering::Acquire) {
                0 if started.elapsed() > 3 * LIMIT => {
                    let text = format!("waited {:?} for block {number}: it has not ended", 3 * LIMIT);
                    return Err(text.into());
                }
                0 => thread::sleep(Duration::from_micros(50)),
                1 => return Ok(()),
                status => {
                    let after = word(1).load(Ordering::Relaxed);
                    return Err(Refused { status: status - 1, after }.into());
                }
            }
        }
    }

    /// Waits until the kernel has left the device.
    pub fn end(self) -> Result<()> {
        Ok(self.stream.wait(3 * LIMIT)?)
    }
}

/// A call of a kernel that did not succeed.
#[derive(Debug)]
pub struct Refused {
    status: u64,
    after: u64,
}

impl Refused {
    pub fn timed_out(&self) -> bool {
        self.status == 1
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a kernel's call returned status {} after {} calls", self.status, self.after)
    }
}

impl std::error::Error for Refused {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_compiles() {
        match Compiler::load() {
            Ok(compiler) => assert!(!compile(&compiler, (9, 0)).unwrap().is_empty()),
            Err(lacking) => println!("waived: {lacking}"),
        }
    }
}
