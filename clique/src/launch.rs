//! [`Launch`]: who this process is, from the variables of the launcher that started it.
//!
//! | launcher | rank, size | on this host |
//! | --- | --- | --- |
//! | torchrun | `RANK`, `WORLD_SIZE` | `LOCAL_RANK`, `LOCAL_WORLD_SIZE`; also `MASTER_ADDR`, `MASTER_PORT` |
//! | Open MPI | `OMPI_COMM_WORLD_RANK`, `OMPI_COMM_WORLD_SIZE` | `OMPI_COMM_WORLD_LOCAL_RANK`, `OMPI_COMM_WORLD_LOCAL_SIZE` |
//! | MPICH and others over PMI | `PMI_RANK`, `PMI_SIZE` | `MPI_LOCALRANKID`, `MPI_LOCALNRANKS` |
//! | Slurm | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` or `SLURM_NTASKS` | `SLURM_LOCALID` |
//!
//! # When there are several sets
//!
//! Sets that say the same are one. Sets that differ are an error that prints both; [`Launch::of`] then picks one.
//!
//! Slurm is the exception, because its variables reach every process of an allocation. In a batch script, for example,
//! they say task 0 of N to everything that the script starts, also to each of the ranks of an `mpirun`. So beside another
//! set Slurm's count only if they are those of a job step (`SLURM_STEP_ID`) with as many tasks as the other set has ranks;
//! otherwise they describe what the launcher runs in, and are left out.

use std::env::{VarError, var};

use crate::CliqueError;

/// What starts the processes of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Launcher {
    /// PyTorch's `torchrun`, and whatever sets the same variables.
    Torchrun,
    /// Open MPI's `mpirun`.
    OpenMpi,
    /// MPICH's `mpiexec`, and others that speak PMI.
    Pmi,
    /// Slurm's `srun`.
    Slurm,
}

/// The names of a launcher's variables.
struct Names {
    rank: &'static str,
    size: &'static [&'static str],
    local_rank: &'static str,
    local_size: Option<&'static str>,
}

impl Launcher {
    /// In the order in which they are asked.
    pub const ALL: [Launcher; 4] = [Launcher::Torchrun, Launcher::OpenMpi, Launcher::Pmi, Launcher::Slurm];

    fn names(self) -> Names {
        match self {
            Launcher::Torchrun => Names {
                rank: "RANK",
                size: &["WORLD_SIZE"],
                local_rank: "LOCAL_RANK",
                local_size: Some("LOCAL_WORLD_SIZE"),
            },
            Launcher::OpenMpi => Names {
                rank: "OMPI_COMM_WORLD_RANK",
                size: &["OMPI_COMM_WORLD_SIZE"],
                local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
                local_size: Some("OMPI_COMM_WORLD_LOCAL_SIZE"),
            },
            Launcher::Pmi => Names {
                rank: "PMI_RANK",
                size: &["PMI_SIZE"],
                local_rank: "MPI_LOCALRANKID",
                local_size: Some("MPI_LOCALNRANKS"),
            },
            Launcher::Slurm => Names {
                rank: "SLURM_PROCID",
                size: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
                local_rank: "SLURM_LOCALID",
                local_size: None,
            },
        }
    }
}

/// Which of the job's processes this is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Who says so: the first of those that agree.
    pub launcher: Launcher,
    /// This process, from 0.
    pub rank: u32,
    /// How many processes there are.
    pub size: u32,
    /// This process among those on its host, from 0, where the launcher says.
    pub local_rank: Option<u32>,
    /// How many there are on its host, where the launcher says.
    pub local_size: Option<u32>,
    /// torchrun's host and port. The port is in use by torchrun itself, so a store needs another one.
    pub master: Option<(String, u16)>,
}

/// Reads a variable; `None` if it is not set.
type Lookup<'a> = &'a dyn Fn(&str) -> Result<Option<String>, VarError>;

impl Launch {
    /// Recognises the launcher by the variables of this process; `None` if there is none.
    ///
    /// # Errors
    /// [`CliqueError::Config`]: a set is incomplete, a value makes no sense, or two sets differ.
    pub fn detect() -> Result<Option<Self>, CliqueError> {
        Self::detect_in(&environment)
    }

    /// [`detect`](Self::detect), from variables that come from elsewhere.
    ///
    /// # Errors
    /// As there; an error of `lookup` is a value that makes no sense.
    pub fn detect_in(lookup: Lookup<'_>) -> Result<Option<Self>, CliqueError> {
        let mut found: Option<Launch> = None;
        for launcher in Launcher::ALL {
            let Some(next) = Self::of(launcher, lookup)? else { continue };
            let Some(first) = &mut found else {
                found = Some(next);
                continue;
            };
            if launcher == Launcher::Slurm && !(next.size == first.size && set(lookup, "SLURM_STEP_ID")?) {
                continue;
            }
            let local_differs = matches!((first.local_rank, next.local_rank), (Some(a), Some(b)) if a != b);
            if (next.rank, next.size) != (first.rank, first.size) || local_differs {
                return Err(CliqueError::Config {
                    what: "launch variables".to_owned(),
                    expected: format!("one set, or sets that say the same: {}", first.describe()),
                    seen: next.describe(),
                });
            }
            first.local_rank = first.local_rank.or(next.local_rank);
            first.local_size = first.local_size.or(next.local_size);
        }
        Ok(found)
    }

    /// What the variables of one launcher say, whatever else there is; `None` if they are not set.
    ///
    /// # Errors
    /// [`CliqueError::Config`]: the set is incomplete, or a value makes no sense.
    pub fn of(launcher: Launcher, lookup: Lookup<'_>) -> Result<Option<Self>, CliqueError> {
        let Names { rank, size, local_rank, local_size } = launcher.names();
        let rank_value = number(lookup, rank)?;
        let mut size_value = None;
        for name in size {
            if size_value.is_none() {
                size_value = number(lookup, name)?.map(|value| (*name, value));
            }
        }
        let (rank_value, (size_name, size_value)) = match (rank_value, size_value) {
            (None, None) => return Ok(None),
            // An allocation without a step says how many tasks it is for, and that this is none of them.
            (None, Some(_)) if launcher == Launcher::Slurm => return Ok(None),
            (Some(rank_value), Some(size_value)) => (rank_value, size_value),
            (Some(rank_value), None) => return Err(incomplete(size[0], format!("{rank}={rank_value}"))),
            (None, Some((name, value))) => return Err(incomplete(rank, format!("{name}={value}"))),
        };
        if size_value == 0 {
            return Err(wrong(size_name, "at least 1", "0"));
        }
        below(rank, rank_value, size_name, size_value)?;
        let local_rank_value = number(lookup, local_rank)?;
        let local_size_value = local_size.map(|name| number(lookup, name)).transpose()?.flatten();
        if let (Some(value), Some(of)) = (local_size_value, local_size) {
            if value == 0 || value > size_value {
                return Err(wrong(of, format!("1 to {size_name}={size_value}"), &value.to_string()));
            }
        }
        if let Some(value) = local_rank_value {
            below(
                local_rank,
                value,
                local_size.unwrap_or(size_name),
                local_size_value.unwrap_or(size_value),
            )?;
        }
        let master = match launcher {
            Launcher::Torchrun => master(lookup)?,
            _ => None,
        };
        Ok(Some(Launch {
            launcher,
            rank: rank_value,
            size: size_value,
            local_rank: local_rank_value,
            local_size: local_size_value,
            master,
        }))
    }

    fn describe(&self) -> String {
        let names = self.launcher.names();
        let size = if names.size.len() > 1 { "tasks" } else { names.size[0] };
        let local =
            self.local_rank.map(|value| format!(", {}={value}", names.local_rank)).unwrap_or_default();
        format!("{:?} ({}={}, {size}={}{local})", self.launcher, names.rank, self.rank, self.size)
    }
}

fn environment(name: &str) -> Result<Option<String>, VarError> {
    match var(name) {
        Ok(value) => Ok(Some(value)),
        Err(VarError::NotPresent) => Ok(None),
        Err(error) => Err(error),
    }
}

fn wrong(name: &str, expected: impl Into<String>, seen: &str) -> CliqueError {
    // Long enough for anything that makes sense, and nothing that a terminal would act on.
    let seen: String = seen.chars().take(40).flat_map(char::escape_debug).collect();
    CliqueError::Config {
        what: format!("variable {name}"),
        expected: expected.into(),
        seen: format!("\"{seen}\""),
    }
}

fn incomplete(missing: &str, have: String) -> CliqueError {
    CliqueError::Config {
        what: format!("variable {missing}"),
        expected: format!("a number, since there is {have}"),
        seen: "none".to_owned(),
    }
}

fn below(name: &str, value: u32, of: &str, limit: u32) -> Result<(), CliqueError> {
    if value < limit { Ok(()) } else { Err(wrong(name, format!("below {of}={limit}"), &value.to_string())) }
}

fn get(lookup: Lookup<'_>, name: &str) -> Result<Option<String>, CliqueError> {
    lookup(name).map_err(|error| wrong(name, "text", &error.to_string()))
}

fn set(lookup: Lookup<'_>, name: &str) -> Result<bool, CliqueError> {
    Ok(get(lookup, name)?.is_some())
}

/// Digits and nothing else: a sign, a blank or a suffix is no number that a launcher writes.
fn number(lookup: Lookup<'_>, name: &str) -> Result<Option<u32>, CliqueError> {
    let Some(text) = get(lookup, name)? else { return Ok(None) };
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let value = text.parse().ok().filter(|_| digits);
    value.map(Some).ok_or_else(|| wrong(name, format!("a number up to {}", u32::MAX), &text))
}

fn master(lookup: Lookup<'_>) -> Result<Option<(String, u16)>, CliqueError> {
    const ADDRESS: &str = "MASTER_ADDR";
    const PORT: &str = "MASTER_PORT";
    match (get(lookup, ADDRESS)?, number(lookup, PORT)?) {
        (None, None) => Ok(None),
        (Some(host), None) => Err(incomplete(PORT, format!("{ADDRESS}={}", host.escape_debug()))),
        (None, Some(port)) => Err(incomplete(ADDRESS, format!("{PORT}={port}"))),
        (Some(host), Some(port)) => {
            // What a host name or an address can hold, and the longest name of the domain name system.
            let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b".-_:%".contains(&byte);
            if host.is_empty() || host.len() > 253 || !host.bytes().all(allowed) {
                return Err(wrong(ADDRESS, "a host name or an address", &host));
            }
            match u16::try_from(port) {
                Ok(port) if port > 0 => Ok(Some((host, port))),
                _ => Err(wrong(PORT, "1 to 65535", &port.to_string())),
            }
        }
    }
}
