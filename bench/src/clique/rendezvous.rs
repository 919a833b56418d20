//! Many participants that meet over the TCP store.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use portway_clique::CliqueError;
use portway_clique::rendezvous::{JobToken, Membership, Post, Rendezvous, Round, Tcp, TcpConfig};

use super::bring_up::us;
use super::{NAME, each};
use crate::args::Args;
use crate::failure::Failure;
use crate::progress;
use crate::report::{Report, Row};

pub const TEST: &str = "rendezvous over TCP";

const PARTICIPANTS: u32 = 64;

pub fn row(args: &Args, report: &mut Report) -> Result<(), Failure> {
    let (mut samples, mut wrong) = (Vec::new(), 0);
    for _ in args.runs() {
        let (took, found) = meet(args.deadline(), false)?;
        samples.push(us(took));
        wrong += found;
    }
    let row = Row {
        layer: NAME.into(),
        test: TEST.into(),
        shape: [("participants".to_owned(), PARTICIPANTS.into())].into(),
        runs: samples.len() as u64,
        wrong: args.check().then_some(wrong),
        ..Row::default()
    };
    report.results.push(row.with_times(args, samples));
    Ok(())
}

/// A meeting in which one participant says something else: whether the others find that.
pub fn found(args: &Args) -> Result<u64, Failure> {
    Ok(meet(args.deadline(), true)?.1)
}

/// From the first to come until all have heard all; and the most messages that one of them has found wrong.
fn meet(within: Duration, corrupt: bool) -> Result<(Duration, u64), Failure> {
    let name = format!("{NAME} rendezvous of {PARTICIPANTS}");
    progress::begin(&name);
    let start = |participant: u32, address: SocketAddr| {
        let member =
            Membership { token: JobToken::new(*b"a measurement")?, participant, participants: PARTICIPANTS };
        Tcp::start(TcpConfig { member, address, within })
    };
    let began = Instant::now();
    let first = start(0, (Ipv4Addr::LOCALHOST, 0).into()).map_err(|source| Failure::clique(&name, source))?;
    let address = first.address();
    let message = |participant: u32| Post::Ok(participant.to_le_bytes().repeat(16));
    let round = Round { clique: "bench".into(), attempt: 0, phase: "a measurement" };
    let part = |(participant, first): (u32, Option<Tcp>)| -> Result<(Duration, u64), CliqueError> {
        let place = match first {
            Some(first) => first,
            None => start(participant, address)?,
        };
        let spoilt = corrupt && participant == PARTICIPANTS - 1;
        place.post(&round, message(if spoilt { 0 } else { participant }))?;
        let said = place.gather(&round, within)?;
        let took = began.elapsed();
        let right = |(participant, post): (u32, &Option<Post>)| *post == Some(message(participant));
        let wrong = (0..).zip(&said.0).filter(|both| !right(*both)).count();
        place.close(within)?;
        Ok((took, wrong as u64))
    };
    let all = [(0, Some(first))].into_iter().chain((1..PARTICIPANTS).map(|participant| (participant, None)));
    let heard = each(&name, all, part)?;
    let took = heard.iter().map(|(took, _)| *took).max().unwrap_or_default();
    Ok((took, heard.iter().map(|(_, wrong)| *wrong).max().unwrap_or(0)))
}
