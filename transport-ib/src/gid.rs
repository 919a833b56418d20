//! Which GID a connection uses: the policy, without a device.
//!
//! A port of a RoCE device has a table of GIDs: for every address of its network interface one of RoCE v1 and one of
//! RoCE v2, link-local ones first. Index 0 is nearly never the right one.
//!
//! The policy: **RoCE v2, routable, matching the peer.** Every end sends the GIDs that it could use; both then pick the
//! same pair: of one address family, IPv4 before IPv6, with the longest common prefix (which is what two addresses of
//! one subnet have), and then the one that comes first.

use core::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};

/// The most GIDs that an end offers its peer. A port with more has to be told which one.
pub(crate) const MAX_OFFERED: usize = 16;

/// A global identifier: an IPv6 address, or an IPv4 address mapped into one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Gid(pub(crate) [u8; 16]);

impl Gid {
    fn address(self) -> Ipv6Addr {
        Ipv6Addr::from(self.0)
    }

    pub(crate) fn is_zero(self) -> bool {
        self.0 == [0; 16]
    }

    fn ipv4(self) -> Option<Ipv4Addr> {
        self.address().to_ipv4_mapped()
    }

    /// Whether a packet to it can leave its link.
    fn is_routable(self) -> bool {
        match self.ipv4() {
            Some(address) => {
                !address.is_link_local()
                    && !address.is_loopback()
                    && !address.is_unspecified()
                    && !address.is_multicast()
                    && !address.is_broadcast()
            }
            None => {
                let link_local = self.0[0] == 0xfe && self.0[1] & 0xc0 == 0x80;
                !link_local && !self.is_zero() && self.0[0] != 0xff && !self.address().is_loopback()
            }
        }
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.ipv4() {
            Some(address) => write!(f, "{address}"),
            None => write!(f, "{}", self.address()),
        }
    }
}

/// What a GID is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Infiniband,
    RoceV1,
    RoceV2,
    /// Neither the library nor sysfs said.
    Unknown,
}

/// An entry of a port's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) index: u8,
    pub(crate) gid: Gid,
    pub(crate) kind: Kind,
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            Kind::Infiniband => "InfiniBand",
            Kind::RoceV1 => "RoCE v1",
            Kind::RoceV2 => "RoCE v2",
            Kind::Unknown => "type unknown",
        };
        write!(f, "{} {} ({kind})", self.index, self.gid)
    }
}

/// What an end offers to its peer, out of its port's table; or why it can offer nothing.
///
/// `index` is the caller's choice, taken whatever its kind, if the entry is there.
pub(crate) fn offers(roce: bool, table: &[Entry], index: Option<u8>) -> Result<Vec<Entry>, &'static str> {
    if let Some(index) = index {
        let chosen = table.iter().find(|entry| entry.index == index && !entry.gid.is_zero());
        return chosen.map(|&entry| vec![entry]).ok_or("the index that was asked for is empty");
    }
    if !roce {
        // Addressed by LID; the first entry is the port's own and always there.
        return table.first().map(|&entry| vec![entry]).ok_or("the table is empty");
    }
    let routable = |entry: &&Entry| entry.gid.is_routable();
    let offers: Vec<Entry> =
        table.iter().filter(|entry| entry.kind == Kind::RoceV2).filter(routable).copied().collect();
    if offers.len() > MAX_OFFERED {
        return Err("more than 16 entries are RoCE v2 and routable, gid_index has to name one");
    }
    if !offers.is_empty() {
        return Ok(offers);
    }
    let filled = || table.iter().filter(|entry| !entry.gid.is_zero());
    Err(if filled().next().is_none() {
        "the table is empty (has the interface an address, and is this its network namespace?)"
    } else if filled().any(|entry| entry.kind == Kind::Unknown) {
        "neither the library nor sysfs says which entries are RoCE v2"
    } else if filled().any(|entry| entry.kind == Kind::RoceV2) {
        "every RoCE v2 entry is link-local"
    } else {
        "no entry is RoCE v2"
    })
}

/// The pair that both ends pick: an index into `mine` and one into `theirs`.
///
/// `first` says whether this end counts as the first of the two; the ends must disagree about it, so that they agree
/// on the order of the pairs.
pub(crate) fn pick(mine: &[Gid], theirs: &[Gid], first: bool) -> Option<(usize, usize)> {
    let mut best: Option<(Rank, (usize, usize))> = None;
    for (i, my) in mine.iter().enumerate() {
        for (j, their) in theirs.iter().enumerate() {
            let Some((family, prefix)) = match_of(*my, *their) else { continue };
            let order = if first { (i, j) } else { (j, i) };
            let rank = (family, prefix, core::cmp::Reverse(order));
            if best.as_ref().is_none_or(|(seen, _)| rank > *seen) {
                best = Some((rank, (i, j)));
            }
        }
    }
    best.map(|(_, pair)| pair)
}

/// Family, common prefix, order.
type Rank = (u8, u32, core::cmp::Reverse<(usize, usize)>);

/// How well two GIDs match; none if they are of different families.
fn match_of(a: Gid, b: Gid) -> Option<(u8, u32)> {
    if a.ipv4().is_some() != b.ipv4().is_some() {
        return None;
    }
    let differing = u128::from_be_bytes(a.0) ^ u128::from_be_bytes(b.0);
    Some((u8::from(a.ipv4().is_some()), differing.leading_zeros()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(text: &str) -> Gid {
        match text.parse::<Ipv4Addr>() {
            Ok(address) => Gid(address.to_ipv6_mapped().octets()),
            Err(_) => Gid(text.parse::<Ipv6Addr>().unwrap().octets()),
        }
    }

    fn table(entries: &[(u8, &str, Kind)]) -> Vec<Entry> {
        entries.iter().map(|&(index, text, kind)| Entry { index, gid: gid(text), kind }).collect()
    }

    use Kind::{Infiniband as Ib, RoceV1 as V1, RoceV2 as V2, Unknown};

    type Row = (
        &'static str,
        bool,
        &'static [(u8, &'static str, Kind)],
        Option<u8>,
        Result<&'static [u8], &'static str>,
    );

    const LINK_LOCAL: &str = "fe80::bace:f6ff:fe12:3456";

    /// Tables as they are met, and the indices that are offered.
    const TABLES: &[Row] = &[
        (
            "an adapter with one IPv4 address, v1 and v2 in turn",
            true,
            &[(0, LINK_LOCAL, V1), (1, LINK_LOCAL, V2), (2, "192.168.7.11", V1), (3, "192.168.7.11", V2)],
            None,
            Ok(&[3]),
        ),
        (
            "the same in a container: the addresses of other namespaces show as holes",
            true,
            &[(2, "10.244.3.9", V1), (5, "10.244.3.9", V2)],
            None,
            Ok(&[5]),
        ),
        (
            "IPv6 only",
            true,
            &[(0, LINK_LOCAL, V1), (1, LINK_LOCAL, V2), (2, "2001:db8::11", V1), (3, "2001:db8::11", V2)],
            None,
            Ok(&[3]),
        ),
        (
            "unique local IPv6 addresses are routable",
            true,
            &[(0, LINK_LOCAL, V2), (1, "fd00:1::5", V2)],
            None,
            Ok(&[1]),
        ),
        (
            "several subnets on one port",
            true,
            &[
                (0, LINK_LOCAL, V2),
                (1, "10.1.0.5", V2),
                (2, "10.2.0.5", V1),
                (3, "10.2.0.5", V2),
                (4, "2001:db8:2::5", V2),
            ],
            None,
            Ok(&[1, 3, 4]),
        ),
        ("soft-RoCE: everything is v2", true, &[(0, LINK_LOCAL, V2), (1, "10.77.0.2", V2)], None, Ok(&[1])),
        (
            "an interface without an address",
            true,
            &[(0, LINK_LOCAL, V1), (1, LINK_LOCAL, V2)],
            None,
            Err("every RoCE v2 entry is link-local"),
        ),
        (
            "an IPv4 link-local address is no better",
            true,
            &[(0, "169.254.8.8", V2)],
            None,
            Err("every RoCE v2 entry is link-local"),
        ),
        (
            "a device of RoCE v1 only",
            true,
            &[(0, LINK_LOCAL, V1), (1, "10.0.0.1", V1)],
            None,
            Err("no entry is RoCE v2"),
        ),
        (
            "no sysfs in the container and an old library",
            true,
            &[(0, LINK_LOCAL, Unknown), (1, "10.0.0.1", Unknown), (2, "10.0.0.1", Unknown)],
            None,
            Err("neither the library nor sysfs says which entries are RoCE v2"),
        ),
        ("the same, with the caller's choice", true, &[(1, "10.0.0.1", Unknown)], Some(1), Ok(&[1])),
        (
            "the caller insists on a link-local entry of v1",
            true,
            &[(0, LINK_LOCAL, V1), (3, "10.0.0.1", V2)],
            Some(0),
            Ok(&[0]),
        ),
        (
            "the caller's choice is empty",
            true,
            &[(3, "10.0.0.1", V2)],
            Some(7),
            Err("the index that was asked for is empty"),
        ),
        (
            "the caller's choice is a zero entry",
            true,
            &[(0, "::", V2), (3, "10.0.0.1", V2)],
            Some(0),
            Err("the index that was asked for is empty"),
        ),
        (
            "another network namespace's device",
            true,
            &[],
            None,
            Err("the table is empty (has the interface an address, and is this its network namespace?)"),
        ),
        ("InfiniBand", false, &[(0, "fe80::5054:ff:fe00:1", Ib), (1, "2001:db8::1", Ib)], None, Ok(&[0])),
        ("InfiniBand without a table", false, &[], None, Err("the table is empty")),
    ];

    #[test]
    fn tables_as_they_are_met() {
        for (name, roce, entries, index, expected) in TABLES {
            let offered = offers(*roce, &table(entries), *index);
            let offered = offered.map(|entries| entries.iter().map(|entry| entry.index).collect::<Vec<_>>());
            assert_eq!(offered, expected.map(<[u8]>::to_vec), "{name}");
        }
    }

    #[test]
    fn more_than_are_offered_need_the_callers_choice() {
        let entries = |count: u8| -> Vec<Entry> {
            (0..count).map(|index| Entry { index, gid: gid(&format!("10.0.{index}.1")), kind: V2 }).collect()
        };
        let offered = |count, index| offers(true, &entries(count), index).map(|entries| entries.len());
        assert_eq!(offered(MAX_OFFERED as u8, None), Ok(MAX_OFFERED));
        let expected = "more than 16 entries are RoCE v2 and routable, gid_index has to name one";
        assert_eq!(offered(MAX_OFFERED as u8 + 1, None), Err(expected));
        assert_eq!(offered(MAX_OFFERED as u8 + 1, Some(MAX_OFFERED as u8)), Ok(1));
    }

    type Pair = (&'static str, &'static [&'static str], &'static [&'static str], Option<(usize, usize)>);

    const PAIRS: &[Pair] = &[
        ("one each", &["10.0.0.1"], &["10.0.0.2"], Some((0, 0))),
        ("the subnet that both have", &["10.1.0.5", "10.2.0.5"], &["10.2.0.7"], Some((1, 0))),
        (
            "both have both: the first pair of one subnet",
            &["10.1.0.5", "10.2.0.5"],
            &["10.1.0.7", "10.2.0.7"],
            Some((0, 0)),
        ),
        ("other order on the other side", &["10.1.0.5", "10.2.0.5"], &["10.2.0.7", "10.1.0.7"], Some((0, 1))),
        ("IPv4 before IPv6", &["2001:db8::5", "10.0.0.5"], &["2001:db8::7", "10.9.0.7"], Some((1, 1))),
        ("IPv6 where IPv4 is on one side only", &["10.0.0.5", "2001:db8::5"], &["2001:db8::7"], Some((1, 0))),
        ("different families never meet", &["10.0.0.5"], &["2001:db8::7"], None),
        ("nothing offered", &["10.0.0.5"], &[], None),
        ("routed: no common subnet", &["10.0.0.5"], &["192.168.3.3"], Some((0, 0))),
    ];

    #[test]
    fn both_ends_pick_the_same_pair() {
        for (name, mine, theirs, expected) in PAIRS {
            let mine: Vec<Gid> = mine.iter().map(|text| gid(text)).collect();
            let theirs: Vec<Gid> = theirs.iter().map(|text| gid(text)).collect();
            assert_eq!(pick(&mine, &theirs, true), *expected, "{name}");
            let other = pick(&theirs, &mine, false);
            assert_eq!(other.map(|(i, j)| (j, i)), *expected, "{name}, from the other end");
        }
    }

    proptest::proptest! {
        #[test]
        fn whatever_is_offered_both_ends_agree(
            mine in proptest::collection::vec(proptest::array::uniform16(0u8..3), 0..6),
            theirs in proptest::collection::vec(proptest::array::uniform16(0u8..3), 0..6),
        ) {
            let mine: Vec<Gid> = mine.into_iter().map(Gid).collect();
            let theirs: Vec<Gid> = theirs.into_iter().map(Gid).collect();
            let here = pick(&mine, &theirs, true);
            let there = pick(&theirs, &mine, false);
            proptest::prop_assert_eq!(here, there.map(|(i, j)| (j, i)));
        }
    }
}
