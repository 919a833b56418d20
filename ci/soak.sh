#!/usr/bin/env bash
# Random puts, signals, flushes, aborts, failures and restarts over loopback for SECONDS (120) with a fixed seed
# (PORTWAY_SEED, 1), with flat memory, threads and descriptors; before that, leaks on purpose are found. The program is
# examples/soak, built against the packed crates.
#
# usage: ci/soak.sh [SECONDS [rxe|gpu|ipc GPU GPU]]
#
# rxe: over soft-RoCE too, in a virtual machine. gpu, ipc: kernels make the calls, over loopback or CUDA IPC.
set -euo pipefail
cd "$(dirname "$0")/.."
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
seconds=${1:-120} seed=${PORTWAY_SEED:-1} outside=$target/outside
[ -d "$outside/examples/soak" ] || ci/outside.sh
(cd "$outside/examples" && CARGO_TARGET_DIR=$target cargo build --quiet --package soak)
export MALLOC_ARENA_MAX=1 # or memory would depend on which thread met which
for leak in memory threads descriptors; do
    timeout 60 "$target/debug/soak" leak 6 "$seed" "$leak"
done
timeout $((seconds + 60)) "$target/debug/soak" run "$seconds" "$seed"
case ${2:-} in
    '') ;;
    rxe)
        RXE_VM_SUITE=${RXE_VM_SUITE:-testing} ci/rxe-vm --timeout $((seconds + 300)) -- \
            "$target/debug/soak" run "$seconds" "$seed" ib rxe0 rxe1
        ;;
    gpu | ipc)
        CUDA_DEVICE_MAX_CONNECTIONS=32 timeout $((seconds + 60)) "$target/debug/soak" run "$seconds" "$seed" "${@:2}"
        ;;
    *) echo "soak: no transport $2" >&2; exit 2 ;;
esac
