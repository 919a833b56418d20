//! [`Queues`]: the queue pairs of one connection and the completion queue that they share.

use std::sync::Arc;

use crate::config::Config;
use crate::error::{Error, done, made};
use crate::gid::Gid;
use crate::keeper::Keeper;
use crate::sys;

/// The bytes that the device has to take inline: a signal.
const INLINE_BYTES: u32 = 8;
/// Hops that a routed packet may take.
const HOPS: u8 = 255;

/// Where the queue pairs of the peer are, and how to get there.
#[derive(Clone, Debug)]
pub(crate) struct Route {
    pub(crate) mtu: u8,
    /// One for each of ours.
    pub(crate) queue_pairs: Vec<u32>,
    pub(crate) first_psn_there: u32,
    pub(crate) first_psn_here: u32,
    pub(crate) lid: u16,
    /// Our GID's index and the peer's GID, where packets carry a global header.
    pub(crate) global: Option<(u8, Gid)>,
}

/// Destroyed when dropped, which talks to the device: the keeper's thread does it for a port.
#[derive(Debug)]
pub(crate) struct Queues {
    keeper: Arc<Keeper>,
    completions: *mut sys::ibv_cq,
    pairs: Vec<*mut sys::ibv_qp>,
}

// SAFETY: the verbs interface is thread-safe, and the pointers stay valid until the queues are dropped.
unsafe impl Send for Queues {}
// SAFETY: as above.
unsafe impl Sync for Queues {}

impl Queues {
    /// Makes them, in the state INIT. The completion queue holds as much as all send queues together, since after an
    /// error every request completes, asked or not.
    pub(crate) fn new(keeper: &Arc<Keeper>, config: &Config) -> Result<Self, Error> {
        let device = keeper.device();
        let table = device.verbs().table();
        let capacity = config.depth as usize * config.queue_pairs;
        let (null, none) = (core::ptr::null_mut(), core::ptr::null_mut());
        // SAFETY: the context is open; the device was found to hold queues of this length.
        let completions = unsafe { (table.create_cq)(device.context(), capacity as i32, null, none, 0) };
        let completions = made("ibv_create_cq", completions)?;
        let mut queues = Queues { keeper: keeper.clone(), completions, pairs: Vec::new() };
        for _ in 0..config.queue_pairs {
            queues.add(config)?;
        }
        Ok(queues)
    }

    fn add(&mut self, config: &Config) -> Result<(), Error> {
        let device = self.keeper.device();
        let cap = sys::ibv_qp_cap {
            max_send_wr: config.depth,
            max_recv_wr: 0,
            max_send_sge: 1,
            max_recv_sge: 0,
            max_inline_data: INLINE_BYTES,
        };
        let mut attributes = sys::ibv_qp_init_attr {
            send_cq: self.completions,
            recv_cq: self.completions,
            qp_type: sys::IBV_QPT_RC,
            cap,
            ..Default::default()
        };
        // SAFETY: the domain and the completion queue live as long as `self`.
        let pair = unsafe { (device.verbs().table().create_qp)(device.domain(), &mut attributes) };
        let pair = made("ibv_create_qp", pair)?;
        self.pairs.push(pair);
        self.keeper.watch(pair);
        let state =
            sys::IBV_QP_STATE.0 | sys::IBV_QP_PKEY_INDEX.0 | sys::IBV_QP_PORT.0 | sys::IBV_QP_ACCESS_FLAGS.0;
        let mut init = sys::ibv_qp_attr {
            qp_state: sys::IBV_QPS_INIT,
            pkey_index: config.pkey_index,
            port_num: device.port.number,
            qp_access_flags: sys::IBV_ACCESS_REMOTE_WRITE.0,
            ..Default::default()
        };
        self.modify("queue pair to INIT", pair, &mut init, state)
    }

    pub(crate) fn completions(&self) -> *mut sys::ibv_cq {
        self.completions
    }

    pub(crate) fn pairs(&self) -> &[*mut sys::ibv_qp] {
        &self.pairs
    }

    pub(crate) fn numbers(&self) -> Vec<u32> {
        // SAFETY: made by the library and not destroyed before `self` is.
        self.pairs.iter().map(|&pair| unsafe { (*pair).qp_num }).collect()
    }

    fn modify(
        &self,
        operation: &'static str,
        pair: *mut sys::ibv_qp,
        attributes: &mut sys::ibv_qp_attr,
        mask: u32,
    ) -> Result<(), Error> {
        let table = self.keeper.device().verbs().table();
        // SAFETY: the queue pair is not destroyed, and the attributes that the mask names are filled in.
        done(operation, unsafe { (table.modify_qp)(pair, attributes, mask as i32) })
    }

    /// Connects every queue pair with its counterpart: to RTR, then to RTS.
    pub(crate) fn connect(&self, config: &Config, route: &Route) -> Result<(), Error> {
        for (&pair, &number) in self.pairs.iter().zip(&route.queue_pairs) {
            self.connect_one(config, route, pair, number)?;
        }
        Ok(())
    }

    fn connect_one(
        &self,
        config: &Config,
        route: &Route,
        pair: *mut sys::ibv_qp,
        number: u32,
    ) -> Result<(), Error> {
        let port = &self.keeper.device().port;
        let mut address = sys::ibv_ah_attr {
            dlid: route.lid,
            sl: config.service_level,
            port_num: port.number,
            ..Default::default()
        };
        if let Some((index, gid)) = route.global {
            address.is_global = 1;
            address.grh = sys::ibv_global_route {
                dgid: sys::ibv_gid { raw: gid.0 },
                sgid_index: index,
                hop_limit: HOPS,
                traffic_class: config.traffic_class,
                ..Default::default()
            };
        }
        let mut receive = sys::ibv_qp_attr {
            qp_state: sys::IBV_QPS_RTR,
            path_mtu: sys::ibv_mtu(route.mtu.into()),
            dest_qp_num: number,
            rq_psn: route.first_psn_there,
            max_dest_rd_atomic: 1,
            min_rnr_timer: config.rnr_timer,
            ah_attr: address,
            ..Default::default()
        };
        let mask = sys::IBV_QP_STATE.0
            | sys::IBV_QP_AV.0
            | sys::IBV_QP_PATH_MTU.0
            | sys::IBV_QP_DEST_QPN.0
            | sys::IBV_QP_RQ_PSN.0
            | sys::IBV_QP_MAX_DEST_RD_ATOMIC.0
            | sys::IBV_QP_MIN_RNR_TIMER.0;
        self.modify("queue pair to RTR", pair, &mut receive, mask)?;
        let mut send = sys::ibv_qp_attr {
            qp_state: sys::IBV_QPS_RTS,
            timeout: config.timeout,
            retry_cnt: config.retries,
            rnr_retry: config.rnr_retries,
            sq_psn: route.first_psn_here,
            max_rd_atomic: 1,
            ..Default::default()
        };
        let mask = sys::IBV_QP_STATE.0
            | sys::IBV_QP_TIMEOUT.0
            | sys::IBV_QP_RETRY_CNT.0
            | sys::IBV_QP_RNR_RETRY.0
            | sys::IBV_QP_SQ_PSN.0
            | sys::IBV_QP_MAX_QP_RD_ATOMIC.0;
        self.modify("queue pair to RTS", pair, &mut send, mask)
    }

    /// Puts every queue pair into the state ERR: nothing more is sent or taken.
    pub(crate) fn to_error(&self) {
        for &pair in &self.pairs {
            let mut error = sys::ibv_qp_attr { qp_state: sys::IBV_QPS_ERR, ..Default::default() };
            // A device that refuses has failed as a whole; the queue pair is destroyed next.
            let _ = self.modify("queue pair to ERR", pair, &mut error, sys::IBV_QP_STATE.0);
        }
    }

    /// Destroys everything. Afterwards the device touches none of the memory that requests named.
    ///
    /// # Errors
    /// What the device said. The queue pair, and the completion queue with it, are then left as they are.
    pub(crate) fn destroy(mut self) -> Result<(), Error> {
        self.destroy_once()
    }

    fn destroy_once(&mut self) -> Result<(), Error> {
        let keeper = self.keeper.clone();
        let table = keeper.device().verbs().table();
        while let Some(pair) = self.pairs.pop() {
            // First, so that no event of a later queue pair at this address is put down to this one. The library waits
            // for every event that was fetched to be acknowledged, which the keeper does at once and never waits for us.
            self.keeper.forget(pair);
            // SAFETY: made by the library, and popped, so that it is destroyed once.
            let status = unsafe { (table.destroy_qp)(pair) };
            if let Err(error) = done("ibv_destroy_qp", status) {
                self.pairs.clear();
                self.completions = core::ptr::null_mut();
                return Err(error);
            }
        }
        let completions = core::mem::replace(&mut self.completions, core::ptr::null_mut());
        if completions.is_null() {
            return Ok(());
        }
        // SAFETY: its queue pairs are destroyed; taken out above, so that it is destroyed once.
        done("ibv_destroy_cq", unsafe { (table.destroy_cq)(completions) })
    }
}

impl Drop for Queues {
    fn drop(&mut self) {
        // A failure leaves the queues as they are; there is nobody to tell.
        let _ = self.destroy_once();
    }
}
