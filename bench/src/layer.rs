//! [`Layer`]: what can be measured. A new layer is a file with a `LAYER` in it and a line in [`ALL`].

use std::fmt::Write;

use crate::args::Args;
use crate::failure::Failure;
use crate::fifo;
use crate::ib;
use crate::ipc;
use crate::proxy;
use crate::put;
use crate::report::{Report, TimeUnit};

/// Measures a layer and adds its rows to the report.
pub type Run = fn(&Args, &mut Report) -> Result<(), Failure>;

/// Something that can be measured.
pub struct Layer {
    /// Its name on the command line and in the report.
    pub name: &'static str,
    /// What is measured.
    pub measures: &'static str,
    /// What a machine must have for it.
    pub needs: &'static str,
    /// How it is measured, or what this machine lacks for it.
    pub find: fn(&Args) -> Result<Run, String>,
    /// The flags that shape it, by their ids in [`Args`]. Others are refused when only this layer runs.
    pub flags: &'static [&'static str],
    /// The unit of times in its tables.
    pub unit: TimeUnit,
}

/// Every layer, in the order of the stack.
pub static ALL: &[Layer] = &[
    fifo::LAYER,
    proxy::LAYER,
    put::LAYER,
    ib::LAYER,
    ipc::LAYER,
    unmeasured("clique", "making communicators", "libnccl and a GPU"),
];

/// A layer that nothing measures yet.
const fn unmeasured(name: &'static str, measures: &'static str, needs: &'static str) -> Layer {
    let find = |_: &Args| Err("its crate is a contract so far, with no code to measure".into());
    Layer { name, measures, needs, find, flags: &[], unit: TimeUnit::Microseconds }
}

/// The layer of that name.
pub fn by_name(name: &str) -> Option<&'static Layer> {
    ALL.iter().find(|layer| layer.name == name)
}

/// What `portway-bench list` prints.
pub fn list(args: &Args) -> String {
    let mut text = String::from("# layer   here     needs; what is measured\n");
    for layer in ALL {
        let (here, why) = match (layer.find)(args) {
            Ok(_) => ("yes", String::new()),
            Err(lacking) => ("waived", format!(" ({lacking})")),
        };
        let Layer { name, measures, needs, .. } = layer;
        let _ = writeln!(text, "  {name:7} {here:8} needs {needs}; {measures}{why}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args;

    #[test]
    fn list_names_each_layer_and_what_it_lacks() {
        let args = args::parse("list").unwrap();
        let text = list(&args);
        for layer in ALL {
            let line = text.lines().find(|line| line.split_whitespace().next() == Some(layer.name)).unwrap();
            assert!(line.contains(layer.needs), "{line}");
            match (layer.find)(&args) {
                Ok(_) => assert!(line.contains(" yes "), "{line}"),
                Err(why) => assert!(line.contains("waived") && line.contains(&why), "{line}"),
            }
        }
    }
}
