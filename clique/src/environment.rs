//! The environment variables that change how a library communicates.

use std::collections::BTreeMap;

use crate::CliqueError;
use crate::backend::{Backend, Variable};

/// A value up to this length is compared and shown as it is.
const SHOWN_BYTES: usize = 256;

/// Variables with their values, by name, in order.
pub(crate) type Variables = Vec<(String, String)>;

/// The variables of this process that every participant must share, and those that name what its host has.
///
/// # Errors
/// One with which no clique can come up.
pub(crate) fn sorted_out(
    backend: &dyn Backend,
    variables: impl IntoIterator<Item = (String, String)>,
) -> Result<(Variables, Variables), CliqueError> {
    let (mut compared, mut hardware) = (BTreeMap::new(), BTreeMap::new());
    for (name, value) in variables {
        match backend.variable(&name, &value) {
            Variable::Ignored => {}
            Variable::Compared => {
                compared.insert(name, shown(&value));
            }
            Variable::Hardware => {
                hardware.insert(name, shown(&value));
            }
            Variable::Refused(expected) => {
                return Err(CliqueError::Config {
                    what: format!("environment variable {name}"),
                    expected: expected.to_owned(),
                    seen: shown(&value),
                });
            }
        }
    }
    Ok((compared.into_iter().collect(), hardware.into_iter().collect()))
}

/// The variables of this process. What is no Unicode is shown with replacements.
pub(crate) fn of_this_process() -> impl Iterator<Item = (String, String)> {
    std::env::vars_os()
        .map(|(name, value)| (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned()))
}

/// A value, or of a long one its head and its fingerprint, so that two that differ are shown differently.
fn shown(value: &str) -> String {
    if value.len() <= SHOWN_BYTES {
        return value.to_owned();
    }
    let head: String = value.chars().take(SHOWN_BYTES / 4).collect();
    format!("{head}… ({} bytes, fingerprint {:016x})", value.len(), fingerprint([value.as_bytes()]))
}

/// FNV-1a over parts, each with its length: the same in every build and on every machine.
pub(crate) fn fingerprint<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut byte = |byte: u8| hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    for part in parts {
        (part.len() as u64).to_le_bytes().into_iter().for_each(&mut byte);
        part.iter().copied().for_each(&mut byte);
    }
    hash
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::software::{Fabric, Software};

    #[test]
    fn variables_are_compared_ignored_or_refused() {
        let backend = Software::new(&Fabric::new(1));
        let variables = |pairs: &[(&str, &str)]| {
            let owned = pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
            sorted_out(&backend, owned.collect::<Vec<_>>())
        };
        let (seen, hardware) = variables(&[
            ("PORTWAY_SOFTWARE_B", "2"),
            ("HOME", "/"),
            ("PORTWAY_SOFTWARE_INTERFACE", "eth0"),
            ("PORTWAY_SOFTWARE_A", "1"),
        ])
        .unwrap();
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert_eq!(seen, [pair("PORTWAY_SOFTWARE_A", "1"), pair("PORTWAY_SOFTWARE_B", "2")]);
        assert_eq!(hardware, [pair("PORTWAY_SOFTWARE_INTERFACE", "eth0")]);
        assert_eq!(
            variables(&[("PORTWAY_SOFTWARE_BLOCKING", "1")]).unwrap_err().to_string(),
            "environment variable PORTWAY_SOFTWARE_BLOCKING: expected not 1: calls would block, seen 1"
        );
        assert_eq!(variables(&[("PORTWAY_SOFTWARE_BLOCKING", "0")]).unwrap().0.len(), 1);
    }

    #[test]
    fn long_values_that_differ_are_shown_differently() {
        let (one, other) = ("x".repeat(5000), "x".repeat(4999) + "y");
        assert_ne!(shown(&one), shown(&other));
        assert!(shown(&one).len() < 300, "{}", shown(&one).len());
        assert_eq!(shown("Ring"), "Ring");
    }

    #[test]
    fn a_fingerprint_tells_where_parts_end() {
        assert_ne!(fingerprint([b"ab".as_slice(), b"c"]), fingerprint([b"a".as_slice(), b"bc"]));
        // FNV-1a of eight zero bytes and no others: fixed, since other builds compute it too.
        assert_eq!(fingerprint([b"".as_slice()]), 0xa8c7_f832_281a_39c5);
    }
}
