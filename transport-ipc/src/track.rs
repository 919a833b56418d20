//! [`Track`]: a stream with the word that tells how far it is; and the [`Rack`] where they wait to be used again.

use core::time::Duration;
use std::sync::Mutex;

use portway_fifo::cuda::{Context, Stream};
use portway_fifo::{Platform, Region, Words};
use portway_proxy::TransportError;

use crate::memory::lock;

/// Bytes of page-locked memory that words are cut from, and the distance of two.
const SLAB_BYTES: u64 = 4096;
const STRIDE_BYTES: u64 = 128;

/// How long the copy that primes a new stream may take.
const PRIME_TIMEOUT: Duration = Duration::from_secs(10);

/// A stream, and its word in page-locked memory: the stream writes there the number of the last op that it has done.
#[derive(Debug)]
pub(crate) struct Track {
    pub(crate) stream: Stream,
    pub(crate) done: Words,
}

/// Tracks that are idle. A port takes one and gives it back, so that connections come and go without the driver making
/// and freeing streams.
#[derive(Debug, Default)]
pub(crate) struct Rack {
    idle: Mutex<Vec<Track>>,
    slab: Mutex<Option<(Region, u64)>>,
}

impl Rack {
    /// An idle track, or a new one. Calls the driver.
    pub(crate) fn take(&self, context: &Context) -> Result<Track, TransportError> {
        if let Some(track) = lock(&self.idle).pop() {
            return Ok(track);
        }
        let stream = Stream::new(context)?;
        // So that a full launch queue does not block it, even where all streams share one connection.
        stream.prime()?;
        stream.wait(PRIME_TIMEOUT)?;
        Ok(Track { stream, done: self.word(context)? })
    }

    pub(crate) fn give_back(&self, track: Track) {
        lock(&self.idle).push(track);
    }

    fn word(&self, context: &Context) -> Result<Words, TransportError> {
        let mut slab = lock(&self.slab);
        let (region, used_bytes) = match &mut *slab {
            Some(slab) if slab.1 < SLAB_BYTES => slab,
            none_or_full => none_or_full.insert((context.host_memory(SLAB_BYTES)?, 0)),
        };
        let word = region.slice(*used_bytes, 8)?;
        *used_bytes += STRIDE_BYTES;
        Ok(Words::new(word)?)
    }
}
