#!/usr/bin/env bash
# The InfiniBand transport over soft-RoCE of a real kernel, in a virtual machine: conformance over two devices and over
# two hosts, random puts between two hosts, faults. Built here, run there.
#
# usage: ci/ib-rxe.sh [short|all]
#
# short (the default) is for every change: one or two minutes under emulation. all takes three to twenty.
# PORTWAY_SEED chooses the random puts (1).
set -euo pipefail
cd "$(dirname "$0")/.."
what=${1:-short}
seed=${PORTWAY_SEED:-1}

if ! command -v qemu-system-x86_64 >/dev/null && [ "$(id -u)" != 0 ]; then
    echo "waived: the transport over soft-RoCE, no QEMU here and only root can install it"
    exit 0
fi

cargo test --quiet --package portway-transport-ib --test rxe --no-run
program=$(cargo test --package portway-transport-ib --test rxe --no-run --message-format=json 2>/dev/null |
    sed -n 's/.*"name":"rxe".*"executable":"\([^"]*\)".*/\1/p' | tail -n 1)
[ -x "$program" ] || { echo 'the test program was not built' >&2; exit 1; }

# Namespaces, loss and cuts take the newer kernel; the older one is another provider to conform to.
case $what in
    short)
        commands="$program conformance-hosts; $program random $seed 3000"
        commands+="; $program faults a_changed_byte_is_found a_broken_witness_is_found peers_link_down killed_in_mid_put wrong_rkey receiver_not_ready"
        timeout=400
        ;;
    all)
        nice -n 10 ci/rxe-vm --timeout 600 -- "$program" conformance
        commands="$program conformance-hosts; $program random $seed 100000; $program faults"
        timeout=3000
        ;;
    *) echo "usage: ci/ib-rxe.sh [short|all]" >&2; exit 2 ;;
esac

code=0
nice -n 10 ci/rxe-vm --netns --devices 3 --timeout "$timeout" -- bash -ec "$commands" || code=$?
# 125: the machine, not the program. A download that fails, or an emulated kernel that crashed (once in a hundred boots).
if [ "$code" = 125 ]; then
    echo 'the virtual machine failed; once more' >&2
    code=0
    nice -n 10 ci/rxe-vm --netns --devices 3 --timeout "$timeout" -- bash -ec "$commands" || code=$?
fi
[ "$code" = 0 ] && echo "soft-RoCE ($what): ok"
exit "$code"
