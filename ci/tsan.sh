#!/usr/bin/env bash
# ThreadSanitizer over fifo/tests/header_race.rs: producers write a payload outside the ring with plain stores, the
# consumer reads it with plain loads. No report with the code as it is, by the device header's producers (C++ threads)
# or the Rust ones; with an ordering weakened on purpose there must be reports, else this could not find anything.
#
# The pinned stable compiler has the runtime. The C++ side is instrumented by its own compiler and takes the runtime of
# the Rust program. The standard library is not instrumented and gives false reports: those with an access in a file of
# ours count. Needs addr2line (binutils).
set -euo pipefail
cd "$(dirname "$0")/.."

triple=x86_64-unknown-linux-gnu
if [ ! -e "$(rustc --print sysroot)/lib/rustlib/$triple/lib/librustc-stable_rt.tsan.a" ]; then
    echo "waived: ThreadSanitizer: this toolchain has no runtime for it"
    exit 0
fi

# Another build than the usual one, so it keeps to itself.
CARGO_TARGET_DIR=$(realpath -m "${CARGO_TARGET_DIR:-target}/tsan")
export CARGO_TARGET_DIR
export RUSTC_BOOTSTRAP=1 PORTWAY_REQUIRE_CXX=1 RUST_BACKTRACE=0
export RUSTFLAGS='-Zsanitizer=thread -Cunsafe-allow-abi-mismatch=sanitizer -Clink-arg=-rdynamic'
TSAN_OPTIONS="exitcode=0 external_symbolizer_path=$(command -v addr2line)"
export TSAN_OPTIONS

mkdir -p "$CARGO_TARGET_DIR"
log=$(mktemp)
trap 'rm -f "$log"' EXIT

# build [PLANT]: builds the tests and sets `program`. The wrapper adds the flag to the workspace's own crates alone; one
# file for each plant, since cargo goes by its name.
build() {
    local wrapper=$CARGO_TARGET_DIR/rustc-${1:-right}
    printf '#!/bin/sh\nexec "$@" %s\n' "${1:+--cfg portway_plant=\\\"$1\\\"}" >"$wrapper"
    chmod +x "$wrapper"
    program=$(RUSTC_WORKSPACE_WRAPPER=$wrapper \
        timeout 1800 cargo test --quiet --package portway-fifo --test header_race --target $triple --no-run --message-format=json |
        sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -n 1)
    [ -x "$program" ] || { echo "tsan: cargo built no test program" >&2; exit 1; }
}

# reports TEST [C++ FLAG]: runs a test and sets `count` to the reports with an access in our files.
reports() {
    local status=0
    PORTWAY_CXXFLAGS="-g -fsanitize=thread ${2:-}" timeout 300 "$program" --exact "$1" >"$log" 2>&1 || status=$?
    count=$(awk '/^WARNING: ThreadSanitizer/ { ours = 0 } /^ *#0 .*\/fifo\/(tests|src|device)\// { ours = 1 }
        /^SUMMARY: ThreadSanitizer/ { n += ours } END { print n + 0 }' "$log")
    if [ "$status" -ne 0 ] || ! grep -q '1 passed' "$log"; then
        cat "$log" >&2
        echo "tsan: $1: status $status: FAILED" >&2
        exit 1
    fi
}

# none TEST / some TEST PLANT [C++ FLAG]: what is expected of the reports.
none() {
    reports "$1"
    if [ "$count" -ne 0 ]; then
        cat "$log" >&2
        echo "tsan: $1: $count reports: FAILED" >&2
        exit 1
    fi
    echo "tsan: $1: no report: ok"
}
some() {
    reports "$1" "${3:-}"
    [ "$count" -gt 0 ] || { echo "tsan: $1 does not notice $2: FAILED" >&2; exit 1; }
    echo "tsan: $1 notices $2, $count reports: ok"
}

header=the_header_orders_payload_outside_the_ring
rust=the_rust_producer_orders_payload_outside_the_ring

build
none $header
none $rust
some $header "a relaxed slot" -DPORTWAY_PLANT_RELAXED_SLOT
planted=$CARGO_TARGET_DIR/planted
mkdir -p "$planted/portway"
sed 's/__ATOMIC_ACQUIRE/__ATOMIC_RELAXED/' fifo/device/portway/platform.cuh >"$planted/portway/platform.cuh"
some $header "a header that acquires nothing" "-I $planted"
for plant in slot_load tail_store; do
    build $plant
    some $header $plant
    some $rust $plant
done
for plant in slot_store tail_load; do
    build $plant
    some $rust $plant
done
