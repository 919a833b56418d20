#!/usr/bin/env bash
# Counts the instructions that a trigger costs its consumer, at a batch of 32, and fails above a limit. Times vary with
# the machine; instructions vary with the code alone. Counted by callgrind as the difference between a run of 2n and a
# run of n triggers, so that start, pushes and end cancel out.
set -euo pipefail
cd "$(dirname "$0")/.."

# At most so many instructions a trigger:
#   fifo    pop and publish
#   proxy   from the pop to the port's submit, and the note of the op after it. The loop of the engine has 104 instructions
#           a put with a signal: 76 up to and with the call of submit, 28 after it
# And without a limit:
#   step    a whole step of the engine, with the completion and the frontier
# What the port itself executes is counted apart and taken off.
limits=(
    fifo=30
    proxy=112
    step=none
)
# Fewer than this many, and the work was optimised away.
floor=2
count=19200

if ! command -v valgrind >/dev/null && [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    timeout 300 apt-get install -y -q valgrind >/dev/null 2>&1 || true
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

fifo() { more "$examples/instructions" fifo; }
proxy() { engine '*Engine*drain*' '*Obliging*submit*'; }
step() { engine '*Engine*step*' '*Obliging*'; }

# measure PATH LIMIT: prints the figure; the status tells whether it lies between the floor and the limit.
measure() {
    local spent
    spent=$("$1")
    awk -v path="$1" -v limit="$2" -v floor="$floor" -v each="$((spent * 100 / count))" 'BEGIN {
        each /= 100
        verdict = each < floor ? "FAILED: nothing was measured" : limit == "none" || each <= limit ? "OK" : "FAILED"
        printf "%-8s %7.2f instructions a trigger at a batch of 32, limit %s: %s\n", path, each, limit, verdict
        exit verdict != "OK"
    }'
}

status=0
for entry in "${limits[@]}"; do
    measure "${entry%%=*}" "${entry#*=}" || status=1
done
exit $status
