//! What a clique runs once before it is ready: [`FirstUse`], of [`Use`]s.

use core::fmt;

use crate::CliqueError;
use crate::backend::{DataType, LocalRank, ReduceOp};

/// A kind of operation. Libraries connect peers, allocate memory and load kernels when they meet one first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Use {
    /// All-reduces of a type and a reduction.
    AllReduce {
        /// Of elements of this type.
        data_type: DataType,
        /// Combined so.
        op: ReduceOp,
    },
    /// All-gathers.
    AllGather,
    /// Sends from one rank to another.
    Peers {
        /// The rank that sends.
        from: u32,
        /// The rank that receives.
        to: u32,
    },
}

impl fmt::Display for Use {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Use::AllReduce { data_type, op } => write!(f, "all-reduce of {data_type:?} by {op:?}"),
            Use::AllGather => f.write_str("all-gather"),
            Use::Peers { from, to } => write!(f, "send from rank {from} to rank {to}"),
        }
    }
}

/// How much an operation moves; libraries choose their protocol by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum SizeClass {
    Small,
    Large,
}

impl SizeClass {
    /// Where large begins, in bytes that a rank puts in.
    const LARGE_BYTES: usize = 256 << 10;

    pub(crate) fn of(bytes: usize) -> Self {
        if bytes < SizeClass::LARGE_BYTES { SizeClass::Small } else { SizeClass::Large }
    }
}

/// The operations that are run once, small and large, with checked results, before the clique is ready.
///
/// Participants may declare different ones: what one of them declares is run by all whom it concerns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FirstUse {
    pub(crate) uses: Vec<Use>,
    pub(crate) large_bytes: usize,
}

impl Default for FirstUse {
    /// Nothing; large means 4 MiB.
    fn default() -> Self {
        FirstUse { uses: Vec::new(), large_bytes: 4 << 20 }
    }
}

impl FirstUse {
    /// Declares all-reduces of a type and a reduction.
    #[must_use]
    pub fn all_reduce(self, data_type: DataType, op: ReduceOp) -> Self {
        self.with(Use::AllReduce { data_type, op })
    }

    /// Declares all-gathers.
    #[must_use]
    pub fn all_gather(self) -> Self {
        self.with(Use::AllGather)
    }

    /// Declares that one rank sends to another. A pair counts where one of the two lives; others may declare it, too, so
    /// that all can say the same. Peers that nobody has declared cannot send to each other.
    #[must_use]
    pub fn peers(self, from: u32, to: u32) -> Self {
        self.with(Use::Peers { from, to })
    }

    /// Declares that every rank sends to the next one, and the last one to rank 0.
    #[must_use]
    pub fn ring(self, size: u32) -> Self {
        (0..size).fold(self, |first, rank| first.peers(rank, (rank + 1) % size))
    }

    /// How many bytes a large operation moves a rank; two buffers of this length live on each device until the clique is
    /// ready. The same for all participants.
    #[must_use]
    pub fn large_bytes(mut self, large_bytes: usize) -> Self {
        self.large_bytes = large_bytes;
        self
    }

    /// What a participant with these ranks has to say.
    pub(crate) fn of(&self, size: u32, locals: &[LocalRank]) -> Result<Vec<Use>, CliqueError> {
        let is_local = |rank: u32| locals.iter().any(|local| local.rank == rank);
        let mut own = Vec::new();
        for one in &self.uses {
            match *one {
                Use::Peers { from, to } if from >= size || to >= size || from == to => {
                    return Err(CliqueError::Config {
                        what: "declared peers".to_owned(),
                        expected: format!("two ranks below {size}"),
                        seen: one.to_string(),
                    });
                }
                Use::Peers { from, to } if !is_local(from) && !is_local(to) => {}
                one => own.push(one),
            }
        }
        Ok(own)
    }

    fn with(mut self, one: Use) -> Self {
        self.uses.push(one);
        self
    }
}
