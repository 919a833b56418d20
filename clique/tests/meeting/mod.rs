//! How tests bring participants together.
#![allow(dead_code)] // each test program uses a part

use std::net::{Ipv4Addr, SocketAddr};
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use portway_clique::rendezvous::{
    Hub, JobToken, Membership, Post, Rendezvous, Round, SharedFile, SharedFileConfig, Tcp, TcpConfig,
};

/// How long a test waits for what has to happen.
pub const PATIENCE: Duration = Duration::from_secs(20);

pub const LOCALHOST: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// An address at which nobody listens, and that nobody else takes: every address that begins with 127 is this host's, and
/// a port that was free a moment ago at the usual one may be anybody's.
pub fn free_address() -> SocketAddr {
    static COUNT: AtomicUsize = AtomicUsize::new(1);
    let [_, _, high, low] = std::process::id().to_be_bytes();
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let ip = Ipv4Addr::new(127, high, low, u8::try_from(count).unwrap());
    std::net::TcpListener::bind((ip, 0)).unwrap().local_addr().unwrap()
}

/// The kinds of rendezvous.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    InProcess,
    Tcp,
    SharedFile,
}

pub const KINDS: [Kind; 3] = [Kind::InProcess, Kind::Tcp, Kind::SharedFile];

pub fn member(participant: u32, participants: u32) -> Membership {
    Membership { token: JobToken::new(*b"a test's token").unwrap(), participant, participants }
}

pub fn tcp(participant: u32, participants: u32, address: SocketAddr) -> TcpConfig {
    TcpConfig { member: member(participant, participants), address, within: PATIENCE }
}

pub fn file(participant: u32, participants: u32, directory: &Path) -> SharedFileConfig {
    SharedFileConfig {
        member: member(participant, participants),
        directory: directory.to_owned(),
        within: PATIENCE,
    }
}

/// A folder that nobody else uses.
pub fn fresh_folder() -> PathBuf {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let name = format!("meeting-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// All participants of a rendezvous. Participant 0 leaves last, because it waits for the others.
pub struct Members {
    all: Vec<Arc<dyn Rendezvous>>,
    folder: Option<PathBuf>,
}

impl Deref for Members {
    type Target = [Arc<dyn Rendezvous>];

    fn deref(&self) -> &Self::Target {
        &self.all
    }
}

impl Drop for Members {
    fn drop(&mut self) {
        while self.all.pop().is_some() {}
        if let Some(folder) = &self.folder {
            let _ = std::fs::remove_dir_all(folder);
        }
    }
}

pub fn meet(kind: Kind, participants: u32) -> Members {
    let folder = (kind == Kind::SharedFile).then(fresh_folder);
    let all = match kind {
        Kind::InProcess => {
            let hub = Hub::new(participants).unwrap();
            (0..participants).map(|participant| Arc::new(hub.join(participant).unwrap()) as _).collect()
        }
        Kind::Tcp => {
            let first = Tcp::start(tcp(0, participants, LOCALHOST)).unwrap();
            let address = first.address();
            let rest =
                (1..participants).map(|p| Arc::new(Tcp::start(tcp(p, participants, address)).unwrap()) as _);
            std::iter::once(Arc::new(first) as _).chain(rest).collect()
        }
        Kind::SharedFile => {
            let directory = folder.as_deref().unwrap();
            let start = &|p| SharedFile::start(file(p, participants, directory)).unwrap();
            std::thread::scope(|scope| {
                let all: Vec<_> = (0..participants).map(|p| scope.spawn(move || start(p))).collect();
                all.into_iter().map(|one| Arc::new(one.join().unwrap()) as _).collect()
            })
        }
    };
    Members { all, folder }
}

pub fn round(attempt: u64, phase: &'static str) -> Round {
    Round { clique: "test".to_owned(), attempt, phase }
}

pub fn ok(text: &str) -> Post {
    Post::Ok(text.as_bytes().to_vec())
}

pub fn text(said: Option<Post>) -> String {
    match said {
        Some(Post::Ok(bytes)) => String::from_utf8(bytes).unwrap(),
        other => panic!("{other:?}"),
    }
}
