#!/usr/bin/env bash
# The engine's steady state makes no system call: between the two lines that its example writes, strace sees none. A
# control run, in which the example yields its processor after each step, shows that one would be seen.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! command -v strace >/dev/null && [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    { timeout 300 apt-get update -qq && timeout 300 apt-get install -y -qq strace; } >/dev/null
fi
if ! command -v strace >/dev/null; then
    echo "waived: no system calls: strace is not installed"
    exit 0
fi

cargo build --quiet --release --package portway-proxy --example steady_state
program="${CARGO_TARGET_DIR:-target}/release/examples/steady_state"
trace=$(mktemp)
trap 'rm -f "$trace"' EXIT
if ! strace -o "$trace" true 2>/dev/null; then
    echo "waived: no system calls: strace may not trace here"
    exit 0
fi

# Prints what COUNT triggers call between the two lines, and how many calls that is.
calls_of() {
    timeout 120 strace -o "$trace" "$program" "$@" 2>/dev/null
    awk '/steady state ends/ { ended = 1; exit }
         begun { print > "/dev/stderr"; calls++ }
         /steady state begins/ { begun = 1 }
         END { if (!begun || !ended) { print "the two lines were not seen" > "/dev/stderr"; exit 1 } print calls + 0 }' "$trace"
}

calls=$(calls_of 65536)
control=$(calls_of 65536 control 2>/dev/null)
echo "system calls in 2,048 steps: $calls; in the control: $control"
[ "$calls" -eq 0 ] && [ "$control" -gt 0 ]
