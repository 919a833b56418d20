#!/usr/bin/env bash
# Counts the instructions that a trigger costs its consumer, at a batch of 32, and fails above a limit. Times vary with
# the machine; instructions vary with the code alone. Counted by callgrind as the difference between a run of 2n and a
# run of n triggers, so that start, pushes and end cancel out.
set -euo pipefail
cd "$(dirname "$0")/.."

# At most so many instructions a trigger:
#   fifo    pop and publish
limits=(
    fifo=40
)
# Fewer than this many, and the work was optimised away.
floor=2
count=20000

if ! command -v valgrind >/dev/null && [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    timeout 300 apt-get install -y -q valgrind >/dev/null 2>&1 || true
fi
if ! command -v valgrind >/dev/null; then
    echo "waived: instructions a trigger: valgrind is not installed"
    exit 0
fi

cargo build --quiet --release --package portway-bench --example instructions
program="${CARGO_TARGET_DIR:-target}/release/examples/instructions"
log=$(mktemp)
trap 'rm -f "$log"' EXIT

# Instructions of the whole program for COUNT triggers of PATH.
instructions() {
    if ! timeout 300 valgrind --tool=callgrind --callgrind-out-file=/dev/null "$program" "$1" "$2" 2>"$log"; then
        cat "$log" >&2
        return 1
    fi
    awk '/Collected/ { print $NF; found = 1 } END { exit !found }' "$log"
}

# measure PATH LIMIT: prints the figure; the status tells whether it lies between the floor and the limit.
measure() {
    local once twice
    once=$(instructions "$1" "$count")
    twice=$(instructions "$1" $((2 * count)))
    awk -v path="$1" -v limit="$2" -v floor="$floor" -v each="$(((twice - once) * 100 / count))" 'BEGIN {
        each /= 100
        verdict = each > limit ? "FAILED" : each < floor ? "FAILED: nothing was measured" : "OK"
        printf "%-8s %7.2f instructions a trigger at a batch of 32, limit %d: %s\n", path, each, limit, verdict
        exit verdict != "OK"
    }'
}

status=0
for entry in "${limits[@]}"; do
    measure "${entry%%=*}" "${entry#*=}" || status=1
done
exit $status
