//! The events of the feature `tracing`: what they tell, and that none comes from the engine's thread.

use std::fmt::{Debug, Write};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use portway_fifo::{Fifo, Heap};
use portway_proxy::transport::Transport;
use portway_proxy::{ChannelConfig, Config, Engine, Loopback, Proxy, RunConfig, Stop, loopback};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

const LIMIT: Duration = Duration::from_secs(5);

/// Keeps each event as a line: thread, level, fields.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<String>>>);

struct Fields<'a>(&'a mut String);

impl Visit for Fields<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        write!(self.0, " {}={value:?}", field.name()).unwrap();
    }
}

impl Subscriber for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("portway_proxy")
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let thread = std::thread::current();
        let mut line = format!("[{}] {}", thread.name().unwrap_or_default(), event.metadata().level());
        event.record(&mut Fields(&mut line));
        self.0.lock().unwrap().push(line);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[test]
fn calls_and_ends_are_told_by_the_callers_threads() {
    let lines = Lines::default();
    // For all threads, the engine's among them.
    tracing::subscriber::set_global_default(lines.clone()).unwrap();
    let transport = Loopback::new(loopback::Config::default()).unwrap();
    let mut engine = Engine::new(&Heap, Config::default()).unwrap();
    let (fifo, consumer) = Fifo::new(&Heap, portway_fifo::Config::default()).unwrap();
    let fifo_id = engine.add_fifo(fifo.clone(), consumer).unwrap();
    let proxy = Proxy::start(engine, RunConfig::default()).unwrap();
    let memories: Vec<_> = (0..2).map(|_| transport.register(&Heap.allocate(64).unwrap()).unwrap()).collect();
    let words: Vec<_> = (0..2).map(|_| transport.signal_word().unwrap()).collect();
    let import = |memory| transport.import(&transport.export(memory).unwrap()).unwrap();
    let (end, _) = transport.endpoint().unwrap();
    let (_, bytes) = transport.endpoint().unwrap();
    let port = proxy.add_port(end.connect(&bytes, LIMIT).unwrap()).unwrap();
    let config = || ChannelConfig {
        fifo: fifo_id,
        port,
        source: memories[0].clone(),
        destination: import(&memories[1]),
        outbound: import(&words[0]),
        inbound: words[1].clone(),
    };
    let channel = proxy.add_channel(config()).unwrap().producer().unwrap();
    assert!(proxy.add_channel(config()).is_err(), "its signal words are taken");
    for _ in 0..1_000 {
        channel.put_signal(0, 0, 8).unwrap();
    }
    channel.flush().unwrap();
    fifo.abort();
    let started = Instant::now();
    while channel.channel().error().is_none() {
        assert!(started.elapsed() < LIMIT, "the channel of an aborted FIFO has not ended within {LIMIT:?}");
        std::thread::yield_now();
    }
    // Not before: a push that finds room in an aborted FIFO succeeds, and the engine may still serve it.
    assert!(channel.flush().is_err());
    proxy.stop(Stop::Cancel);

    let lines = lines.0.lock().unwrap();
    println!("{}", lines.join("\n"));
    let has = |part: &str| lines.iter().filter(|line| line.contains(part)).count();
    assert_eq!(has("call=\"start\"") + has("call=\"add_port\""), 2);
    assert_eq!(has("error=outbound signal word"), 1);
    assert_eq!(has("a channel had ended"), 1);
    assert_eq!(has("the proxy has stopped"), 1);
    assert!(
        lines.iter().all(|line| !line.starts_with("[portway-proxy")),
        "the engine's thread has told something"
    );
    assert!(lines.len() < 12, "{} events of 1,000 puts", lines.len());
}

/// Panics at each event.
struct Panics(Arc<Mutex<usize>>);

impl Subscriber for Panics {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("portway_proxy")
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {
        *self.0.lock().unwrap() += 1;
        panic!("the subscriber panics");
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[test]
fn a_subscriber_that_panics_takes_nothing_with_it() {
    let seen = Arc::new(Mutex::new(0));
    tracing::subscriber::with_default(Panics(seen.clone()), || {
        let start = || Proxy::start(Engine::new(&Heap, Config::default()).unwrap(), RunConfig::default());
        assert!(start().unwrap().stop(Stop::Cancel).quiesced);
        assert_eq!(*seen.lock().unwrap(), 2, "events of a start and a stop");
        drop(start().unwrap());
        assert_eq!(*seen.lock().unwrap(), 4, "events of a start and a drop");
        // A panic out of a drop while another unwinds would end the process.
        let other = std::panic::catch_unwind(|| {
            let _proxy = start().unwrap();
            panic!("another");
        });
        assert_eq!(other.unwrap_err().downcast_ref::<&str>(), Some(&"another"));
        assert_eq!(*seen.lock().unwrap(), 6, "events of a start and a drop that unwinds");
    });
}
