#!/usr/bin/env bash
# portway-bench ib over soft-RoCE of a real kernel, in a virtual machine, beside a raw loop and perftest. It shows that they
# work; the rates and times of an emulated processor and of RDMA in software tell nothing about an adapter.
#
# usage: ci/ib-bench.sh [quick]    quick: seconds instead of minutes, to see that it runs and finds its own corruption
#
# As root of a Debian machine it installs perftest, which the virtual machine finds among this machine's files.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! command -v qemu-system-x86_64 >/dev/null && [ "$(id -u)" != 0 ]; then
    echo "waived: portway-bench ib over soft-RoCE, no QEMU here and only root can install it"
    exit 0
fi
if ! command -v ib_write_lat >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends perftest; } >/dev/null
fi
cargo build --quiet --release --package portway-bench
bench=$(realpath "${CARGO_TARGET_DIR:-target}/release/portway-bench")
# Loads that RDMA in software carries, and some that it does not.
flags=(-D 1 -N 3 -w 100 -e 512K -f 16 --rate 0.002:0.016:0.002)
if [ "${1:-}" = quick ]; then
    flags=(-D 0.05 -N 1 -w 20 -e 4K -f 512 --rate 0.002:0.008:0.006)
    # The kernel that ci/ib-rxe.sh has downloaded already.
    export RXE_VM_SUITE=${RXE_VM_SUITE:-testing}
fi

# 125: the machine, not the program. A download that fails, or an emulated kernel that crashed (once in a hundred boots).
for try in first second; do
    code=0
    nice -n 10 ci/rxe-vm --timeout 900 -- "$bench" ib -d rxe0,rxe1 -T 60 "${flags[@]}" || code=$?
    [ "$code" = 125 ] || break
    echo "the virtual machine failed at the $try try" >&2
done
exit "$code"
