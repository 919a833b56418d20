#!/usr/bin/env bash
# Counts the instructions that a put with its signal costs the processor over verbs, at a burst of 32, over a verbs table
# whose data path does next to nothing: from the FIFO to the doorbell, and from the completion to the frontier. Times vary
# with the machine; instructions vary with the code alone.
#
# Fails when a count is more than 2 % away from the stored one: whoever changes it writes the new one down here. Fails
# too when the way to the doorbell is longer than its limit, and when a control with a little more work an op passes.
set -euo pipefail
cd "$(dirname "$0")/.."

stored_doorbell=246
stored_frontier=112
limit_doorbell=250
bursts=1000
burst=32

if ! command -v valgrind >/dev/null && [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    { apt-get update -qq && apt-get install -y -qq valgrind; } >/dev/null
fi
if ! command -v valgrind >/dev/null; then
    echo "waived: instructions of a put over verbs: valgrind is not installed"
    exit 0
fi

cargo build --quiet --release --package portway-transport-ib --example ib_instructions
program="${CARGO_TARGET_DIR:-target}/release/examples/ib_instructions"
log=$(mktemp)
trap 'rm -f "$log"' EXIT

# count WAY [dearer]: instructions of the steps that go that way, an op.
count() {
    if ! timeout 300 valgrind --tool=callgrind --callgrind-out-file=/dev/null --collect-atstart=no \
        --toggle-collect="*step_to_the_$1*" "$program" "$bursts" "${@:2}" >"$log" 2>&1; then
        cat "$log" >&2
        return 1
    fi
    awk -v ops=$((bursts * burst)) '/Collected/ { printf "%.1f", $NF / ops; found = 1 } END { exit !found }' "$log"
}

# compare WAY INSTRUCTIONS STORED: prints both; the status tells whether they are the same within 2 %.
compare() {
    awk -v way="$1" -v each="$2" -v stored="$3" 'BEGIN {
        verdict = each > stored * 1.02 || each < stored * 0.98 ? "FAILED" : "OK"
        printf "%-9s %6.1f instructions a put with its signal, stored %d: %s\n", way, each, stored, verdict
        exit verdict != "OK"
    }'
}

status=0
for way in doorbell frontier; do
    stored=stored_$way
    each=$(count "$way")
    compare "$way" "$each" "${!stored}" || status=1
    if [ $way = doorbell ]; then
        awk -v each="$each" -v limit="$limit_doorbell" 'BEGIN { exit each > limit }' ||
            { echo "doorbell  above the limit of $limit_doorbell: FAILED"; status=1; }
    fi
done
grep '^ops' "$log"
control=$(count doorbell dearer)
if text=$(compare control "$control" "$stored_doorbell"); then
    echo "$text"
    echo "the control, which costs more, was not found: FAILED"
    status=1
else
    echo "control: found, $control instructions"
fi
exit $status
