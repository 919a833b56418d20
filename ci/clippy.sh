#!/usr/bin/env bash
# No warning of the compiler or of clippy, in any target.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo clippy --quiet --workspace --all-targets --all-features -- -D warnings
echo "clippy: ok"
