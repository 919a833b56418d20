#!/usr/bin/env bash
# The documentation builds without a warning: no broken link, nothing undocumented.
set -euo pipefail
cd "$(dirname "$0")/.."
RUSTDOCFLAGS="-D warnings" cargo doc --quiet --workspace --no-deps --all-features --document-private-items
echo "doc: ok"
