#!/bin/sh
# The real NCCL on a machine without a GPU: it loads, says its version, makes unique ids, and initialisation ends in its
# own error, in time. Downloads 194 MB.
#
#   ci/clique-nccl.sh [VERSION]            of the package nvidia-nccl-cu13; 2.27.7 if not given
#   PORTWAY_NCCL_LIBRARY=PATH ci/clique-nccl.sh      a library that is here already
set -eu
cd "$(dirname "$0")/.."

version=${1:-2.27.7}
if [ -z "${PORTWAY_NCCL_LIBRARY:-}" ]; then
  folder=$(mktemp -d)
  trap 'rm -rf "$folder"' EXIT
  python3 -m pip install --quiet --no-deps --target "$folder" "nvidia-nccl-cu13==$version"
  PORTWAY_NCCL_LIBRARY=$(find "$folder" -name 'libnccl.so.2' -print -quit)
fi
if [ ! -f "$PORTWAY_NCCL_LIBRARY" ]; then
  echo "PORTWAY_NCCL_LIBRARY: no file $PORTWAY_NCCL_LIBRARY" >&2
  exit 1
fi
export PORTWAY_NCCL_LIBRARY
cargo test --quiet -p portway-clique --features cuda --test nccl_real -- --nocapture
