#!/usr/bin/env bash
# Compiles the device headers with every compiler that they are for, without a GPU, and looks at the PTX.
#
# For each header CRATE/device/portway/NAME.cuh there is a file CRATE/tests/device/NAME.cu with a kernel for each of
# its calls; fifo/tests/device/fifo.cu says how. nvcc and NVRTC come from PyPI, pinned, into the target folder; nothing
# is installed elsewhere. Needs a C++17 compiler, python3 with pip, and the network once. Prints a line a check.
set -euo pipefail
cd "$(dirname "$0")/.."

target="${CARGO_TARGET_DIR:-target}/device-header"
cxx=${CXX:-c++}
pins=(
    nvidia-cuda-nvcc==13.0.88
    nvidia-cuda-crt==13.0.88
    nvidia-nvvm==13.0.88
    nvidia-cuda-runtime==13.0.96
    nvidia-cuda-nvrtc==13.0.88
)

ok() { echo "device-header: $*: ok"; }
fail() {
    echo "device-header: $*: FAILED" >&2
    exit 1
}

# quietly WHAT COMMAND...: shows what the command prints only if it fails.
quietly() {
    local what=$1
    shift
    if ! timeout 600 "$@" >"$target/log" 2>&1; then
        cat "$target/log" >&2
        fail "$what"
    fi
}

mkdir -p "$target"
if [ "$(cat "$target/installed" 2>/dev/null)" != "${pins[*]}" ]; then
    rm -rf "$target/cuda" "$target/installed"
    PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1 \
        quietly "install nvcc and NVRTC" python3 -m pip install --no-deps --target "$target/cuda" "${pins[@]}"
    echo "${pins[*]}" >"$target/installed"
fi
cuda=$target/cuda/nvidia/cu13

shopt -s nullglob
headers=(*/device/portway/*.cuh)
kernels=(*/tests/device/*.cu)
includes=()
by_name=()
for header in "${headers[@]}"; do
    includes+=(-I "${header%/portway/*}")
    by_name+=("portway/${header##*/}=$header")
done
[ ${#headers[@]} -ge 2 ] || fail "only ${#headers[@]} headers found"

nvcc=("$cuda/bin/nvcc" -ccbin "$cxx" -std=c++17 -Werror all-warnings -Xcompiler "-Wall,-Wextra")

# complaints SOURCE PTX [KERNEL]: what the "//! ptx KERNEL has|lacks REGEX" lines (KERNEL may be a function, too) of a source have against its PTX.
complaints() {
    local kernel verb regex text found
    while read -r _ _ kernel verb regex; do
        [ "${3:-$kernel}" = "$kernel" ] || continue
        # The body of the kernel, or of the function of that name, on one line.
        text=$(awk -v entry=".entry $kernel(" -v func="${#kernel}${kernel}E" '
            index($0, entry) || index($0, func) && /\.func|^_Z/ { on = 1; held = "" }
            on { held = held " " $0 } on && /;$/ && held !~ /\{/ { on = 0 } on && /^}/ { print held; exit }' "$2")
        [ -n "$text" ] || echo "no kernel or function $kernel"
        found=lacks
        if grep -qE "$regex" <<<"$text"; then found=has; fi
        [ "$found" = "$verb" ] || echo "$kernel $found $regex"
    done < <(grep '^//! ptx ' "$1")
}

# plant SED: a copy of all headers, weakened. Fails if the command changes nothing.
plant() {
    rm -rf "$target/planted"
    mkdir -p "$target/planted/portway"
    cp "${headers[@]}" "$target/planted/portway"
    sed -i "$1" "$target/planted/portway/"*.cuh
    local header
    for header in "${headers[@]}"; do
        cmp -s "$header" "$target/planted/portway/${header##*/}" || return 0
    done
    return 1
}

for header in "${headers[@]}"; do
    file=${header##*/}
    quietly "$header, $cxx" "$cxx" -std=c++17 -Wall -Wextra -Wpedantic -Werror -fsyntax-only "${includes[@]}" \
        -x c++ - <<<"#include \"portway/$file\""
    ok "$file, $cxx -std=c++17"

    # Every function is called by another one or by a kernel, so that ptxas sees what is in it.
    for call in $(grep -oP '^\s*PORTWAY_FN .*?\K\w+(?=\()' "$header" | sort -u); do
        defined=$(grep -hP "PORTWAY_FN .*\b$call\(" "${headers[@]}" | wc -l)
        named=$(cat "${headers[@]}" "${kernels[@]}" | grep -oP "\b$call\(" | wc -l)
        [ "$named" -gt "$defined" ] || fail "$header: nothing calls $call"
    done
    [ "$file" != platform.cuh ] || continue # what the others are made of: compiled with them

    source=${header%/device/*}/tests/device/${file%.cuh}.cu
    [ -f "$source" ] || fail "$header: no kernels in $source"
    for gpu in sm_80 sm_90 sm_100; do
        quietly "$source, nvcc $gpu" "${nvcc[@]}" "${includes[@]}" -arch=$gpu -cubin "$source" -o "$target/cubin"
        ok "$file, nvcc $gpu"
    done
    quietly "$source, NVRTC sm_90" python3 fifo/tests/device/nvrtc.py "$cuda/lib" sm_90 "$source" "${by_name[@]}"
    ok "$file, NVRTC sm_90"

    quietly "$source, PTX" "${nvcc[@]}" "${includes[@]}" -arch=sm_90 -ptx "$source" -o "$target/ptx"
    complaints "$source" "$target/ptx" >"$target/complaints"
    [ ! -s "$target/complaints" ] || fail "$source, PTX: $(cat "$target/complaints")"
    ok "$file, PTX has $(grep -c '^//! ptx .* has ' "$source") things that it must and none that it must not"

    # Controls: the PTX of a weakened header is found out.
    while read -r _ _ kernel change; do
        plant "$change" || fail "$source: $change changes nothing"
        quietly "$source with $change" "${nvcc[@]}" -I "$target/planted" -arch=sm_90 -ptx "$source" -o "$target/ptx"
        [ -n "$(complaints "$source" "$target/ptx" "$kernel")" ] || fail "$source: $kernel passes in spite of $change"
    done < <(grep '^//! plant ' "$source")
    ok "$file, $(grep -c '^//! plant ' "$source") weakened headers are found out"
done
