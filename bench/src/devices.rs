//! The GPUs and RDMA ports of the machine as the system's files name them: nothing is opened for it.

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// A GPU that the NVIDIA driver knows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuDevice {
    pub name: String,
    pub pci: String,
    /// Speed and width as they are now; an idle link may be slower.
    pub link: Option<String>,
    pub numa: Option<i64>,
}

/// A port of an RDMA device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Nic {
    pub name: String,
    pub port: u64,
    pub state: Option<String>,
    pub rate: Option<String>,
    pub link_layer: Option<String>,
    pub numa: Option<i64>,
}

/// The version of the NVIDIA driver's kernel module.
pub fn driver(root: &Path) -> Option<String> {
    read(&root.join("sys/module/nvidia/version"))
}

/// Every GPU, in the order of the bus.
pub fn gpus(root: &Path) -> Vec<GpuDevice> {
    let gpu = |folder: PathBuf| {
        let text = read(&folder.join("information"))?;
        let value = |key: &str| {
            text.lines().find_map(|line| Some(line.strip_prefix(key)?.strip_prefix(':')?.trim().to_owned()))
        };
        let pci = value("Bus Location").or_else(|| Some(folder.file_name()?.to_string_lossy().into()))?;
        let device = root.join("sys/bus/pci/devices").join(pci.to_lowercase());
        let link = read(&device.join("current_link_speed")).zip(read(&device.join("current_link_width")));
        Some(GpuDevice {
            name: value("Model")?,
            pci,
            link: link.map(|(speed, width)| format!("{speed} x{width}")),
            numa: numa(&device),
        })
    };
    entries(&root.join("proc/driver/nvidia/gpus")).into_iter().filter_map(gpu).collect()
}

/// Every port of every RDMA device, in the order of their names.
pub fn nics(root: &Path) -> Vec<Nic> {
    let ports = |device: PathBuf| {
        let name = device.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let numa = numa(&device.join("device"));
        entries(&device.join("ports")).into_iter().filter_map(move |port| {
            Some(Nic {
                name: name.clone(),
                port: port.file_name()?.to_str()?.parse().ok()?,
                // `4: ACTIVE`
                state: read(&port.join("state"))
                    .map(|state| state.split_once(": ").map_or(state.clone(), |(_, name)| name.to_owned())),
                rate: read(&port.join("rate")),
                link_layer: read(&port.join("link_layer")),
                numa,
            })
        })
    };
    entries(&root.join("sys/class/infiniband")).into_iter().flat_map(ports).collect()
}

/// The node of a device; the system writes -1 where there is but one.
fn numa(device: &Path) -> Option<i64> {
    read(&device.join("numa_node"))?.parse().ok().filter(|node| *node >= 0)
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<_> =
        fs::read_dir(folder).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.sort();
    paths
}

fn read(file: &Path) -> Option<String> {
    Some(fs::read_to_string(file).ok()?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_system_says_is_read() {
        let root = std::env::temp_dir().join(format!("portway-bench-devices-{}", std::process::id()));
        let write = |path: &str, text: &str| {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("sys/module/nvidia/version", "580.1\n");
        let gpu = "proc/driver/nvidia/gpus/0000:0a:00.0/information";
        write(gpu, "Model: \t\t NVIDIA X1\nIRQ:   \t\t 9\nBus Location: \t 0000:0A:00.0\n");
        write("sys/bus/pci/devices/0000:0a:00.0/current_link_speed", "32.0 GT/s PCIe\n");
        write("sys/bus/pci/devices/0000:0a:00.0/current_link_width", "16\n");
        write("sys/bus/pci/devices/0000:0a:00.0/numa_node", "-1\n");
        write("sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE\n");
        write("sys/class/infiniband/mlx5_0/ports/1/rate", "400 Gb/sec (4X NDR)\n");
        write("sys/class/infiniband/mlx5_0/device/numa_node", "1\n");
        let found = (driver(&root), gpus(&root), nics(&root));
        fs::remove_dir_all(&root).unwrap();
        assert_eq!(found.0.as_deref(), Some("580.1"));
        let gpu = GpuDevice {
            name: "NVIDIA X1".into(),
            pci: "0000:0A:00.0".into(),
            link: Some("32.0 GT/s PCIe x16".into()),
            numa: None,
        };
        assert_eq!(found.1, [gpu]);
        let nic = Nic {
            name: "mlx5_0".into(),
            port: 1,
            state: Some("ACTIVE".into()),
            rate: Some("400 Gb/sec (4X NDR)".into()),
            link_layer: None,
            numa: Some(1),
        };
        assert_eq!(found.2, [nic]);
    }

    #[test]
    fn a_machine_without_devices_has_none() {
        let nowhere = Path::new("/nonexistent");
        assert_eq!((driver(nowhere), gpus(nowhere), nics(nowhere)), (None, vec![], vec![]));
    }
}
