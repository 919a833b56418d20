//! How communicators are configured: what is passed, and what of the environment would override it.

use core::ffi::c_int;
use core::ptr;
use std::ffi::CString;

use crate::backend::{CommConfig, Variable};
use crate::nccl::table::{CONFIG_MAGIC, RawConfig, UNDEFINED};

/// The newest version whose configuration is known here.
const NEWEST: u32 = 2_27_07;

/// A configuration with the texts that it points to.
pub(super) struct Filled {
    pub(super) raw: RawConfig,
    _net_name: Option<CString>,
}

/// The length of the configuration that a library of a version knows.
fn size_of_version(version: u32) -> usize {
    match version {
        0..2_27_00 => 48, // up to the traffic class, or the padding in its place
        _ => size_of::<RawConfig>(),
    }
}

impl Filled {
    /// `None` if a value does not fit; the library could not tell it from another one.
    pub(super) fn new(config: &CommConfig, version: u32) -> Option<Self> {
        let number = |value: Option<u32>| value.map_or(Some(UNDEFINED), |value| c_int::try_from(value).ok());
        let net_name = config.net_name.as_deref().map(CString::new).transpose().ok()?;
        Some(Filled {
            raw: RawConfig {
                size: size_of_version(version),
                magic: CONFIG_MAGIC,
                version: version.min(NEWEST),
                blocking: 0,
                cga_cluster_size: number(config.cga_cluster_size)?,
                min_ctas: number(config.min_ctas)?,
                max_ctas: number(config.max_ctas)?,
                net_name: net_name.as_ref().map_or(ptr::null(), |name| name.as_ptr()),
                split_share: config.split_share.map_or(UNDEFINED, c_int::from),
                traffic_class: UNDEFINED,
                comm_name: ptr::null(),
                collnet_enable: UNDEFINED,
                cta_policy: UNDEFINED,
                shrink_share: UNDEFINED,
                nvls_ctas: UNDEFINED,
            },
            _net_name: net_name,
        })
    }
}

impl RawConfig {
    /// Whether the library has left it as it was filled. Some versions write what they take into it.
    pub(super) fn is_non_blocking(&self) -> bool {
        self.magic == CONFIG_MAGIC && self.blocking == 0
    }
}

/// What a variable means. NCCL reads them as it likes, whatever the configuration says.
pub(super) fn variable(name: &str, value: &str) -> Variable {
    match name {
        // Calls of a blocking communicator wait for other ranks, and nobody could end them.
        "NCCL_COMM_BLOCKING" if value.trim() != "0" => {
            Variable::Refused("0, or not set: a clique's communicators are non-blocking")
        }
        // Every unique id would be the same one.
        "NCCL_COMM_ID" => Variable::Refused("not set: each attempt needs an id of its own"),
        // The root of a group of ranks, the name of a host, where messages are written: each process has its own.
        "NCCL_COMM_BLOCKING"
        | "NCCL_DEBUG"
        | "NCCL_DEBUG_FILE"
        | "NCCL_DEBUG_SUBSYS"
        | "NCCL_DEBUG_TIMESTAMP_FORMAT"
        | "NCCL_DEBUG_TIMESTAMP_LEVELS"
        | "NCCL_WARN_ENABLE_DEBUG_INFO"
        | "NCCL_HOSTID"
        | "NCCL_CONF_FILE"
        | "NCCL_TOPO_DUMP_FILE"
        | "NCCL_GRAPH_DUMP_FILE"
        | "NCCL_GRAPH_DUMP_FILE_RANK"
        | "NCCL_IGNORE_CPU_AFFINITY"
        | "NCCL_SET_THREAD_NAME" => Variable::Ignored,
        // What a host calls its interfaces and adapters, and files that describe one host.
        "NCCL_SOCKET_IFNAME"
        | "NCCL_OOB_NET_IFNAME"
        | "NCCL_IB_HCA"
        | "NCCL_IB_GID_INDEX"
        | "NCCL_IB_ADDR_RANGE"
        | "NCCL_MNNVL_UUID"
        | "NCCL_MNNVL_CLIQUE_ID"
        | "NCCL_TOPO_FILE" => Variable::Hardware,
        name if name.starts_with("NCCL_") => Variable::Compared,
        _ => Variable::Ignored,
    }
}

/// The variables that NCCL's configuration files set, which it reads before the environment is asked, and which do not
/// replace what the environment has.
pub(super) fn from_file(text: &str) -> Vec<(String, String)> {
    let lines = text.lines().map(str::trim).filter(|line| !line.starts_with('#'));
    let pairs = lines.filter_map(|line| line.split_once('='));
    pairs.map(|(name, value)| (name.trim().to_owned(), value.trim().to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_is_as_long_as_the_library_knows_it() {
        let config = CommConfig { min_ctas: Some(4), split_share: Some(true), ..CommConfig::default() };
        for (version, size, says) in
            [(2_18_03, 48, 2_18_03), (2_26_02, 48, 2_26_02), (2_27_00, 72, 2_27_00), (2_32_03, 72, 2_27_07)]
        {
            let filled = Filled::new(&config, version).unwrap();
            assert_eq!((filled.raw.size, filled.raw.version), (size, says));
            assert_eq!((filled.raw.magic, filled.raw.blocking), (0xcafe_beef, 0));
            assert_eq!((filled.raw.min_ctas, filled.raw.max_ctas, filled.raw.split_share), (4, i32::MIN, 1));
            assert!(filled.raw.is_non_blocking());
        }
    }

    #[test]
    fn what_does_not_fit_is_not_passed_on() {
        let too_large = CommConfig { max_ctas: Some(1 << 31), ..CommConfig::default() };
        assert!(Filled::new(&too_large, NEWEST).is_none());
        let two_names = CommConfig { net_name: Some("a\0b".to_owned()), ..CommConfig::default() };
        assert!(Filled::new(&two_names, NEWEST).is_none());
    }

    #[test]
    fn variables_that_would_block_are_refused_and_those_that_matter_compared() {
        assert!(matches!(variable("NCCL_COMM_BLOCKING", "1"), Variable::Refused(_)));
        assert!(matches!(variable("NCCL_COMM_BLOCKING", ""), Variable::Refused(_)));
        assert_eq!(variable("NCCL_COMM_BLOCKING", "0"), Variable::Ignored);
        assert!(matches!(variable("NCCL_COMM_ID", "127.0.0.1:5"), Variable::Refused(_)));
        assert_eq!(variable("NCCL_ALGO", "Ring"), Variable::Compared);
        assert_eq!(variable("NCCL_DEBUG", "INFO"), Variable::Ignored);
        for name in ["NCCL_SOCKET_IFNAME", "NCCL_IB_HCA"] {
            assert_eq!(variable(name, "eth0"), Variable::Hardware, "hosts differ in {name}");
        }
        assert_eq!(variable("PATH", "/bin"), Variable::Ignored);
    }

    #[test]
    fn a_file_sets_variables_line_by_line() {
        let text = "# a comment\nNCCL_COMM_BLOCKING = 1\n\nnonsense\n#NCCL_ALGO=Ring\nNCCL_P2P_LEVEL=NVL=2\n";
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert_eq!(from_file(text), [pair("NCCL_COMM_BLOCKING", "1"), pair("NCCL_P2P_LEVEL", "NVL=2")]);
    }
}
