#!/usr/bin/env bash
# Builds everything that needs a GPU to run, and packs it into one folder. Needs no GPU.
#
# On a machine with Rust and a GPU, one command builds and runs it all:
#
#     ci/device-pack.sh && ci/device-run.sh
#
# For a machine without Rust, take the folder (or FOLDER.tar) there and run the copy of device-run.sh in it.
#
# usage: ci/device-pack.sh [FOLDER]        FOLDER: target/device-pack unless told otherwise
#
# The manifest has a line for each program: name, kind (test: a harness with tests in it; program: one that says itself
# how it went; bench: run only when asked for), the seconds that a test of it or the program may take, its SHA-256.
#
# soak and collectives are those of examples/, built in a copy of that workspace against the crates of this checkout.
# device-run.sh passes no arguments on: by name it runs collectives over loopback, and soak fails with its usage. So they
# are run by hand, from the folder, with NVRTC in LD_LIBRARY_PATH:
#
#     CUDA_DEVICE_MAX_CONNECTIONS=32 ./soak run 60 1 gpu
#     CUDA_DEVICE_MAX_CONNECTIONS=32 ./soak run 60 1 ipc 0 0
#     ./collectives ipc 0 0
set -euo pipefail
cd "$(dirname "$0")/.."

folder=${1:-${CARGO_TARGET_DIR:-target}/device-pack}
rm -rf "$folder" "$folder.tar"
mkdir -p "$folder"

# built ARGUMENTS...: the programs that cargo builds, a line each: name, path.
built() {
    cargo "$@" --message-format=json-render-diagnostics | python3 -c '
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if message["reason"] == "compiler-artifact" and message.get("executable"):
        print(message["target"]["name"], message["executable"])
'
}

# pack NAME KIND LIMIT_S TARGET ARGUMENTS...: builds a target and takes it in under a name.
pack() {
    local name=$1 kind=$2 limit_s=$3 target=$4 path
    shift 4
    path=$(built "$@" | awk -v target="$target" '$1 == target { print $2 }')
    if [ ! -x "$path" ]; then
        echo "device-pack: cargo $* built no $target" >&2
        exit 1
    fi
    cp "$path" "$folder/$name"
    strip "$folder/$name"
    echo "$name $kind $limit_s $(sha256sum "$folder/$name" | cut -d ' ' -f 1)" >>"$folder/manifest"
    echo "device-pack: $name"
}

pack fifo-cuda_device test 180 cuda_device test --no-run -p portway-fifo --features cuda --test cuda_device
pack proxy-cuda_device test 150 cuda_device test --no-run -p portway-proxy --features cuda --test cuda_device
pack cuda_put program 60 cuda_put build -p portway-proxy --features cuda --example cuda_put
pack cuda_progress program 560 cuda_progress test --no-run -p portway-proxy --features cuda --test cuda_progress
pack ipc-cuda_ipc test 180 cuda_ipc test --no-run -p portway-transport-ipc --test cuda_ipc
pack cuda_ipc_progress program 560 cuda_ipc_progress test --no-run -p portway-transport-ipc --test cuda_ipc_progress
pack clique-nccl_device test 180 nccl_device test --no-run -p portway-clique --features cuda --test nccl_device
pack clique-clique_device test 180 clique_device test --no-run -p portway-clique --features cuda --test clique_device
pack clique-processes_device test 180 processes_device test --no-run -p portway-clique --features cuda --test processes_device
pack clique-flat_device test 300 flat_device test --no-run -p portway-clique --features cuda --test flat_device
pack clique-driver_device test 480 driver_device test --no-run -p portway-clique --features cuda --test driver_device
pack clique-program_device test 560 program_device test --no-run -p portway-clique --features cuda --test program_device
pack portway-bench bench 300 portway-bench build --release -p portway-bench

# The crates that the examples ask the registry for are those of this checkout. A copy, so that no lock file stays behind.
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
copy=$target/device-examples
rm -rf "$copy"
mkdir -p "$target"
cp -a examples "$copy"
rm -rf "$copy/target"
cp Cargo.lock "$copy/" # the same versions of what comes from the registry
patches=()
for crate in fifo proxy transport-ib transport-ipc clique; do
    patches+=(--config "patch.crates-io.portway-$crate.path='$PWD/$crate'")
done
for example in soak collectives; do
    pack "$example" bench 300 "$example" build --manifest-path "$copy/Cargo.toml" --target-dir "$target" "${patches[@]}" -p "$example"
done

cp ci/device-run.sh "$folder/device-run.sh"
tar -C "$(dirname "$folder")" -cf "$folder.tar" "$(basename "$folder")"
echo "device-pack: $folder.tar, $(du -h "$folder.tar" | cut -f 1)"
