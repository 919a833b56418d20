#!/usr/bin/env bash
# Counts the instructions that a trigger costs the host, at a batch of 32, and compares them with the stored ones. Times vary
# with the machine; instructions vary with the code alone. Counted by callgrind as the difference between a run of 2n and a
# run of n triggers, so that start and end cancel out.
#
# Fails when a path costs more than TOLERANCE percent over its stored number, or more than its limit, and prints both numbers.
# Who makes a path dearer on purpose, or cheaper, writes the new number down here. A control with a little more work a trigger
# has to fail.
set -euo pipefail
cd "$(dirname "$0")/.."

# The stored number of each path, and its limit:
#   push    push of one trigger by a software producer that finds room
#   fifo    pop and publish
#   proxy   from the pop to the port's submit, and the note of the op after it
#   step    a whole step of the engine, with the completion and the frontier
# What the port itself executes is counted apart and taken off.
stored=(
    push=85.00:none
    fifo=25.94:30
    proxy=109.97:112
    step=188.81:none
)
tolerance=2
# Fewer than this many, and the work was optimised away.
floor=2
count=19200

if ! command -v valgrind >/dev/null && [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    { timeout 300 apt-get update -qq && timeout 300 apt-get install -y -qq valgrind; } >/dev/null
fi
if ! command -v valgrind >/dev/null; then
    echo "waived: instructions a trigger: valgrind is not installed"
    exit 0
fi

cargo build --quiet --release --package portway-bench --example instructions
cargo build --quiet --release --package portway-proxy --example steady_state
examples="${CARGO_TARGET_DIR:-target}/release/examples"
log=$(mktemp)
trap 'rm -f "$log"' EXIT

# instructions COUNT PROGRAM...: what the program executes for COUNT triggers; with COLLECT set, in functions of such a
# name and what they call.
instructions() {
    local options=()
    [ -z "${COLLECT:-}" ] || options=(--collect-atstart=no --toggle-collect="$COLLECT")
    if ! timeout 300 valgrind --tool=callgrind --callgrind-out-file=/dev/null "${options[@]}" "${@:2}" "$1" 2>"$log"; then
        cat "$log" >&2
        return 1
    fi
    awk '/Collected/ { print $NF; found = 1 } END { exit !found }' "$log"
}

# more PROGRAM...: how many more they are for twice as many triggers.
more() {
    local once twice
    once=$(instructions "$count" "$@")
    twice=$(instructions $((2 * count)) "$@")
    echo $((twice - once))
}

# engine OURS PORTS: how many more they are in functions of the engine, without those of its port, which is the
# example's.
engine() {
    local ours ports
    ours=$(COLLECT=$1 more "$examples/steady_state")
    ports=$(COLLECT=$2 more "$examples/steady_state")
    if [ "$ports" -lt "$count" ]; then
        echo "the port was not found: it took $ports instructions for $count triggers" >&2
        return 1
    fi
    echo $((ours - ports))
}

push() { more "$examples/instructions" push; }
fifo() { more "$examples/instructions" fifo; }
dearer() { more "$examples/instructions" dearer; }
proxy() { engine '*Engine*drain*' '*Obliging*submit*'; }
step() { engine '*Engine*step*' '*Obliging*'; }

# compare NAME INSTRUCTIONS STORED LIMIT: prints the numbers; the status tells whether the first holds beside the others.
compare() {
    awk -v name="$1" -v each="$2" -v stored="$3" -v limit="$4" -v floor="$floor" -v tolerance="$tolerance" 'BEGIN {
        change = 100 * (each / stored - 1)
        verdict = "OK"
        if (change < -tolerance) verdict = "OK, cheaper: store the new number"
        if (change > tolerance) verdict = "FAILED: more than " tolerance " % over the stored number"
        if (limit != "none" && each > limit) verdict = "FAILED: above the limit"
        if (each < floor) verdict = "FAILED: nothing was measured"
        printf "%-8s %7.2f instructions a trigger, stored %.2f (%+.1f %%), limit %s: %s\n", name, each, stored, change, limit, verdict
        exit verdict ~ /^FAILED/
    }'
}

# measure PATH: the instructions of a trigger.
measure() {
    local spent
    spent=$("$1")
    awk -v spent="$spent" -v count="$count" 'BEGIN { printf "%.3f", spent / count }'
}

status=0
for entry in "${stored[@]}"; do
    path=${entry%%=*}
    numbers=${entry#*=}
    each=$(measure "$path")
    compare "$path" "$each" "${numbers%:*}" "${numbers#*:}" || status=1
    if [ "$path" = fifo ]; then
        # The control is held to what fifo was just now, so that it is found for its own cost.
        control=$(measure dearer)
        if text=$(compare control "$control" "$each" none); then
            echo "$text"
            echo "the control, which costs more than fifo, was not found: FAILED"
            status=1
        else
            echo "control: found, ${control} instructions a trigger beside ${each}"
        fi
    fi
done
exit $status
