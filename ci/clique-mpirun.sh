#!/bin/sh
# Four processes that a real mpirun starts recognise it and hear each other. Installs Open MPI from the distribution where
# it is missing and may be installed.
set -eu
cd "$(dirname "$0")/.."

if ! command -v mpirun >/dev/null; then
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "waived: mpirun is missing and cannot be installed here"
    exit 0
  fi
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends openmpi-bin >/dev/null
fi

cargo build --quiet -p portway-clique --example rendezvous
example=$(cargo metadata --format-version 1 --no-deps | sed 's/.*"target_directory":"\([^"]*\)".*/\1/')/debug/examples/rendezvous

# Any free port will do. Should somebody else take it at this moment, rank 0 says so.
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
export PORTWAY_STORE="127.0.0.1:$port" PORTWAY_JOB="mpirun-$port-$$"
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

heard=$(timeout 120 mpirun --oversubscribe -n 4 "$example")
echo "$heard"
for rank in 0 1 2 3; do
  echo "$heard" | grep -q "^OpenMpi rank $rank: heard all 4 in " || { echo "rank $rank has not heard all" >&2; exit 1; }
done

# The control: one process of the job has another token, so nobody hears all, and everybody ends.
export PORTWAY_STORE="127.0.0.1:$port"
status=0
timeout 120 mpirun --oversubscribe -n 3 "$example" : -n 1 env PORTWAY_JOB=another-job "$example" >/dev/null 2>&1 || status=$?
case $status in
0) echo "the control passed, so the check checks nothing" >&2; exit 1 ;;
124) echo "the control did not end in 120 s" >&2; exit 1 ;;
esac
echo "mpirun: 4 ranks heard each other; with a wrong token they did not"
