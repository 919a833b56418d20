//! [`Layer`]: what can be measured. A new layer is a file with a `LAYER` in it and a line in [`ALL`].

use crate::args::Args;
use crate::clique;
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
    /// What carries the data; empty where nothing is carried, or where the tests differ in it.
    pub transport: &'static str,
    /// The unit of times in its tables.
    pub unit: TimeUnit,
}

/// Every layer, in the order of the stack.
pub static ALL: &[Layer] = &[fifo::LAYER, proxy::LAYER, put::LAYER, ib::LAYER, ipc::LAYER, clique::LAYER];

/// The layer of that name.
pub fn by_name(name: &str) -> Option<&'static Layer> {
    ALL.iter().find(|layer| layer.name == name)
}
