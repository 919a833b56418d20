#!/usr/bin/env bash
# Every dependency has a licence that deny.toml allows and comes from the registry. Builds cargo-deny below the target folder
# the first time, which takes minutes; so it is not part of .ci/run.
set -euo pipefail
cd "$(dirname "$0")/.."
tools=${CARGO_TARGET_DIR:-target}/tools
[ -x "$tools/bin/cargo-deny" ] || cargo install --quiet --locked --root "$tools" cargo-deny@0.20.2
"$tools/bin/cargo-deny" --all-features check licenses bans sources
