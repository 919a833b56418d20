#!/usr/bin/env bash
# The public API against the last tag, by cargo-semver-checks. Builds the tool below the target folder the first time,
# which takes minutes; so it is not part of .ci/run.
#
# usage: ci/public-api-semver.sh [CRATE...]      all that are published unless told otherwise
set -euo pipefail
cd "$(dirname "$0")/.."
tag=$(git describe --tags --abbrev=0 2>/dev/null) || {
    echo "public-api-semver: waived: no tag to compare with"
    exit 0
}
tools=$(realpath -m "${CARGO_TARGET_DIR:-target}")/tools
[ -x "$tools/bin/cargo-semver-checks" ] || cargo install --quiet --locked --root "$tools" cargo-semver-checks@0.51.0
[ $# -gt 0 ] || set -- portway-fifo portway-proxy portway-transport-ib portway-transport-ipc portway-clique
for crate; do
    "$tools/bin/cargo-semver-checks" semver-checks --package "$crate" --all-features --baseline-rev "$tag"
    echo "public-api-semver: $crate: ok against $tag"
done
