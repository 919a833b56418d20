//! [`Config`]: which device, how its queue pairs are set up, and how long they try.

use core::time::Duration;
use std::sync::Arc;

use portway_fifo::Platform;

use crate::error::Error;
use crate::message::MAX_QUEUE_PAIRS;

/// How to open a transport. `Config { device: Some("mlx5_0".into()), ..Config::default() }`.
#[derive(Clone, Debug)]
pub struct Config {
    /// The device by name. Otherwise the nearest to `gpu` that has an active port, or the first by name.
    pub device: Option<String>,
    /// The device's port, counting from 1. Otherwise its first active one.
    pub port: Option<u8>,
    /// The GPU whose memory is moved, if any.
    pub gpu: Option<Gpu>,
    /// The GID by its index in the port's table. Otherwise the pair of RoCE v2, routable and matching the peer; a port
    /// with more than 16 such GIDs needs this.
    pub gid_index: Option<u8>,
    /// Index of the partition key in the port's table. 0 unless told otherwise.
    pub pkey_index: u16,
    /// Service level, 0 to 15. On RoCE the priority of the Ethernet frame. 0 unless told otherwise.
    pub service_level: u8,
    /// Traffic class: on RoCE v2 the DSCP, shifted left by 2, and the ECN bits. 0 unless told otherwise.
    pub traffic_class: u8,
    /// The wait for an acknowledgement is 4.096 µs times two to this, 1 to 31. 17 (0.54 s) unless told otherwise. 0
    /// would switch the timer off, and a lost packet would be waited for without end.
    pub timeout: u8,
    /// How often an unacknowledged request is sent again, 1 to 6. 6 unless told otherwise. 7 is without limit on some
    /// devices.
    pub retries: u8,
    /// How long a peer that is not ready asks for, as the specification enumerates it: 1 (10 µs) to 31 (0.49 s). 12
    /// (0.64 ms) unless told otherwise.
    pub rnr_timer: u8,
    /// How often a peer may not be ready, 1 to 6. 6 unless told otherwise. 7 would be without limit.
    pub rnr_retries: u8,
    /// Queue pairs of a connection, 1 to 64. 1 unless told otherwise. A port's lanes are dealt to them in turn; all fail
    /// together.
    pub queue_pairs: usize,
    /// Requests that a queue pair holds, 64 to 16,384. 512 unless told otherwise. An op is one request a put, more if the
    /// put is longer than the device's longest message, and one a signal.
    pub depth: u32,
    /// Every how-manieth request asks for a completion, 1 to half of `depth`. 32 unless told otherwise.
    pub signal_every: u32,
}

/// The GPU that a transport serves.
#[derive(Clone, Debug)]
pub struct Gpu {
    /// Its ordinal, as in [`portway_fifo::Place::Device`].
    pub ordinal: u32,
    /// Its PCI address, `0000:3b:00.0`.
    pub pci_address: String,
    /// Its device attribute `GPU_DIRECT_RDMA_WRITES_ORDERING`. Below 100 (owner) it is refused: a kernel that sees the
    /// signal could miss the data.
    pub write_ordering: i32,
    /// Where signal words are allocated: the device memory of the same GPU.
    pub platform: Arc<dyn Platform + Send + Sync>,
}

/// `CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER`.
const ORDERED_FOR_OWNER: i32 = 100;

impl Default for Config {
    fn default() -> Self {
        Config {
            device: None,
            port: None,
            gpu: None,
            gid_index: None,
            pkey_index: 0,
            service_level: 0,
            traffic_class: 0,
            timeout: 17,
            retries: 6,
            rnr_timer: 12,
            rnr_retries: 6,
            queue_pairs: 1,
            depth: 512,
            signal_every: 32,
        }
    }
}

impl Config {
    /// When a request that nobody acknowledges becomes an error: the first try and the retries. A device may take up to
    /// four times as long.
    pub fn gives_up_after(&self) -> Duration {
        let wait_ns = 4096u64 << self.timeout.min(31);
        Duration::from_nanos(wait_ns) * (u32::from(self.retries) + 1)
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        let within = |what, value: u64, low: u64, high: u64, must_be| {
            if (low..=high).contains(&value) { Ok(()) } else { Err(Error::Config { what, value, must_be }) }
        };
        within("port", self.port.unwrap_or(1).into(), 1, 255, "1 or more")?;
        within("service_level", self.service_level.into(), 0, 15, "0 to 15")?;
        within("timeout", self.timeout.into(), 1, 31, "1 to 31")?;
        within("retries", self.retries.into(), 1, 6, "1 to 6")?;
        within("rnr_timer", self.rnr_timer.into(), 1, 31, "1 to 31")?;
        within("rnr_retries", self.rnr_retries.into(), 1, 6, "1 to 6")?;
        within("queue_pairs", self.queue_pairs as u64, 1, MAX_QUEUE_PAIRS as u64, "1 to 64")?;
        within("depth", self.depth.into(), 64, 16_384, "64 to 16,384")?;
        within("signal_every", self.signal_every.into(), 1, u64::from(self.depth / 2), "1 to half of depth")?;
        if let Some(gpu) = &self.gpu {
            let ordering = u64::try_from(gpu.write_ordering).unwrap_or(0);
            let must_be = "100 (owner) or more";
            within("the GPU's write_ordering", ordering, ORDERED_FOR_OWNER as u64, u64::MAX, must_be)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use portway_fifo::Heap;

    use super::*;

    fn refused(change: impl Fn(&mut Config)) -> Option<&'static str> {
        let mut config = Config::default();
        change(&mut config);
        match config.check() {
            Ok(()) => None,
            Err(Error::Config { what, .. }) => Some(what),
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn numbers_that_would_wait_without_end_are_refused() {
        assert_eq!(refused(|_| ()), None);
        assert_eq!(refused(|c| c.timeout = 0), Some("timeout"));
        assert_eq!(refused(|c| c.timeout = 32), Some("timeout"));
        assert_eq!(refused(|c| c.retries = 7), Some("retries"));
        assert_eq!(refused(|c| c.rnr_retries = 7), Some("rnr_retries"));
        assert_eq!(refused(|c| c.depth = 63), Some("depth"));
        assert_eq!(refused(|c| c.signal_every = 257), Some("signal_every"));
        assert_eq!(refused(|c| c.signal_every = 256), None);
        assert_eq!(refused(|c| c.queue_pairs = 0), Some("queue_pairs"));
        assert_eq!(refused(|c| c.service_level = 16), Some("service_level"));
    }

    #[test]
    fn a_gpu_without_write_ordering_is_refused() {
        let gpu = |write_ordering| Gpu {
            ordinal: 0,
            pci_address: "0000:3b:00.0".into(),
            write_ordering,
            platform: Arc::new(Heap),
        };
        assert_eq!(refused(|c| c.gpu = Some(gpu(0))), Some("the GPU's write_ordering"));
        assert_eq!(refused(|c| c.gpu = Some(gpu(-1))), Some("the GPU's write_ordering"));
        assert_eq!(refused(|c| c.gpu = Some(gpu(100))), None);
    }

    #[test]
    fn the_time_to_an_error_follows_timeout_and_retries() {
        let config = Config { timeout: 14, retries: 3, ..Config::default() };
        assert_eq!(config.gives_up_after().as_millis(), 268);
        assert_eq!(Config::default().gives_up_after().as_millis(), 3758);
    }
}
