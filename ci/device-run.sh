#!/usr/bin/env bash
# Runs what ci/device-pack.sh has packed, on a machine with a GPU. Needs the CUDA driver and NVRTC; no Rust.
#
#     ci/device-pack.sh && ci/device-run.sh
#
# usage: device-run.sh [--folder FOLDER] [--results FILE] [--runs N] [--sanitizer] [--require] [NAME...]
#
#   --folder     what was packed: this script's own folder if it was packed, else target/device-pack
#   --results    a file in which the progress matrices keep what they have got through, to go on from there the next time
#   --runs       how many runs they do of each cell, 20 unless told otherwise
#   --sanitizer  runs the FIFO tests under compute-sanitizer's memcheck, each with three times its limit, and nothing
#                else; before them a store outside of an allocation, which memcheck has to find; waived where it is not
#                installed
#   --require    a machine without a GPU is a failure, not a waiver; one with too few of them is a waiver still
#   NAME         only these programs of the manifest; a bench runs only when it is named
#
# Each test has its own time limit. Prints a line a test: passed, failed or waived, with the output of those that
# failed. Exits with 1 if one failed.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
folder=
results=
runs=20
sanitizer=
require=
names=()
while [ $# -gt 0 ]; do
    case $1 in
    --folder) folder=${2:?} && shift ;;
    --results) results=${2:?} && shift ;;
    --runs) runs=${2:?} && shift ;;
    --sanitizer) sanitizer=yes ;;
    --require) require=yes ;;
    -*) echo "device-run: $1 is no option" >&2 && exit 2 ;;
    *) names+=("$1") ;;
    esac
    shift
done
if [ -z "$folder" ]; then
    folder=$here
    [ -f "$folder/manifest" ] || folder=$here/../${CARGO_TARGET_DIR:-target}/device-pack
    [ -f "$folder/manifest" ] || folder=${CARGO_TARGET_DIR:-target}/device-pack
fi
if [ ! -f "$folder/manifest" ]; then
    echo "device-run: no manifest in $folder; run ci/device-pack.sh first" >&2
    exit 2
fi

# NVRTC often lies where the loader does not look.
for toolkit in /usr/local/cuda/lib64 /usr/local/cuda/targets/x86_64-linux/lib; do
    [ -d "$toolkit" ] && export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$toolkit"
done

[ -z "$require" ] || export PORTWAY_REQUIRE_CUDA=1
log=$(mktemp)
trap 'rm -f "$log"' EXIT
passed=0 failed=0 waived=0

# run NAME LIMIT_S COMMAND...: runs one test, and says how it went.
run() { run_to 0 "$@"; }

# run_to STATUS NAME LIMIT_S COMMAND...: the same for a command that has to end with this status.
run_to() {
    local expected=$1 name=$2 limit_s=$3 status=0 start=$SECONDS
    shift 3
    timeout --kill-after=10 "$limit_s" "$@" >"$log" 2>&1 </dev/null || status=$?
    local took=$((SECONDS - start))
    if [ "$status" -eq 0 ] && grep -q '^waived:' "$log"; then
        if [ -n "$require" ] && ! grep -Eq '^waived: .*needs [0-9]+ GPUs?, (has|there is) [1-9]' "$log"; then
            failed=$((failed + 1))
            echo "failed: $name: $(grep '^waived:' "$log")"
        else
            waived=$((waived + 1))
            echo "waived: $name: $(sed -n 's/^waived: //p' "$log")"
        fi
    elif [ "$status" -ne "$expected" ]; then
        failed=$((failed + 1))
        case $status in
        124 | 137) echo "failed: $name: not done after $limit_s s" ;;
        *) echo "failed: $name: status $status after $took s, expected $expected" ;;
        esac
        sed 's/^/    /' "$log"
    else
        passed=$((passed + 1))
        echo "passed: $name ($took s)"
        # What a program has to say, and what a test has recorded.
        if [ "$kind" = test ]; then grep '^recorded:' "$log" || true; else sed 's/^/    /' "$log"; fi
    fi
}

# wanted NAME KIND: whether this program is to run.
wanted() {
    [ ${#names[@]} -eq 0 ] && [ "$2" != bench ] && return 0
    local name
    for name in ${names[@]+"${names[@]}"}; do
        [ "$name" != "$1" ] || return 0
    done
    return 1
}

# tests PROGRAM: the names of the tests in it.
tests() { "$1" --list --format terse 2>/dev/null | sed -n 's/: test$//p'; }

if [ -n "$sanitizer" ]; then
    memcheck=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null || true)
    if [ -z "$memcheck" ]; then
        echo "waived: memcheck: compute-sanitizer is not installed"
        exit 0
    fi
fi

while read -r name kind limit_s sum; do
    program=$folder/$name
    if [ "$(sha256sum "$program" | cut -d ' ' -f 1)" != "$sum" ]; then
        failed=$((failed + 1))
        echo "failed: $name: it is not the program that was packed"
        continue
    fi
    wanted "$name" "$kind" || continue
    [ -z "$sanitizer" ] || [[ $name == fifo-* ]] || continue
    case $kind in
    test)
        listed=$(tests "$program") || listed=
        if [ -z "$listed" ]; then
            failed=$((failed + 1))
            echo "failed: $name: it lists no tests: $("$program" --list 2>&1 | tail -n 1)"
        fi
        for test in $listed; do
            # Calls of the driver that fail are not errors here: tests make some on purpose, and look at the status.
            under_memcheck=(--tool memcheck --report-api-errors no --error-exitcode 99 "$program" --nocapture --exact "$test")
            case ${sanitizer:-no},$test in
            yes,memcheck_*) run_to 99 "$name, $test, control" $((limit_s * 3)) "$memcheck" "${under_memcheck[@]}" --ignored ;;
            yes,*) run "$name, $test, memcheck" $((limit_s * 3)) "$memcheck" "${under_memcheck[@]}" ;;
            no,memcheck_*) ;;
            no,*) run "$name, $test" "$limit_s" "$program" --exact "$test" --nocapture ;;
            esac
        done
        ;;
    *)
        arguments=()
        [[ $name != cuda_*progress ]] || arguments=(--runs "$runs" ${results:+--results "$results"})
        run "$name" "$limit_s" "$program" ${arguments[@]+"${arguments[@]}"}
        ;;
    esac
done <"$folder/manifest"

if [ $((passed + failed + waived)) -eq 0 ]; then
    echo "device-run: nothing to run: $folder/manifest has no ${names[*]:-program} that is asked for" >&2
    exit 2
fi
echo "device-run: $passed passed, $failed failed, $waived waived"
[ "$failed" -eq 0 ]
