//! [`Error`]: what the transport says, and how it looks behind the traits of the proxy.

use core::fmt;
use core::time::Duration;
use std::sync::Arc;

use portway_fifo::Place;
use portway_proxy::TransportError;

use crate::config::Way;

/// Why the transport refuses or fails. Behind the traits of `portway-proxy` it is the source of a
/// [`TransportError::Device`], where [`Error::of`] finds it; `Gone` is a [`TransportError::Remote`] there, and `Silent` a
/// [`TransportError::Timeout`].
///
/// By who is at fault:
/// - **the caller**: `Config`, `Memory`, `OtherDevice`, `Pool`, `SameProcess`;
/// - **the peer**: `Gone`, `Refused`, `Released`, `Silent`, `Stale`;
/// - **the machine or how it is set up**: `Driver`, `Export`, `Hidden`, `NoPeerAccess`, `NoWay`, `OtherMachine`, `System`, `Unfit`;
/// - **the application, which holds up the driver**: `Stalled`, `Unquiesced`.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A number in the configuration is out of range.
    #[error("configuration of the transport: {what} is {value}, must be {must_be}")]
    Config {
        /// Which one.
        what: &'static str,
        /// What it is.
        value: u64,
        /// What it may be.
        must_be: &'static str,
    },
    /// Memory that no GPU reaches.
    #[error("memory at {address:#x} ({place:?}) is not reached by the GPU: allocate it through its context")]
    Memory {
        /// Where it begins.
        address: u64,
        /// Where it lies.
        place: Place,
    },
    /// Memory of another device than the transport's.
    #[error(
        "memory of device {seen}, registered with the transport of device {expected}: register it with one of device {seen}"
    )]
    OtherDevice {
        /// The transport's device.
        expected: u32,
        /// The memory's.
        seen: u32,
    },
    /// Memory of a stream-ordered pool, which is not exported.
    #[error(
        "memory at {address:#x} comes from a stream-ordered pool (cuMemAllocAsync), which is not exported: use \
         cuMemAlloc or cuMemCreate"
    )]
    Pool {
        /// Where it begins.
        address: u64,
    },
    /// The driver failed to export memory, in every form that it has. A later try may succeed. Peers in this process get the
    /// same, although they need no form: an export does not know who will import it.
    #[error(
        "memory at {address:#x} ({len_bytes} bytes) is exported in no form, expected one or more: {}; export it again \
         once the cause is gone, or register memory of another allocation", failures(.tried)
    )]
    Export {
        /// Where it begins.
        address: u64,
        /// Its length.
        len_bytes: u64,
        /// What the driver said to each form; to the question what memory it is, if there is none.
        tried: Vec<(Option<Way>, portway_fifo::Error)>,
    },
    /// The driver refused what a put, a signal or a completion needs. The port has failed with it.
    #[error(
        "{operation} of {len_bytes} bytes to {peer}: {source}; the port has ended, connect another once the device works"
    )]
    Driver {
        /// Whose port.
        peer: String,
        /// What was submitted.
        operation: &'static str,
        /// Bytes of the op that it belongs to.
        len_bytes: u64,
        /// The call, its status and the status's name.
        source: portway_fifo::Error,
    },
    /// A legacy handle within one process, where the driver does not open it.
    #[error("a legacy handle of this very process: open the second transport with Ipc::beside")]
    SameProcess,
    /// The peer's process has ended, or it closed its transport.
    #[error("{peer} is gone: {why}; connect to a new endpoint of it, and import anew")]
    Gone {
        /// Who.
        peer: String,
        /// What showed it.
        why: &'static str,
    },
    /// The peer did not answer.
    #[error(
        "{peer} did not answer within {after:?}: it is stopped, or overloaded; `Config::ask_timeout` says how long to wait"
    )]
    Silent {
        /// Who.
        peer: String,
        /// How long it was waited for.
        after: Duration,
    },
    /// The peer is of another user.
    #[error("{peer} runs as user {seen}, expected {expected}: both ends have to be of one user")]
    Refused {
        /// Who.
        peer: String,
        /// This process's user.
        expected: u32,
        /// The peer's.
        seen: u32,
    },
    /// The peer has released what it had exported.
    #[error(
        "{peer} has released memory {index}, whose export this is: ask it for an export of what it uses now"
    )]
    Released {
        /// Who.
        peer: String,
        /// Its number over there.
        index: u32,
    },
    /// The peer has freed memory that was imported here, and uses its addresses for something else.
    #[error(
        "the imported memory has been freed by {peer}, which uses its addresses again: forget the import, and ask for a \
         new export"
    )]
    Stale {
        /// Who.
        peer: String,
    },
    /// This process does not see the device that the memory lies on.
    #[error(
        "device {} is not visible to this process (CUDA_VISIBLE_DEVICES={}), make it so: {why}", uuid(.device),
        .visible.as_deref().unwrap_or("unset")
    )]
    Hidden {
        /// The device's UUID.
        device: [u8; 16],
        /// The variable in this process.
        visible: Option<String>,
        /// What failed for that reason.
        why: String,
    },
    /// The two devices do not reach each other's memory.
    #[error(
        "device {} does not reach the memory of device {}: no peer access; `nvidia-smi topo -p2p r` shows which do",
        uuid(.ours), uuid(.theirs)
    )]
    NoPeerAccess {
        /// UUID of the transport's device.
        ours: [u8; 16],
        /// UUID of the peer's.
        theirs: [u8; 16],
    },
    /// None of the ways to the peer's memory is open.
    #[error("no way of `Config::ways` to the memory of {peer} is open: {}", list(.tried))]
    NoWay {
        /// Whose memory.
        peer: String,
        /// Each way that was tried, and why it is not open.
        tried: Vec<(Way, String)>,
    },
    /// The peer runs on another machine.
    #[error(
        "{peer} runs on another machine: this transport connects GPUs of one, and the verbs transport the others"
    )]
    OtherMachine {
        /// Who.
        peer: String,
    },
    /// The operating system refused.
    #[error(
        "{operation} failed with errno {errno} ({}): see the limits of this process, and what it may do",
        std::io::Error::from_raw_os_error(*.errno)
    )]
    System {
        /// What was tried.
        operation: &'static str,
        /// The system's number of the error.
        errno: i32,
    },
    /// The device lacks what the transport needs.
    #[error("device {device} is not fit: {why}; use another device or transport")]
    Unfit {
        /// Its name.
        device: String,
        /// What it lacks.
        why: &'static str,
    },
    /// Nothing that was submitted completes: the driver, or the device, is held up.
    #[error("the executor for {peer} is stalled {place} for {after:?}; {}", likely(.causes))]
    Stalled {
        /// Whose executor.
        peer: String,
        /// Where it stands.
        place: StalledIn,
        /// What is probably behind it, the likeliest first.
        causes: &'static [Cause],
        /// How long nothing has happened.
        after: Duration,
    },
    /// A closed port whose work did not finish: its stream and its memory are given up.
    #[error(
        "what was submitted to {peer} is not done {after:?} after the port was closed: stream and memory stay in \
         quarantine until the process ends"
    )]
    Unquiesced {
        /// The peer.
        peer: String,
        /// How long it was waited for.
        after: Duration,
    },
}

/// Where an executor is stalled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StalledIn {
    /// The driver's call that starts a copy does not return.
    Copy,
    /// The driver's call that writes a value does not return.
    WriteValue,
    /// Another call of the driver does not return.
    Driver,
    /// Every call has returned, and the stream does not run.
    Stream,
}

impl fmt::Display for StalledIn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            StalledIn::Copy => "in the driver's call for a copy",
            StalledIn::WriteValue => "in the driver's call for a value",
            StalledIn::Driver => "in the driver",
            StalledIn::Stream => "in its stream, which does not run",
        })
    }
}

/// What is probably behind a stall.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// A call that waits for the device, like `cudaFree`, while a kernel waits for this put.
    Free,
    /// All streams share one connection, and work of another one is in front: a full launch queue, or a copy that waits for
    /// the kernel which waits for this put.
    OneConnection,
    /// The first launch of a kernel that is loaded lazily, while another kernel waits for this put.
    LazyLoading,
    /// Work that the device has not finished.
    Device,
}

impl Cause {
    /// What to do about it.
    pub fn remedy(self) -> &'static str {
        match self {
            Cause::Free => "Free device memory only while no kernel waits for a put.",
            Cause::OneConnection => "Raise CUDA_DEVICE_MAX_CONNECTIONS, or unset it.",
            Cause::LazyLoading => "Set CUDA_MODULE_LOADING=EAGER, or load every kernel beforehand.",
            Cause::Device => "See what else the device has to do.",
        }
    }
}

/// The causes and what to do about them, as one sentence each.
fn likely(causes: &[Cause]) -> String {
    let names: Vec<String> = causes.iter().map(Cause::to_string).collect();
    let remedies: Vec<&str> = causes.iter().map(|cause| cause.remedy()).collect();
    format!("likely: {}. {}", names.join("; or "), remedies.join(" "))
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Cause::Free => "a call that waits for the device, such as cudaFree, is in progress",
            Cause::OneConnection => {
                "work of another stream is in front, since CUDA_DEVICE_MAX_CONNECTIONS is 1"
            }
            Cause::LazyLoading => "the first launch of a kernel, which is loaded lazily",
            Cause::Device => "the device is busy with other work",
        })
    }
}

/// A UUID as `nvidia-smi` writes it.
pub(crate) fn uuid(bytes: &[u8; 16]) -> String {
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

fn list(tried: &[(Way, String)]) -> String {
    let tried: Vec<String> = tried.iter().map(|(way, why)| format!("{way:?}: {why}")).collect();
    if tried.is_empty() { "nothing to try".into() } else { tried.join("; ") }
}

fn failures(tried: &[(Option<Way>, portway_fifo::Error)]) -> String {
    let tried = tried.iter().map(|(way, error)| match way {
        Some(way) => format!("{way:?}: {error}"),
        None => error.to_string(),
    });
    tried.collect::<Vec<_>>().join("; ")
}

/// The driver's status, or errno; 0 if there is none.
fn status(error: &portway_fifo::Error) -> i32 {
    match error {
        portway_fifo::Error::Driver { status, .. } => *status,
        _ => 0,
    }
}

impl Error {
    /// The transport's own error behind one of the proxy's.
    pub fn of(error: &TransportError) -> Option<&Error> {
        match error {
            TransportError::Device { source: Some(source), .. } => {
                let source: &(dyn core::error::Error + 'static) = &**source;
                source.downcast_ref()
            }
            _ => None,
        }
    }

    pub(crate) fn system(operation: &'static str) -> impl Fn(rustix::io::Errno) -> Error {
        move |errno| Error::System { operation, errno: errno.raw_os_error() }
    }

    /// The operation that the proxy's error names.
    fn operation(&self) -> &'static str {
        match self {
            Error::Config { .. } => "opening the transport",
            Error::Memory { .. } => "registering memory that the GPU does not reach",
            Error::OtherDevice { .. } => "registering memory of another device",
            Error::Pool { .. } => "exporting memory of a stream-ordered pool",
            Error::Export { .. } => "exporting memory",
            Error::Driver { operation, .. } => operation,
            Error::SameProcess => "opening a legacy handle of this process",
            Error::Gone { .. } => "a connection",
            Error::Silent { .. } => "waiting for a peer's answer",
            Error::Refused { .. } => "reaching a peer of another user",
            Error::Released { .. } => "importing memory that the peer has released",
            Error::Stale { .. } => "binding memory that the peer has freed",
            Error::Hidden { .. } => "reaching a device that is hidden from this process",
            Error::NoPeerAccess { .. } => "peer access between the two devices",
            Error::NoWay { .. } => "opening the peer's memory",
            Error::OtherMachine { .. } => "reaching a peer on another machine",
            Error::System { operation, .. } => operation,
            Error::Unfit { .. } => "opening the device",
            Error::Stalled { place: StalledIn::Stream, causes, .. } => match causes {
                [Cause::LazyLoading, Cause::OneConnection] => {
                    "copy: the executor's stream is stalled (likely: lazy first launch, or one connection)"
                }
                [Cause::LazyLoading, ..] => {
                    "copy: the executor's stream is stalled (likely: lazy first launch)"
                }
                [Cause::OneConnection, ..] => {
                    "copy: the executor's stream is stalled (likely: one connection)"
                }
                _ => "copy: the executor's stream is stalled (likely: the device is busy)",
            },
            Error::Stalled { causes: [_, Cause::OneConnection], .. } => {
                "copy: the executor is stalled in the driver (likely: cudaFree in progress, or one connection)"
            }
            Error::Stalled { .. } => {
                "copy: the executor is stalled in the driver (likely: cudaFree in progress)"
            }
            Error::Unquiesced { .. } => "quiescing the port; its memory stays bound",
        }
    }
}

impl From<Error> for TransportError {
    fn from(error: Error) -> Self {
        let status = match &error {
            Error::System { errno, .. } => *errno,
            Error::Driver { source, .. } => status(source),
            Error::Export { tried, .. } => tried.first().map_or(0, |(_, source)| status(source)),
            _ => 0,
        };
        let operation = error.operation();
        match error {
            Error::Silent { peer, after } => TransportError::Timeout { what: "an answer", peer, after },
            Error::Gone { peer, why } => {
                TransportError::Remote { peer: format!("{peer} ({why})"), operation, status, vendor: 0 }
            }
            _ => TransportError::Device { operation, status, vendor: 0, source: Some(Arc::new(error)) },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stall_names_place_cause_and_remedy_and_is_found_again() {
        let error = Error::Stalled {
            peer: "process 7".into(),
            place: StalledIn::Copy,
            causes: &[Cause::Free],
            after: Duration::from_secs(5),
        };
        let text = error.to_string();
        for part in ["process 7", "call for a copy", "5s", "cudaFree", "Free device memory only"] {
            assert!(text.contains(part), "{text}");
        }
        let error = TransportError::from(error);
        assert!(error.to_string().contains("stalled in the driver (likely: cudaFree"), "{error}");
        assert!(matches!(Error::of(&error), Some(Error::Stalled { causes: [Cause::Free], .. })));
        assert!(Error::of(&TransportError::Closed).is_none());
    }

    #[test]
    fn a_uuid_is_written_as_the_tools_write_it() {
        let bytes = core::array::from_fn(|at| at as u8);
        assert_eq!(uuid(&bytes), "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f");
    }
}
