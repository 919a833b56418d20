#!/usr/bin/env bash
# Runs the models of the ring (fifo/src/model.rs), then plants each mistake that fifo/src/sync.rs names, one after the
# other: some model must notice.
#
# usage: ci/loom.sh [PLANT...]    with arguments, only the models and these plants
#
# LOOM_MAX_PREEMPTIONS bounds the forced switches of an execution: 2 unless set. From nothing, 214 s on two cores that
# had other work as well; with 3, which passes too, the models take 50 s of processor time more.
set -euo pipefail
cd "$(dirname "$0")/.."

# `--cfg loom` reaches every dependency, so this build keeps to itself.
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/loom"
export RUSTFLAGS='--cfg loom' CARGO_PROFILE_DEV_OPT_LEVEL=2 CARGO_PROFILE_DEV_DEBUG=0 RUST_BACKTRACE=0
export LOOM_MAX_PREEMPTIONS="${LOOM_MAX_PREEMPTIONS:-2}"

# A model that does not end fails by loom's count of steps; these are for a machine that does not get there.
model_seconds=600 plant_seconds=120
log=$(mktemp)
trap 'rm -f "$log"' EXIT

# build [RUSTC ARGUMENTS]: builds the models and sets `program`. The arguments reach this crate alone.
build() {
    program=$(cargo rustc --quiet --package portway-fifo --lib --profile test --message-format=json-render-diagnostics "$@" |
        sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -n 1)
    [ -x "$program" ] || { echo "loom: cargo built no test program" >&2; exit 1; }
}

build
timeout "$model_seconds" "$program" --quiet
echo "loom: the models pass"

plants=("$@")
if [ ${#plants[@]} -eq 0 ]; then
    mapfile -t plants < <(sed -nE 's/^pub\(crate\) const .*"([a-z_]+)"\);$/\1/p' fifo/src/sync.rs)
fi
[ ${#plants[@]} -ge 16 ] || [ $# -gt 0 ] || { echo "loom: only ${#plants[@]} plants in sync.rs" >&2; exit 1; }

unnoticed=0
for plant in "${plants[@]}"; do
    build -- --cfg "portway_plant=\"$plant\""
    status=0
    timeout "$plant_seconds" "$program" >"$log" 2>&1 || status=$?
    # 101 is a failed test; a time-out or a crash proves nothing.
    noticed=$(sed -n 's/^test model::\(.*\) \.\.\. FAILED$/\1/p' "$log" | tr '\n' ' ')
    if [ "$status" -eq 101 ] && [ -n "$noticed" ]; then
        echo "loom: $plant noticed by $noticed"
    else
        echo "loom: $plant UNNOTICED, status $status" >&2
        tail -n 5 "$log" >&2
        unnoticed=$((unnoticed + 1))
    fi
done
[ "$unnoticed" -eq 0 ]
