//! Launch variables, case by case.

use std::env::VarError;

use portway_clique::CliqueError;
use portway_clique::launch::{Launch, Launcher};

type Variables = &'static [(&'static str, &'static str)];

fn detect(variables: Variables) -> Result<Option<Launch>, CliqueError> {
    Launch::detect_in(&|name| {
        Ok(variables.iter().find(|(other, _)| *other == name).map(|(_, value)| (*value).to_owned()))
    })
}

fn launch(
    launcher: Launcher,
    rank: u32,
    size: u32,
    local_rank: Option<u32>,
    local_size: Option<u32>,
) -> Launch {
    Launch { launcher, rank, size, local_rank, local_size, master: None }
}

const OPEN_MPI: Variables = &[
    ("OMPI_COMM_WORLD_RANK", "3"),
    ("OMPI_COMM_WORLD_SIZE", "4"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
];

#[test]
fn each_launcher_is_recognised() {
    let torchrun = Launch {
        master: Some(("node-1.cluster".to_owned(), 29500)),
        ..launch(Launcher::Torchrun, 3, 8, Some(1), Some(2))
    };
    let cases: &[(Variables, Option<Launch>)] = &[
        (&[("PATH", "/bin"), ("HOME", "/root")], None),
        (
            &[
                ("RANK", "3"),
                ("WORLD_SIZE", "8"),
                ("LOCAL_RANK", "1"),
                ("LOCAL_WORLD_SIZE", "2"),
                ("MASTER_ADDR", "node-1.cluster"),
                ("MASTER_PORT", "29500"),
            ],
            Some(torchrun),
        ),
        (&[("RANK", "0"), ("WORLD_SIZE", "1")], Some(launch(Launcher::Torchrun, 0, 1, None, None))),
        (OPEN_MPI, Some(launch(Launcher::OpenMpi, 3, 4, Some(1), Some(2)))),
        (
            &[("PMI_RANK", "5"), ("PMI_SIZE", "6"), ("MPI_LOCALRANKID", "1"), ("MPI_LOCALNRANKS", "2")],
            Some(launch(Launcher::Pmi, 5, 6, Some(1), Some(2))),
        ),
        (
            &[("SLURM_PROCID", "2"), ("SLURM_NTASKS", "4"), ("SLURM_LOCALID", "0"), ("SLURM_STEP_ID", "0")],
            Some(launch(Launcher::Slurm, 2, 4, Some(0), None)),
        ),
        // The step may be smaller than the allocation.
        (
            &[
                ("SLURM_PROCID", "1"),
                ("SLURM_NTASKS", "8"),
                ("SLURM_STEP_NUM_TASKS", "2"),
                ("SLURM_STEP_ID", "4"),
            ],
            Some(launch(Launcher::Slurm, 1, 2, None, None)),
        ),
        // An allocation without a step: this is none of its tasks.
        (&[("SLURM_NTASKS", "8"), ("SLURM_JOB_ID", "77")], None),
    ];
    for (variables, expected) in cases {
        assert_eq!(detect(variables).unwrap(), *expected, "{variables:?}");
    }
}

#[test]
fn sets_that_say_the_same_are_one_and_an_outer_slurm_is_left_out() {
    let cases: &[(Variables, Launch)] = &[
        // srun with PMI: both are the step's.
        (
            &[
                ("PMI_RANK", "1"),
                ("PMI_SIZE", "4"),
                ("SLURM_PROCID", "1"),
                ("SLURM_STEP_NUM_TASKS", "4"),
                ("SLURM_LOCALID", "1"),
                ("SLURM_STEP_ID", "0"),
            ],
            launch(Launcher::Pmi, 1, 4, Some(1), None),
        ),
        // A script that passes Open MPI's numbers on under torchrun's names.
        (
            &[
                ("OMPI_COMM_WORLD_RANK", "2"),
                ("OMPI_COMM_WORLD_SIZE", "4"),
                ("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
                ("RANK", "2"),
                ("WORLD_SIZE", "4"),
            ],
            launch(Launcher::Torchrun, 2, 4, Some(0), None),
        ),
        // mpirun in a batch script of one task, and of as many as there are ranks: no step, so not the ranks'.
        (
            &[
                ("OMPI_COMM_WORLD_RANK", "3"),
                ("OMPI_COMM_WORLD_SIZE", "4"),
                ("SLURM_PROCID", "0"),
                ("SLURM_NTASKS", "1"),
            ],
            launch(Launcher::OpenMpi, 3, 4, None, None),
        ),
        (
            &[
                ("OMPI_COMM_WORLD_RANK", "3"),
                ("OMPI_COMM_WORLD_SIZE", "4"),
                ("SLURM_PROCID", "0"),
                ("SLURM_NTASKS", "4"),
            ],
            launch(Launcher::OpenMpi, 3, 4, None, None),
        ),
        // torchrun, once on each node by srun: a step of its own size.
        (
            &[
                ("RANK", "13"),
                ("WORLD_SIZE", "16"),
                ("SLURM_PROCID", "1"),
                ("SLURM_STEP_NUM_TASKS", "2"),
                ("SLURM_STEP_ID", "0"),
            ],
            launch(Launcher::Torchrun, 13, 16, None, None),
        ),
    ];
    for (variables, expected) in cases {
        assert_eq!(detect(variables).unwrap().as_ref(), Some(expected), "{variables:?}");
    }
}

fn error(variables: Variables) -> String {
    match detect(variables) {
        Err(error @ CliqueError::Config { .. }) => error.to_string(),
        other => panic!("{variables:?}: {other:?}"),
    }
}

#[test]
fn sets_that_differ_are_an_error_that_prints_both() {
    let cases: &[(Variables, [&str; 2])] = &[
        (
            &[
                ("RANK", "0"),
                ("WORLD_SIZE", "8"),
                ("OMPI_COMM_WORLD_RANK", "1"),
                ("OMPI_COMM_WORLD_SIZE", "2"),
            ],
            ["Torchrun (RANK=0, WORLD_SIZE=8)", "OpenMpi (OMPI_COMM_WORLD_RANK=1, OMPI_COMM_WORLD_SIZE=2)"],
        ),
        (
            &[
                ("PMI_RANK", "0"),
                ("PMI_SIZE", "2"),
                ("OMPI_COMM_WORLD_RANK", "0"),
                ("OMPI_COMM_WORLD_SIZE", "3"),
            ],
            ["OMPI_COMM_WORLD_SIZE=3", "PMI_SIZE=2"],
        ),
        // A step of as many tasks that counts them otherwise.
        (
            &[
                ("RANK", "1"),
                ("WORLD_SIZE", "4"),
                ("SLURM_PROCID", "2"),
                ("SLURM_STEP_NUM_TASKS", "4"),
                ("SLURM_STEP_ID", "0"),
            ],
            ["Torchrun (RANK=1, WORLD_SIZE=4)", "Slurm (SLURM_PROCID=2, tasks=4)"],
        ),
        (
            &[
                ("RANK", "1"),
                ("WORLD_SIZE", "4"),
                ("LOCAL_RANK", "1"),
                ("OMPI_COMM_WORLD_RANK", "1"),
                ("OMPI_COMM_WORLD_SIZE", "4"),
                ("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
            ],
            ["LOCAL_RANK=1", "OMPI_COMM_WORLD_LOCAL_RANK=0"],
        ),
    ];
    for (variables, parts) in cases {
        let error = error(variables);
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        // Each set alone is fine, so one can be picked.
        let lookup = |name: &str| {
            Ok(variables.iter().find(|(other, _)| *other == name).map(|(_, value)| (*value).to_owned()))
        };
        let alone = Launcher::ALL.map(|launcher| Launch::of(launcher, &lookup).unwrap());
        assert_eq!(alone.iter().flatten().count(), 2, "{variables:?}");
    }
}

#[test]
fn what_makes_no_sense_is_named() {
    let cases: &[(Variables, &str)] = &[
        (&[("RANK", "1")], "variable WORLD_SIZE: expected a number, since there is RANK=1, seen none"),
        (&[("WORLD_SIZE", "4")], "variable RANK: expected a number, since there is WORLD_SIZE=4, seen none"),
        (&[("SLURM_PROCID", "0")], "variable SLURM_STEP_NUM_TASKS"),
        (&[("RANK", "4"), ("WORLD_SIZE", "4")], "variable RANK: expected below WORLD_SIZE=4, seen \"4\""),
        (&[("RANK", "0"), ("WORLD_SIZE", "0")], "variable WORLD_SIZE: expected at least 1, seen \"0\""),
        (&[("RANK", "-1"), ("WORLD_SIZE", "4")], "seen \"-1\""),
        (&[("RANK", "+1"), ("WORLD_SIZE", "4")], "seen \"+1\""),
        (&[("RANK", ""), ("WORLD_SIZE", "4")], "seen \"\""),
        (&[("RANK", " 1"), ("WORLD_SIZE", "4")], "seen \" 1\""),
        (&[("RANK", "1"), ("WORLD_SIZE", "4294967296")], "a number up to 4294967295, seen \"4294967296\""),
        (&[("RANK", "0x1"), ("WORLD_SIZE", "4")], "seen \"0x1\""),
        (&[("RANK", "١"), ("WORLD_SIZE", "4")], "variable RANK"),
        (&[("RANK", "\x1b[2J"), ("WORLD_SIZE", "4")], "seen \"\\u{1b}[2J\""),
        (
            &[("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "2")],
            "LOCAL_RANK: expected below LOCAL_WORLD_SIZE=2",
        ),
        (
            &[("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "3")],
            "LOCAL_WORLD_SIZE: expected 1 to WORLD_SIZE=2",
        ),
        (&[("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "host")], "variable MASTER_PORT"),
        (&[("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_PORT", "1")], "variable MASTER_ADDR"),
        (
            &[("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a;rm -rf b"), ("MASTER_PORT", "1")],
            "MASTER_ADDR: expected a host name or an address",
        ),
        (
            &[("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "h"), ("MASTER_PORT", "0")],
            "1 to 65535, seen \"0\"",
        ),
        (
            &[("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "h"), ("MASTER_PORT", "65536")],
            "seen \"65536\"",
        ),
    ];
    for (variables, part) in cases {
        let error = error(variables);
        assert!(error.contains(part), "{variables:?}: {error}");
    }
    let long = "9".repeat(10_000);
    let huge = Launch::detect_in(&|name| Ok((name == "RANK").then(|| long.clone()))).unwrap_err().to_string();
    assert!(huge.len() < 200, "{huge}");
    let no_text = Launch::detect_in(&|name| match name {
        "PMI_RANK" => Err(VarError::NotUnicode("\u{fffd}".into())),
        _ => Ok(None),
    });
    assert!(no_text.unwrap_err().to_string().contains("variable PMI_RANK: expected text"));
}
