//! The FIFO alone: three threads play a kernel and push orders, one thread keeps the accounts:
//! `cargo run -p portway-fifo --example fifo_alone`

use std::error::Error;
use std::thread;
use std::time::{Duration, Instant};

use portway_fifo::{Config, Consumer, Fifo, Heap, Producer, Trigger};

const ACCOUNTS: usize = 3;
const ORDERS: u64 = 10_000;
const LIMIT: Duration = Duration::from_secs(10);

/// What a trigger says. Its two words of 63 bits are ours to divide: kind and account, and the amount.
enum Order {
    Deposit { account: usize, cents: u64 },
    Close { account: usize },
}

impl Order {
    fn encode(self) -> Result<Trigger, portway_fifo::Error> {
        match self {
            Order::Deposit { account, cents } => Trigger::new([(account as u64) << 8 | 1, cents]),
            Order::Close { account } => Trigger::new([(account as u64) << 8 | 2, 0]),
        }
    }

    /// A device may write anything, so the reader checks it. `None` for what `encode` does not make.
    fn decode(trigger: Trigger) -> Option<Order> {
        let [first, cents] = trigger.words();
        let account = usize::try_from(first >> 8).ok().filter(|account| *account < ACCOUNTS)?;
        match (first & 0xff, cents) {
            (1, cents) => Some(Order::Deposit { account, cents }),
            (2, 0) => Some(Order::Close { account }),
            _ => None,
        }
    }
}

/// A push waits while the ring is full, and `sync` until the last order is booked; each for `LIMIT` at most.
fn order(producer: &Producer, account: usize) -> Result<(), portway_fifo::Error> {
    for cents in 1..=ORDERS {
        producer.push(Order::Deposit { account, cents }.encode()?)?;
    }
    producer.sync(producer.push(Order::Close { account }.encode()?)?)
}

/// Books orders until every account is closed.
fn book(mut consumer: Consumer) -> Result<[u64; ACCOUNTS], Box<dyn Error>> {
    let (mut cents_in, mut open, mut unknown) = ([0; ACCOUNTS], ACCOUNTS, None);
    let started = Instant::now();
    while open > 0 && unknown.is_none() && started.elapsed() < LIMIT {
        consumer.drain(32, |position, trigger| match Order::decode(trigger) {
            Some(Order::Deposit { account, cents }) => cents_in[account] += cents,
            Some(Order::Close { .. }) => open -= 1,
            None => unknown = Some((position, trigger)),
        });
    }
    match (open, unknown) {
        (0, None) => Ok(cents_in),
        (_, Some((position, trigger))) => Err(format!("no order at {position}: {trigger:?}").into()),
        (open, None) => Err(format!("{open} of {ACCOUNTS} accounts still open after {LIMIT:?}").into()),
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let (fifo, consumer) = Fifo::new(&Heap, Config { slots: 256, timeout: LIMIT, ..Config::default() })?;
    let producer = &fifo.producer()?;
    thread::scope(|scope| {
        let threads = [0, 1, 2].map(|account| scope.spawn(move || order(producer, account)));
        let cents_in = book(consumer).inspect_err(|_| fifo.abort())?; // the abort ends every wait of the producers
        for (account, thread) in threads.into_iter().enumerate() {
            thread.join().expect("no panic")?;
            println!("account {account}: {} cents", cents_in[account]);
        }
        assert_eq!(cents_in, [ORDERS * (ORDERS + 1) / 2; ACCOUNTS]);
        Ok(())
    })
}
