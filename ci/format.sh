#!/usr/bin/env bash
# The sources are formatted as rustfmt.toml says.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo fmt --all --check
echo "format: ok"
