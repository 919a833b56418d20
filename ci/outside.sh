#!/usr/bin/env bash
# What strangers would write builds and works with the crates as they are packed: the workspace in examples/, copied to
# where ci/package.sh has unpacked them, so that nothing of this checkout is in reach.
set -euo pipefail
cd "$(dirname "$0")/.."
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
outside=$target/outside
[ -f "$outside/.cargo/config.toml" ] || ci/package.sh
fail() {
    echo "outside: $*" >&2
    exit 1
}

# Copied with their times, so that nothing is built twice.
mkdir -p "$outside/examples"
rm -rf "$outside/examples"
cp -a examples "$outside/examples"
rm -rf "$outside/examples/target"
cp -n Cargo.lock "$outside/examples/" # the same versions of what comes from the registry
! grep -rnE '(path|git) *=' "$outside"/examples/*/Cargo.toml || fail "an example depends on more than what is published"
(cd examples && cargo fmt -- --check)
export CARGO_TARGET_DIR=$target
cd "$outside/examples"

lines=$(cat shm-transport/src/*.rs | grep -cvE '^\s*(//.*)?$')
[ "$lines" -lt 400 ] || fail "shm-transport has $lines lines of code: must be below 400, without blanks and comments"
# nvcc and NVRTC as ci/device-header.sh installs them, if it has.
cuda=$target/device-header/cuda/nvidia/cu13
if [ -x "$cuda/bin/nvcc" ]; then
    export NVCC=$cuda/bin/nvcc NVCC_FLAGS="-ccbin ${CXX:-c++}" LD_LIBRARY_PATH=$cuda/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi
cargo clippy --quiet --all-targets -- -D warnings
cargo test --quiet >"$target/outside.log" 2>&1 || { cat "$target/outside.log" >&2; fail "the tests of examples/"; }
grep -E '^two_processes: ok' "$target/outside.log" || fail "the suite did not run between two processes"
echo "outside: shm-transport: ok, $lines lines of code pass the conformance suite in one process and between two"

# run EXAMPLE: what it prints, which it must do within a minute.
run() { timeout 60 "$target/debug/$1" 2>&1 | sed "s/^/outside: $1: /" || fail "$1"; }
cargo build --quiet
run own-triggers
run portway-example-nvcc
run portway-example-nvrtc
run collectives

# rxe: the same ring over soft-RoCE of a real kernel, in a virtual machine.
if [ "${1:-}" = rxe ]; then
    RXE_VM_SUITE=${RXE_VM_SUITE:-testing} "$OLDPWD/ci/rxe-vm" --timeout 300 -- "$target/debug/collectives" ib rxe0 rxe1
fi
