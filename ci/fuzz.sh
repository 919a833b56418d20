#!/usr/bin/env bash
# Random bytes for everything that reads bytes of others, and random calls for the engine, for SECONDS in all (50); first that
# planted mistakes are found. With the stable compiler and a runner of our own (fuzz/src/main.rs), without feedback from
# coverage: cargo-fuzz needs a nightly. PORTWAY_SEED chooses the inputs (1).
#
# usage: ci/fuzz.sh [SECONDS]
set -euo pipefail
cd "$(dirname "$0")/.."
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
seconds=${1:-50} seed=${PORTWAY_SEED:-1}
(cd fuzz && cargo fmt -- --check)
cp Cargo.lock fuzz/Cargo.lock # the same versions of what comes from the registry
# With what writes the corpora anew, so that it keeps building.
CARGO_TARGET_DIR=$target cargo build --quiet --manifest-path fuzz/Cargo.toml --all-features
timeout 120 "$target/debug/fuzz" plants "$seed"
timeout $((seconds + 60)) "$target/debug/fuzz" run "$seconds" "$seed"
