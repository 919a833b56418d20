#!/usr/bin/env bash
# The foreign types and traits in each crate's public API are those in ci/public-api/CRATE.txt, all features on. With
# `--update` writes these files. rustdoc's JSON is unstable, so the pinned compiler is told to allow it, for this alone.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
mkdir -p ci/public-api
bad=0
for crate in portway-fifo portway-proxy portway-transport-ib portway-transport-ipc portway-clique; do
    RUSTC_BOOTSTRAP=1 cargo rustdoc --quiet --lib --package "$crate" --all-features --target-dir "$target/public-api" -- \
        -Z unstable-options --output-format json --cap-lints allow
    json=$target/public-api/doc/${crate//-/_}.json
    list=ci/public-api/$crate.txt
    [ "${1:-}" != --update ] || python3 ci/public-api.py "$json" >"$list"
    if python3 ci/public-api.py "$json" | diff "$list" -; then
        echo "public-api: $crate: ok, $(grep -c . "$list" || true) foreign names"
    else
        echo "public-api: $crate: the names above differ from $list; '$0 --update' if that is meant" >&2
        bad=1
    fi
done
exit $bad
