//! Files that are not what they should be.

mod meeting;

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use meeting::{PATIENCE, file, fresh_folder, ok, round};
use portway_clique::CliqueError;
use portway_clique::rendezvous::{JobToken, Rendezvous, Round, SharedFile, SharedFileConfig};

fn pair(directory: &Path) -> (SharedFile, SharedFile) {
    std::thread::scope(|scope| {
        let second = scope.spawn(|| SharedFile::start(file(1, 2, directory)).unwrap());
        let first = SharedFile::start(file(0, 2, directory)).unwrap();
        (first, second.join().unwrap())
    })
}

/// Everybody leaves; participant 0 last, since it waits.
fn leave(first: SharedFile, second: SharedFile) {
    second.close(PATIENCE).unwrap();
    first.close(PATIENCE).unwrap();
}

/// The only folder in a folder whose name begins like this.
fn the_folder(directory: &Path, beginning: &str) -> PathBuf {
    let all = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let mut found: Vec<PathBuf> =
        all.filter(|path| path.file_name().unwrap().to_str().unwrap().starts_with(beginning)).collect();
    assert_eq!(found.len(), 1, "{found:?}");
    found.remove(0)
}

fn job(directory: &Path) -> PathBuf {
    the_folder(directory, "portway-")
}

fn run(directory: &Path) -> PathBuf {
    the_folder(&job(directory), "run-")
}

/// The folder of the only round.
fn round_folder(directory: &Path) -> PathBuf {
    let all = fs::read_dir(run(directory)).unwrap().map(|entry| entry.unwrap().path());
    let mut folders: Vec<PathBuf> = all.filter(|path| path.is_dir()).collect();
    assert_eq!(folders.len(), 1, "{folders:?}");
    folders.remove(0)
}

#[test]
fn nothing_is_left_behind() {
    let directory = fresh_folder();
    let (first, second) = pair(&directory);
    for attempt in 0..20 {
        for phase in ["a", "b"] {
            first.post(&round(attempt, phase), ok("0")).unwrap();
            second.post(&round(attempt, phase), ok("1")).unwrap();
            for member in [&first, &second] {
                assert!(
                    member.gather(&round(attempt, phase), PATIENCE).unwrap().0.iter().all(Option::is_some)
                );
            }
            let left = fs::read_dir(run(&directory)).unwrap().count();
            assert_eq!(left, 2, "two have joined, and no round is kept");
        }
    }
    leave(first, second);
    assert_eq!(fs::read_dir(&directory).unwrap().count(), 0);
    fs::remove_dir(&directory).unwrap();
}

/// What another post in the round's folder does to a gather: its error, which has to name the file.
/// In a clique of some of the participants nobody else posts, or gathers, and participant 0 may be idle.
#[test]
fn rounds_that_some_participants_leave_behind_have_a_limit() {
    const LIMIT: usize = 1024;
    let directory = fresh_folder();
    let start = |participant| SharedFile::start(file(participant, 3, &directory)).unwrap();
    let [first, second, third] = std::thread::scope(|scope| {
        [0, 1, 2].map(|participant| scope.spawn(move || start(participant))).map(|one| one.join().unwrap())
    });
    for number in 0..LIMIT + 60 {
        let round = Round { clique: format!("child {number}"), attempt: 0, phase: "a" };
        second.post(&round, ok("here")).unwrap();
        // The last ones are whole.
        if number >= LIMIT {
            third.post(&round, ok("here")).unwrap();
            let said = third.gather(&round, Duration::ZERO).unwrap();
            assert!(said.0[0].is_none() && said.0[1].is_some());
        }
    }
    let all = fs::read_dir(run(&directory)).unwrap().map(|entry| entry.unwrap().path());
    let rounds = all.filter(|path| path.is_dir()).count();
    assert!(rounds <= LIMIT + 2, "{rounds} rounds are left");
    third.close(PATIENCE).unwrap();
    leave(first, second);
    let _ = fs::remove_dir_all(&directory);
}

fn hostile(put: impl Fn(&Path)) -> String {
    let directory = fresh_folder();
    let (first, second) = pair(&directory);
    first.post(&round(0, "a"), ok("0")).unwrap();
    let path = round_folder(&directory).join("post.1");
    put(&path);
    let began = Instant::now();
    let error = match first.gather(&round(0, "a"), PATIENCE) {
        Err(error @ CliqueError::Foreign { .. }) => error.to_string(),
        other => panic!("{other:?}"),
    };
    assert!(began.elapsed() < PATIENCE / 4, "{:?}", began.elapsed());
    assert!(error.contains(path.to_str().unwrap()), "{error}");
    leave(first, second);
    fs::remove_dir_all(&directory).unwrap();
    error
}

/// A post as it should be, of another participant's round.
fn good_post() -> Vec<u8> {
    let directory = fresh_folder();
    let (first, second) = pair(&directory);
    second.post(&round(7, "other"), ok("1")).unwrap();
    let bytes = fs::read(round_folder(&directory).join("post.1")).unwrap();
    leave(first, second);
    fs::remove_dir_all(&directory).unwrap();
    bytes
}

#[test]
fn a_file_that_is_no_post_is_a_typed_error() {
    let good = good_post();
    let truncated = hostile(|path| fs::write(path, &good[..good.len() - 1]).unwrap());
    assert!(truncated.contains("participant 1") && truncated.contains("wrong length"), "{truncated}");
    assert!(hostile(|path| fs::write(path, b"").unwrap()).contains("wrong length"));
    assert!(hostile(|path| fs::write(path, b"something else entirely").unwrap()).contains("wrong magic"));
    let other_round = hostile(|path| fs::write(path, &good).unwrap());
    assert!(
        other_round.contains("wrong round") && other_round.contains("\"other\" of attempt 7"),
        "{other_round}"
    );
    let huge = hostile(|path| fs::File::create(path).unwrap().set_len(1 << 40).unwrap());
    assert!(huge.contains("wrong length") && huge.contains("seen 1099511627776 bytes"), "{huge}");
    let link = hostile(|path| symlink("/etc/passwd", path).unwrap());
    assert!(link.contains("expected a regular file, seen a symbolic link"), "{link}");
    assert!(hostile(|path| fs::create_dir(path).unwrap()).contains("expected a regular file, seen a folder"));
    let pipe = hostile(|path| {
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    });
    assert!(pipe.contains("seen a device, pipe or socket"), "{pipe}");
}

#[test]
fn somebody_elses_file_is_a_typed_error() {
    if !rustix::process::geteuid().is_root() {
        println!("waived: a file of another user: only root can make one");
        return;
    }
    let good = good_post();
    let error = hostile(|path| {
        fs::write(path, &good).unwrap();
        std::os::unix::fs::chown(path, Some(12345), None).unwrap();
    });
    assert!(error.contains("wrong owner") && error.contains("seen 12345"), "{error}");
}

/// An earlier run that was killed has left everything, under the same token: posts, hellos, answers.
#[test]
fn files_of_an_earlier_run_are_known_as_such_and_removed() {
    let directory = fresh_folder();
    let (first, second) = pair(&directory);
    first.post(&round(0, "a"), ok("old 0")).unwrap();
    second.post(&round(0, "a"), ok("old 1")).unwrap();
    let saved = fresh_folder();
    let copied =
        std::process::Command::new("cp").arg("-a").arg(job(&directory)).arg(&saved).status().unwrap();
    assert!(copied.success());
    let old_run = run(&directory);
    leave(first, second);
    let copied =
        std::process::Command::new("cp").arg("-a").arg(job(&saved)).arg(&directory).status().unwrap();
    assert!(copied.success() && old_run.is_dir());

    let (first, second) = pair(&directory);
    assert!(!old_run.exists(), "participant 0 has removed it");
    let said = first.gather(&round(0, "a"), Duration::from_millis(50)).unwrap();
    assert_eq!(said.0, [None, None], "the old posts are none of this run's");
    first.post(&round(0, "a"), ok("0")).unwrap();
    second.post(&round(0, "a"), ok("1")).unwrap();
    assert_eq!(first.gather(&round(0, "a"), PATIENCE).unwrap().0, [Some(ok("0")), Some(ok("1"))]);
    leave(first, second);
    assert_eq!(fs::read_dir(&directory).unwrap().count(), 0);
    fs::remove_dir_all(&directory).unwrap();
    fs::remove_dir_all(&saved).unwrap();
}

fn start_error(config: SharedFileConfig) -> CliqueError {
    match SharedFile::start(config) {
        Err(error) => error,
        Ok(started) => panic!("{started:?}"),
    }
}

#[test]
fn who_does_not_belong_there_is_told_and_who_is_missing_is_named() {
    let directory = fresh_folder();
    let short = |config: SharedFileConfig| SharedFileConfig { within: Duration::from_millis(300), ..config };
    // Nobody else comes.
    let began = Instant::now();
    let error = start_error(short(file(0, 3, &directory)));
    assert!(matches!(error, CliqueError::Timeout { .. }), "{error}");
    assert!(error.to_string().contains("2 have not; participant 1 has not come"), "{error}");
    let error = start_error(short(file(1, 2, &directory)));
    let waited = |error: &CliqueError| match error {
        CliqueError::Timeout { waited, .. } => *waited,
        other => panic!("{other}"),
    };
    assert!(waited(&error) >= Duration::from_millis(300), "{error}");
    assert!(error.to_string().contains("an answer of participant 0"), "{error}");
    // Twice the limit, and as much again for what else the machine does.
    assert!(began.elapsed() < Duration::from_millis(1200), "{:?}", began.elapsed());

    // Another number of participants: both are told.
    std::thread::scope(|scope| {
        let wrong = scope.spawn(|| start_error(short(file(1, 3, &directory))));
        let error = start_error(short(file(0, 2, &directory))).to_string();
        assert!(error.contains("number of participants of participant 1, process"), "{error}");
        let error = wrong.join().unwrap();
        assert!(matches!(error, CliqueError::Config { .. }), "{error}");
        assert!(error.to_string().contains("expected 2, seen 3"), "{error}");
    });

    // Another job's token: they do not see each other.
    let mut stranger = short(file(1, 2, &directory));
    stranger.member.token = JobToken::new(*b"another job's").unwrap();
    std::thread::scope(|scope| {
        let stranger = scope.spawn(|| start_error(stranger));
        let error = start_error(short(file(0, 2, &directory))).to_string();
        assert!(error.contains("participant 1 has not come"), "{error}");
        assert!(matches!(stranger.join().unwrap(), CliqueError::Timeout { .. }));
    });

    // A second one of the same number, while the first is there; and after it has gone, none.
    let (first, second) = pair(&directory);
    let error = start_error(short(file(1, 2, &directory))).to_string();
    assert!(error.contains("participant 1: expected one, seen a second one: it is process"), "{error}");
    leave(first, second);
    let (first, second) = pair(&directory);
    leave(first, second);
    fs::remove_dir_all(&directory).unwrap();
}

#[test]
fn a_folder_that_is_a_link_is_a_typed_error() {
    let directory = fresh_folder();
    let (first, second) = pair(&directory);
    let name = job(&directory);
    leave(first, second);
    symlink("/etc", &name).unwrap();
    let error = start_error(file(0, 2, &directory));
    assert!(matches!(error, CliqueError::Foreign { .. }), "{error}");
    assert!(error.to_string().contains("expected a folder, seen a symbolic link"), "{error}");
    let missing = start_error(file(0, 2, &directory.join("not there")));
    assert!(matches!(missing, CliqueError::System { errno: Some(2), .. }), "{missing}");
    fs::remove_dir_all(&directory).unwrap();
}

#[test]
fn files_are_for_their_owner_alone() {
    let directory = fresh_folder();
    let (first, second) = pair(&directory);
    for (path, mode) in
        [(job(&directory), 0o700), (run(&directory), 0o700), (job(&directory).join("hello.1"), 0o600)]
    {
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, mode, "{path:?}");
    }
    leave(first, second);
    fs::remove_dir_all(&directory).unwrap();
}
