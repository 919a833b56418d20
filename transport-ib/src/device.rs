//! [`Device`]: an opened device, its protection domain, and the port in use.

use core::ffi::CStr;
use core::ptr::null_mut;
use std::sync::Arc;

use portway_fifo::Region;

use crate::config::Config;
use crate::error::{Error, done, made};
use crate::gid::{Entry, Gid, Kind};
use crate::keeper::Keeper;
use crate::sys;
use crate::topology::Sysfs;
use crate::verbs::Verbs;

/// The longest GID table that is read.
const MAX_GIDS: usize = 256;

/// What of a port does not change while it is up.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PortInfo {
    pub(crate) number: u8,
    pub(crate) roce: bool,
    /// As the verbs enumerate it.
    pub(crate) mtu: u8,
    pub(crate) lid: u16,
    pub(crate) max_message_bytes: u32,
}

/// An opened device. Closed when dropped, so whatever was made from it holds a share in it.
#[derive(Debug)]
pub(crate) struct Device {
    verbs: Verbs,
    context: *mut sys::ibv_context,
    domain: *mut sys::ibv_pd,
    sysfs: Sysfs,
    pub(crate) name: String,
    pub(crate) port: PortInfo,
}

// SAFETY: the verbs interface is thread-safe, and the pointers stay valid until the device is dropped.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

/// A context that is closed unless it is taken.
struct Opened<'a> {
    verbs: &'a Verbs,
    context: *mut sys::ibv_context,
}

impl Opened<'_> {
    fn take(self) -> *mut sys::ibv_context {
        let context = self.context;
        core::mem::forget(self);
        context
    }
}

impl Drop for Opened<'_> {
    fn drop(&mut self) {
        // SAFETY: `open_device` returned the context and nothing was made from it.
        unsafe { (self.verbs.table().close_device)(self.context) };
    }
}

/// The devices of the machine; freed when dropped.
struct List<'a> {
    verbs: &'a Verbs,
    list: *mut *mut sys::ibv_device,
    count: usize,
}

impl<'a> List<'a> {
    fn new(verbs: &'a Verbs) -> Result<Self, Error> {
        let mut count = 0;
        // SAFETY: the count is written before the call returns a list.
        let list = unsafe { (verbs.table().get_device_list)(&mut count) };
        match made("ibv_get_device_list", list) {
            Ok(list) => Ok(List { verbs, list, count: usize::try_from(count).unwrap_or(0) }),
            // What the library says where the kernel has no RDMA at all.
            Err(Error::Device { errno, .. }) if errno == rustix::io::Errno::NOSYS.raw_os_error() => {
                Err(Error::NoKernelSupport)
            }
            Err(error) => Err(error),
        }
    }

    fn devices(&self) -> impl Iterator<Item = (*mut sys::ibv_device, String)> {
        (0..self.count).map(|index| {
            let entry = self.list.wrapping_add(index);
            // SAFETY: the library returned a list of `count` devices.
            let device = unsafe { *entry };
            // SAFETY: a device of the list.
            let name = unsafe { (self.verbs.table().get_device_name)(device) };
            // SAFETY: a device's name is a C string that lives as long as the device.
            (device, unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned())
        })
    }
}

impl Drop for List<'_> {
    fn drop(&mut self) {
        // SAFETY: the library returned this list; opened devices outlive it.
        unsafe { (self.verbs.table().free_device_list)(self.list) };
    }
}

impl Device {
    /// Opens the device that the configuration names, or the nearest one, and finds its active port.
    pub(crate) fn open(verbs: &Verbs, config: &Config, sysfs: Sysfs) -> Result<Self, Error> {
        let list = List::new(verbs)?;
        let mut devices: Vec<_> = list.devices().collect();
        let present: Vec<String> = devices.iter().map(|(_, name)| name.clone()).collect();
        if let Some(wanted) = &config.device {
            devices.retain(|(_, name)| name == wanted);
        }
        if devices.is_empty() {
            return Err(Error::NoDevice { name: config.device.clone(), present });
        }
        devices.sort_by_cached_key(|(_, name)| {
            (config.gpu.as_ref().map(|gpu| sysfs.distance(name, &gpu.pci_address)), name.clone())
        });
        let mut seen = Vec::new();
        for (device, name) in devices {
            // SAFETY: a device of the list, which is still there.
            let transport = unsafe { (*device).transport_type };
            if transport != sys::IBV_TRANSPORT_IB {
                // Without queue pairs of the type RC that connect by themselves, or without order between writes.
                seen.push(format!("{name} not an InfiniBand or RoCE device (transport {})", transport.0));
                continue;
            }
            // SAFETY: as above.
            let context = match made("ibv_open_device", unsafe { (verbs.table().open_device)(device) }) {
                Ok(context) => context,
                Err(error) => {
                    // In a container some devices are listed and not to be had.
                    seen.push(format!("{name}: {error}"));
                    continue;
                }
            };
            let opened = Opened { verbs, context };
            let Some(port) = find_port(verbs, context, &name, config.port, &mut seen)? else { continue };
            check_limits(verbs, context, &name, config)?;
            // SAFETY: the context is open.
            let domain = made("ibv_alloc_pd", unsafe { (verbs.table().alloc_pd)(context) })?;
            let context = opened.take();
            return Ok(Device { verbs: verbs.clone(), context, domain, sysfs, name, port });
        }
        Err(Error::NoActivePort { seen })
    }

    pub(crate) fn verbs(&self) -> &Verbs {
        &self.verbs
    }

    pub(crate) fn context(&self) -> *mut sys::ibv_context {
        self.context
    }

    pub(crate) fn domain(&self) -> *mut sys::ibv_pd {
        self.domain
    }

    /// The port's GID table, without empty entries.
    pub(crate) fn gids(&self) -> Result<Vec<Entry>, Error> {
        match self.gids_with_kinds() {
            Some(entries) => Ok(entries),
            None => Ok(self.gids_one_by_one()),
        }
    }

    /// From the library, where it is new enough and the kernel tells it.
    fn gids_with_kinds(&self) -> Option<Vec<Entry>> {
        let query = self.verbs.table().query_gid_table?;
        let mut entries = vec![sys::ibv_gid_entry::default(); MAX_GIDS];
        let size = size_of::<sys::ibv_gid_entry>();
        // SAFETY: the context is open, and there are as many entries of this size as the call is told.
        let count = unsafe { query(self.context, entries.as_mut_ptr(), entries.len(), 0, size) };
        entries.truncate(usize::try_from(count).ok()?);
        let kind = |kind| match sys::ibv_gid_type(kind) {
            sys::IBV_GID_TYPE_IB => Kind::Infiniband,
            sys::IBV_GID_TYPE_ROCE_V1 => Kind::RoceV1,
            sys::IBV_GID_TYPE_ROCE_V2 => Kind::RoceV2,
            _ => Kind::Unknown,
        };
        let of_port = entries.iter().filter(|entry| entry.port_num == self.port.number.into());
        let entry = |entry: &sys::ibv_gid_entry| {
            let index = u8::try_from(entry.gid_index).ok()?;
            // SAFETY: every 16 bytes are a GID, in each of the union's forms.
            let gid = Gid(unsafe { entry.gid.raw });
            Some(Entry { index, gid, kind: kind(entry.gid_type) })
        };
        Some(of_port.filter_map(entry).filter(|entry| !entry.gid.is_zero()).collect())
    }

    /// Entry by entry, with the kinds from sysfs if that is there.
    fn gids_one_by_one(&self) -> Vec<Entry> {
        let mut entries = Vec::new();
        for index in 0..=u8::MAX {
            let mut gid = sys::ibv_gid::default();
            // SAFETY: the context is open; the call fills in the GID or fails.
            let status = unsafe {
                (self.verbs.table().query_gid)(self.context, self.port.number, index.into(), &mut gid)
            };
            if status != 0 {
                // Past the end of the table.
                break;
            }
            // SAFETY: every 16 bytes are a GID.
            let gid = Gid(unsafe { gid.raw });
            if !gid.is_zero() {
                let kind = self.sysfs.gid_kind(&self.name, self.port.number, index);
                entries.push(Entry { index, gid, kind });
            }
        }
        entries
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: whatever was made in the domain holds a share in the device, so nothing is left.
        unsafe { (self.verbs.table().dealloc_pd)(self.domain) };
        // SAFETY: as above.
        unsafe { (self.verbs.table().close_device)(self.context) };
    }
}

/// The first active port, or the one that is asked for if it is active. What was seen is noted.
fn find_port(
    verbs: &Verbs,
    context: *mut sys::ibv_context,
    name: &str,
    wanted: Option<u8>,
    seen: &mut Vec<String>,
) -> Result<Option<PortInfo>, Error> {
    let mut device = sys::ibv_device_attr::default();
    // SAFETY: the context is open; the call fills in the attributes.
    done("ibv_query_device", unsafe { (verbs.table().query_device)(context, &mut device) })?;
    for number in 1..=device.phys_port_cnt {
        if wanted.is_some_and(|wanted| wanted != number) {
            continue;
        }
        // Zeroed, since the library's function fills in the part that its first version had.
        let mut port = sys::ibv_port_attr::default();
        let attributes = (&raw mut port).cast();
        // SAFETY: the context is open; the first part of the attributes is what the call fills in.
        done("ibv_query_port", unsafe { (verbs.table().query_port)(context, number, attributes) })?;
        if port.state == sys::IBV_PORT_ACTIVE {
            return Ok(Some(PortInfo {
                number,
                roce: u32::from(port.link_layer) == sys::IBV_LINK_LAYER_ETHERNET.0,
                mtu: port.active_mtu.0.clamp(1, 5) as u8,
                lid: port.lid,
                // Whole pages, so that every part of a long put begins as aligned as the put.
                max_message_bytes: port.max_msg_sz.max(4096) & !4095,
            }));
        }
        seen.push(format!("{name}:{number} {}", state_name(port.state)));
    }
    if device.phys_port_cnt == 0 || wanted.is_some_and(|wanted| wanted > device.phys_port_cnt) {
        seen.push(format!("{name} with {} ports", device.phys_port_cnt));
    }
    Ok(None)
}

fn state_name(state: sys::ibv_port_state) -> &'static str {
    match state {
        sys::IBV_PORT_DOWN => "down",
        sys::IBV_PORT_INIT => "initialising (is a subnet manager running?)",
        sys::IBV_PORT_ARMED => "armed",
        _ => "not active",
    }
}

/// Whether the device holds queues as long as the configuration asks for.
fn check_limits(
    verbs: &Verbs,
    context: *mut sys::ibv_context,
    name: &str,
    config: &Config,
) -> Result<(), Error> {
    let mut device = sys::ibv_device_attr::default();
    // SAFETY: the context is open; the call fills in the attributes.
    done("ibv_query_device", unsafe { (verbs.table().query_device)(context, &mut device) })?;
    let completions = u64::from(config.depth) * config.queue_pairs as u64;
    let limits = [
        ("requests a queue pair", u64::from(config.depth), device.max_qp_wr),
        ("completions of a connection", completions, device.max_cqe),
    ];
    for (what, asked, limit) in limits {
        if asked > u64::try_from(limit).unwrap_or(0) {
            let why = format!("{asked} {what} are configured and it holds {limit}");
            return Err(Error::Unfit { device: name.to_owned(), why });
        }
    }
    Ok(())
}

/// A registration of memory with a device; ended when dropped.
#[derive(Debug)]
pub(crate) struct Registration {
    keeper: Arc<Keeper>,
    /// What is registered stays mapped as long.
    region: Region,
    registration: *mut sys::ibv_mr,
}

// SAFETY: the registration is used by no thread but through the thread-safe interface.
unsafe impl Send for Registration {}
// SAFETY: as above.
unsafe impl Sync for Registration {}

impl Registration {
    /// Takes over what a call of the library returned.
    ///
    /// # Safety
    /// - `registration` is null, with the reason in the thread's error number, or was made in the device's domain and
    ///   belongs to the caller.
    pub(crate) unsafe fn take(
        operation: &'static str,
        keeper: &Arc<Keeper>,
        region: &Region,
        registration: *mut sys::ibv_mr,
    ) -> Result<Self, Error> {
        let registration = made(operation, registration)?;
        Ok(Registration { keeper: keeper.clone(), region: region.clone(), registration })
    }

    /// The local and the remote key.
    pub(crate) fn keys(&self) -> (u32, u32) {
        // SAFETY: made by the library and not ended yet.
        let registration = unsafe { &*self.registration };
        (registration.lkey, registration.rkey)
    }

    /// Ends it: afterwards no peer reaches the memory through it.
    pub(crate) fn end(mut self) -> Result<(), Error> {
        self.end_once()
    }

    fn end_once(&mut self) -> Result<(), Error> {
        let registration = core::mem::replace(&mut self.registration, null_mut());
        if registration.is_null() {
            return Ok(());
        }
        // SAFETY: made by the library, and taken out above so that it is ended once.
        let status = unsafe { (self.keeper.device().verbs.table().dereg_mr)(registration) };
        done("ibv_dereg_mr", status).inspect_err(|_| {
            // Peers may still reach the memory: it stays mapped, for good.
            core::mem::forget(self.region.clone());
        })
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // A failure leaves the memory registered, and mapped; there is nobody to tell.
        let _ = self.end_once();
    }
}
