//! Files that are not what they should be.

mod meeting;

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::time::{Duration, Instant};

use meeting::{PATIENCE, file, fresh_folder, ok, round};
use portway_clique::CliqueError;
use portway_clique::rendezvous::{Gathered, JobToken, Post, Rendezvous, Round, SharedFile, SharedFileConfig};

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

/// The folders of the rounds.
fn rounds(directory: &Path) -> Vec<PathBuf> {
    let all = fs::read_dir(run(directory).join("rounds")).unwrap();
    all.map(|entry| entry.unwrap().path()).collect()
}

/// The folder of the only round.
fn round_folder(directory: &Path) -> PathBuf {
    let mut folders = rounds(directory);
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
            assert_eq!(rounds(&directory), [] as [PathBuf; 0], "no round is kept");
        }
    }
    leave(first, second);
    assert_eq!(fs::read_dir(&directory).unwrap().count(), 0);
    fs::remove_dir(&directory).unwrap();
}

/// How many rounds are kept.
const LIMIT: usize = 1024;
/// How many more there may be before some are given up.
const TOO_MANY: usize = 128;

fn named(name: &str, number: usize) -> Round {
    Round { clique: format!("{name} {number}"), attempt: 0, phase: "a" }
}

/// In a clique of some of the participants nobody else posts, or gathers, and participant 0 may be idle.
#[test]
fn rounds_that_some_participants_leave_behind_have_a_limit() {
    let directory = fresh_folder();
    let start = |participant| SharedFile::start(file(participant, 3, &directory)).unwrap();
    let [first, second, third] = std::thread::scope(|scope| {
        [0, 1, 2].map(|participant| scope.spawn(move || start(participant))).map(|one| one.join().unwrap())
    });
    let mut most = 0;
    for number in 0..LIMIT + 3 * TOO_MANY {
        let round = named("child", number);
        second.post(&round, ok("here")).unwrap();
        if number >= LIMIT {
            most = most.max(rounds(&directory).len());
            // The last ones are whole.
            third.post(&round, ok("here")).unwrap();
            let said = third.gather(&round, Duration::ZERO).unwrap();
            assert!(said.0[0].is_none() && said.0[1].is_some());
        }
    }
    let left = rounds(&directory).len();
    assert!((LIMIT..=LIMIT + TOO_MANY).contains(&left), "{left} rounds are left");
    assert_eq!(
        most,
        LIMIT + TOO_MANY,
        "they go many at a time, so that few posts have to look for the oldest"
    );
    third.close(PATIENCE).unwrap();
    leave(first, second);
    let _ = fs::remove_dir_all(&directory);
}

/// A round that was not posted to for long is not given up while somebody waits in it; the control is one that nobody waits
/// in, which is, and using that is an error at once.
#[test]
fn who_waits_in_a_round_uses_it() {
    let directory = fresh_folder();
    let (first, second) = pair(&directory);
    let changed = |path: &Path| fs::metadata(path).unwrap().modified().unwrap();
    let (waiting, idle) = (named("waiting", 0), named("idle", 0));
    first.post(&waiting, ok("0")).unwrap();
    let path = round_folder(&directory);
    first.post(&idle, ok("0")).unwrap();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| first.gather(&waiting, PATIENCE).unwrap());
        for number in 0..LIMIT {
            second.post(&named("abandoned", number), ok("1")).unwrap();
        }
        // All of them are younger than the two, until it is seen again that somebody waits.
        let (began, before) = (Instant::now(), changed(&path));
        while changed(&path) == before {
            assert!(
                began.elapsed() < PATIENCE / 4,
                "no sign of the one who waits after {:?}",
                began.elapsed()
            );
            std::thread::sleep(Duration::from_millis(10));
        }
        for number in LIMIT..LIMIT + 2 * TOO_MANY {
            second.post(&named("abandoned", number), ok("1")).unwrap();
        }
        assert!(path.is_dir());
        second.post(&waiting, ok("1")).unwrap();
        assert_eq!(waits.join().unwrap().0, [Some(ok("0")), Some(ok("1"))]);
    });
    let began = Instant::now();
    let error = first.gather(&idle, PATIENCE).unwrap_err();
    assert!(matches!(error, CliqueError::Config { .. }), "{error}");
    assert!(
        error.to_string().contains("clique \"idle 0\"") && error.to_string().contains("given up"),
        "{error}"
    );
    assert_eq!(first.look(&idle).unwrap_err().to_string(), error.to_string());
    assert!(began.elapsed() < PATIENCE / 4);
    leave(first, second);
    let _ = fs::remove_dir_all(&directory);
}

/// All fail at the same moment, and whoever gathers when gets the same failure.
#[test]
fn of_many_who_fail_at_once_one_is_first() {
    const COUNT: u32 = 12;
    let directory = fresh_folder();
    let start = |participant| SharedFile::start(file(participant, COUNT, &directory)).unwrap();
    let all: Vec<SharedFile> = std::thread::scope(|scope| {
        let all: Vec<_> = (0..COUNT).map(|participant| scope.spawn(move || start(participant))).collect();
        all.into_iter().map(|one| one.join().unwrap()).collect()
    });
    let together = Barrier::new(COUNT as usize);
    let mut firsts = std::collections::BTreeSet::new();
    for number in 0..50 {
        let round = named("failing", number);
        let heard: Vec<Gathered> = std::thread::scope(|scope| {
            let heard: Vec<_> = all
                .iter()
                .map(|one| {
                    let (round, together) = (&round, &together);
                    scope.spawn(move || {
                        together.wait();
                        one.post(round, Post::Failed(one.participant().to_le_bytes().to_vec())).unwrap();
                        one.gather(round, PATIENCE).unwrap()
                    })
                })
                .collect();
            heard.into_iter().map(|one| one.join().unwrap()).collect()
        });
        for said in &heard {
            assert_eq!(said, &heard[0], "round {number}");
            assert_eq!(said.0.iter().flatten().count(), 1);
        }
        firsts.insert(heard[0].0.iter().position(Option::is_some));
    }
    // The control: they did race. That of the lowest participant is not what decides.
    assert!(firsts.len() > 1, "the same one was first each time: {firsts:?}");
    assert_eq!(rounds(&directory), [] as [PathBuf; 0]);
    let mut all = all.into_iter();
    let first = all.next().unwrap();
    drop(all);
    first.close(PATIENCE).unwrap();
    fs::remove_dir_all(&directory).unwrap();
}

/// A failure that cannot be put where the others look for it is an error of the post, and not lost.
#[test]
fn a_failure_that_cannot_be_told_is_an_error() {
    let directory = fresh_folder();
    let (first, second) = pair(&directory);
    first.post(&round(0, "a"), ok("0")).unwrap();
    let in_the_way = round_folder(&directory).join("failed");
    fs::write(&in_the_way, b"no folder").unwrap();
    let error = second.post(&round(0, "a"), Post::Failed(b"why".to_vec())).unwrap_err();
    assert!(matches!(error, CliqueError::System { errno: Some(_), .. }), "{error}");
    assert!(error.to_string().contains(in_the_way.to_str().unwrap()), "{error}");
    // The control: with nothing in the way it is told.
    second.post(&round(0, "b"), Post::Failed(b"why".to_vec())).unwrap();
    assert_eq!(
        first.gather(&round(0, "b"), PATIENCE).unwrap().0,
        [None, Some(Post::Failed(b"why".to_vec()))]
    );
    leave(first, second);
    let _ = fs::remove_dir_all(&directory);
}

/// A heartbeat is a look: before a round has ended it opens no file, and what it lists is that round and the names of others.
#[test]
fn a_heartbeat_reads_no_posts() {
    let directory = fresh_folder();
    let (first, second) = pair(&directory);
    first.post(&round(0, "a"), ok("0")).unwrap();
    let folder = round_folder(&directory);
    fs::write(folder.join("post.0"), b"not a post").unwrap();
    assert_eq!(second.look(&round(0, "a")).unwrap(), None);
    // The controls: it is read by whoever gathers, and by a look when the round has ended.
    assert!(matches!(second.gather(&round(0, "a"), PATIENCE), Err(CliqueError::Foreign { .. })));
    second.post(&round(0, "a"), ok("1")).unwrap();
    assert!(matches!(second.look(&round(0, "a")), Err(CliqueError::Foreign { .. })));
    leave(first, second);
    let _ = fs::remove_dir_all(&directory);
}

/// Nor does it take longer the more participants there are.
#[test]
fn a_heartbeat_takes_as_long_among_thousands_as_among_two() {
    let directory = fresh_folder();
    let (first, second) = pair(&directory);
    let shortest_look = || {
        let look = |_| {
            let began = Instant::now();
            assert_eq!(second.look(&round(0, "life")).unwrap(), None);
            began.elapsed()
        };
        (0..50).map(look).min().unwrap()
    };
    let few = shortest_look();
    let folder = run(&directory);
    for participant in 2..4096 {
        fs::write(folder.join(format!("joined.{participant}")), b"").unwrap();
    }
    let many = shortest_look();
    // The control: listing them takes longer.
    let began = Instant::now();
    assert!(fs::read_dir(&folder).unwrap().count() > 4096);
    let listing = began.elapsed();
    println!("recorded: a look takes {few:?} among 2, {many:?} among 4096; listing those {listing:?}");
    assert!(many < 10 * few && listing > 10 * few, "{few:?}, {many:?}, {listing:?}");
    leave(first, second);
    let _ = fs::remove_dir_all(&directory);
}

/// Dropping participant 0 removes the files when no round needs them, and not before: the control is one that somebody still
/// has to gather.
#[test]
fn files_that_are_dropped_stay_as_long_as_a_round_needs_them() {
    let short = Duration::from_millis(500);
    for is_gathered in [true, false] {
        let directory = fresh_folder();
        let (first, second) = pair(&directory);
        for member in [&first, &second] {
            member.post(&round(0, "a"), ok("x")).unwrap();
        }
        first.gather(&round(0, "a"), PATIENCE).unwrap();
        if is_gathered {
            second.gather(&round(0, "a"), PATIENCE).unwrap();
        }
        std::thread::scope(|scope| {
            let began = Instant::now();
            let leaving = scope.spawn(|| drop(first));
            if !is_gathered {
                std::thread::sleep(short);
                assert!(!leaving.is_finished());
                assert!(second.gather(&round(0, "a"), PATIENCE).unwrap().0.iter().all(Option::is_some));
            }
            leaving.join().unwrap();
            assert!(began.elapsed() < 3 * short, "{:?}", began.elapsed());
        });
        let error = second.look(&round(0, "b")).unwrap_err().to_string();
        assert!(error.contains("participant 0 has left"), "{error}");
        drop(second);
        let _ = fs::remove_dir_all(&directory);
    }
}

/// What another post in the round's folder does to a gather: its error, which has to name the file.
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

/// Participant 0 has seen that all have joined, and leaves before another one has seen it.
#[test]
fn a_first_that_leaves_at_once_is_not_waited_for() {
    const WITHIN: Duration = Duration::from_secs(3);
    for n in 0..16 {
        let directory = fresh_folder();
        let others: Vec<_> = [1, 2]
            .into_iter()
            .map(|one| {
                let directory = directory.clone();
                std::thread::spawn(move || {
                    // The second looks less and less often by the time that the last one comes.
                    std::thread::sleep(Duration::from_millis(u64::from(one - 1) * (30 + n)));
                    let (began, config) =
                        (Instant::now(), SharedFileConfig { within: WITHIN, ..file(one, 3, &directory) });
                    (SharedFile::start(config).map(drop).map_err(|error| error.to_string()), began.elapsed())
                })
            })
            .collect();
        drop(SharedFile::start(file(0, 3, &directory)).unwrap());
        for other in others {
            let (started, took) = other.join().unwrap();
            assert!(took < WITHIN / 2, "{took:?}: {started:?}");
            if let Err(error) = started {
                assert!(error.contains("it is gone: participant 0 has left"), "{error}");
            }
        }
        let _ = fs::remove_dir_all(&directory);
    }
}
