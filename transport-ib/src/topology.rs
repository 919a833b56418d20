//! What sysfs says: how near a device is to the GPU, and what its GIDs are for.

use std::path::{Component, Path, PathBuf};

use crate::gid::Kind;

/// Sysfs, or a folder that a test made to look like it.
#[derive(Clone, Debug)]
pub(crate) struct Sysfs {
    root: PathBuf,
}

/// Smaller is nearer. Unknown distances come last and are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Distance {
    /// Under one root port complex: steps along the PCI tree.
    Tree(usize),
    /// Different root complexes of one NUMA node.
    Node,
    /// Different NUMA nodes.
    System,
    Unknown,
}

impl Default for Sysfs {
    fn default() -> Self {
        Sysfs { root: "/sys".into() }
    }
}

impl Sysfs {
    fn class(&self, device: &str) -> PathBuf {
        self.root.join("class/infiniband").join(device)
    }

    /// How far a device is from the GPU at a PCI address.
    pub(crate) fn distance(&self, device: &str, pci_address: &str) -> Distance {
        let gpu = self.root.join("bus/pci/devices").join(pci_address.to_ascii_lowercase());
        let (Ok(device), Ok(gpu)) = (self.class(device).join("device").canonicalize(), gpu.canonicalize())
        else {
            return Distance::Unknown;
        };
        match steps(&device, &gpu) {
            Some(steps) => Distance::Tree(steps),
            None => match (numa_node(&device), numa_node(&gpu)) {
                (Some(a), Some(b)) if a != b => Distance::System,
                (Some(_), Some(_)) => Distance::Node,
                _ => Distance::System,
            },
        }
    }

    /// What an entry of a port's GID table is for.
    pub(crate) fn gid_kind(&self, device: &str, port: u8, index: u8) -> Kind {
        let path = self.class(device).join(format!("ports/{port}/gid_attrs/types/{index}"));
        match std::fs::read_to_string(path).as_deref().map(str::trim_end) {
            Ok("RoCE v2") => Kind::RoceV2,
            Ok("IB/RoCE v1" | "RoCE v1") => Kind::RoceV1,
            _ => Kind::Unknown,
        }
    }
}

/// Steps up from `a` to the common ancestor and down to `b`; none without a common PCI root.
fn steps(a: &Path, b: &Path) -> Option<usize> {
    let is_root = |part: &Component<'_>| part.as_os_str().to_string_lossy().starts_with("pci");
    let common = a.components().zip(b.components()).take_while(|(a, b)| a == b).count();
    let shared_root = a.components().take(common).any(|part| is_root(&part));
    shared_root.then(|| a.components().count() + b.components().count() - 2 * common)
}

/// The node of a PCI device; the kernel writes -1 where there is only one.
fn numa_node(device: &Path) -> Option<i32> {
    std::fs::read_to_string(device.join("numa_node")).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// Removes its folder.
    struct Folder(PathBuf);

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn machine(name: &str) -> (Folder, Sysfs) {
        let root = std::env::temp_dir().join(format!("portway-ib-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        let places = [
            // The switch that the GPU hangs on, another port of the same root, another root, another socket.
            ("mlx5_3", "pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3c:10.0/0000:3e:00.0", 0),
            ("mlx5_2", "pci0000:3a/0000:3a:02.0/0000:40:00.0", 0),
            ("mlx5_1", "pci0000:50/0000:50:00.0/0000:51:00.0", 0),
            ("mlx5_0", "pci0000:c0/0000:c0:00.0/0000:c1:00.0", 1),
        ];
        let gpu = "pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3c:00.0/0000:3d:00.0";
        let class = root.join("class/infiniband");
        fs::create_dir_all(&class).unwrap();
        for (name, path, node) in places {
            let device = root.join("devices").join(path);
            fs::create_dir_all(&device).unwrap();
            fs::write(device.join("numa_node"), format!("{node}\n")).unwrap();
            fs::create_dir_all(class.join(name)).unwrap();
            std::os::unix::fs::symlink(&device, class.join(name).join("device")).unwrap();
        }
        let device = root.join("devices").join(gpu);
        fs::create_dir_all(&device).unwrap();
        fs::write(device.join("numa_node"), "0\n").unwrap();
        fs::create_dir_all(root.join("bus/pci/devices")).unwrap();
        std::os::unix::fs::symlink(&device, root.join("bus/pci/devices/0000:3d:00.0")).unwrap();
        (Folder(root.clone()), Sysfs { root })
    }

    #[test]
    fn the_device_behind_the_same_switch_is_the_nearest() {
        let (_folder, sysfs) = machine("distance");
        let distance = |device| sysfs.distance(device, "0000:3D:00.0");
        assert_eq!(distance("mlx5_3"), Distance::Tree(4));
        assert_eq!(distance("mlx5_2"), Distance::Tree(6));
        assert_eq!(distance("mlx5_1"), Distance::Node);
        assert_eq!(distance("mlx5_0"), Distance::System);
        assert_eq!(distance("rxe0"), Distance::Unknown);
        assert_eq!(sysfs.distance("mlx5_3", "0000:99:00.0"), Distance::Unknown);
        assert!(distance("mlx5_3") < distance("mlx5_2") && distance("mlx5_2") < distance("mlx5_1"));
        assert!(distance("mlx5_1") < distance("mlx5_0") && distance("mlx5_0") < distance("rxe0"));
    }

    #[test]
    fn kinds_of_gids_as_the_kernel_writes_them() {
        let (folder, sysfs) = machine("kinds");
        let types = folder.0.join("class/infiniband/mlx5_0/ports/1/gid_attrs/types");
        fs::create_dir_all(&types).unwrap();
        fs::write(types.join("0"), "IB/RoCE v1\n").unwrap();
        fs::write(types.join("1"), "RoCE v2\n").unwrap();
        assert_eq!(sysfs.gid_kind("mlx5_0", 1, 0), Kind::RoceV1);
        assert_eq!(sysfs.gid_kind("mlx5_0", 1, 1), Kind::RoceV2);
        assert_eq!(sysfs.gid_kind("mlx5_0", 1, 2), Kind::Unknown);
        assert_eq!(sysfs.gid_kind("mlx5_9", 1, 0), Kind::Unknown);
    }
}
