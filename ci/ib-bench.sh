#!/usr/bin/env bash
# portway-bench ib over soft-RoCE of a real kernel, in a virtual machine, beside a raw loop and perftest. It shows that they
# work; the rates and times of an emulated processor and of RDMA in software tell nothing about an adapter.
#
# usage: ci/ib-bench.sh [FLAG...]    flags of portway-bench ib, besides those that it has here
#
# As root of a Debian machine it installs perftest, which the virtual machine finds among this machine's files.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! command -v ib_write_lat >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends perftest; } >/dev/null
fi
cargo build --quiet --release --package portway-bench
bench=$(realpath "${CARGO_TARGET_DIR:-target}/release/portway-bench")
ci/rxe-vm --timeout 900 -- "$bench" ib -d rxe0,rxe1 -D 1 -N 3 -w 100 -T 60 -e 512K -f 16 "$@"
