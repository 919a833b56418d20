#!/usr/bin/env bash
# Runs the models of the ring (fifo/src/model.rs) and of a clique's threads (clique/src/model.rs), then plants each mistake
# that the crate's src/sync.rs names, one after the other: some model must notice.
#
# usage: ci/loom.sh [CRATE [PLANT...]]    CRATE: fifo or clique; with plants, only the models and these
#
# LOOM_MAX_PREEMPTIONS bounds the forced switches of an execution: 2 unless set. The ring, from nothing: 214 s on two
# cores that had other work as well; with 3, which passes too, its models take 50 s of processor time more.
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

# build [RUSTC ARGUMENTS]: builds the models of $crate and sets `program`. The arguments reach this crate alone.
build() {
    program=$(cargo rustc --quiet --package "portway-$crate" --lib --profile test \
        --message-format=json-render-diagnostics "$@" |
        sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -n 1)
    [ -x "$program" ] || { echo "loom: cargo built no test program" >&2; exit 1; }
}

unnoticed=0
# check CRATE LEAST [PLANT...]: its models, then these plants, or all, of which there are at least so many.
check() {
    local least=$2 plant status noticed
    crate=$1
    shift 2
    build
    timeout "$model_seconds" "$program" --quiet model::
    echo "loom: the models of $crate pass"
    local plants=("$@")
    if [ ${#plants[@]} -eq 0 ]; then
        mapfile -t plants < <(sed -nE 's/^pub\(crate\) const .*"([a-z_]+)"\);$/\1/p' "$crate/src/sync.rs")
        [ ${#plants[@]} -ge "$least" ] || { echo "loom: only ${#plants[@]} plants in $crate" >&2; exit 1; }
    fi
    for plant in "${plants[@]}"; do
        build -- --cfg "portway_plant=\"$plant\""
        status=0
        timeout "$plant_seconds" "$program" model:: >"$log" 2>&1 || status=$?
        # 101 is a failed test. 134 is one that failed while other threads of its model were blocked, which loom cannot
        # clean up: its first panic is a deadlock's, or the model's own. A time-out or a crash proves nothing.
        noticed=$(sed -n 's/^test model::\(.*\) \.\.\. FAILED$/\1/p' "$log" | tr '\n' ' ')
        if [ "$status" -eq 134 ]; then
            noticed=$(grep -m 1 -A 1 "^thread 'model::" "$log" | tr '\n' ' ' |
                sed -nE "s/^thread 'model::([a-z_]*)'.*(src\/model\.rs:|deadlock; threads).*/\1/p")
        fi
        if [[ "$status" =~ ^(101|134)$ ]] && [ -n "$noticed" ]; then
            echo "loom: $plant noticed by $noticed"
        else
            echo "loom: $plant UNNOTICED, status $status" >&2
            tail -n 5 "$log" >&2
            unnoticed=$((unnoticed + 1))
        fi
    done
}

case ${1:-all} in
fifo) check fifo 16 "${@:2}" ;;
clique) check clique 10 "${@:2}" ;;
all)
    check fifo 16
    check clique 10
    ;;
*) echo "loom: $1 has no models" >&2 && exit 2 ;;
esac
[ "$unnoticed" -eq 0 ]
