#!/usr/bin/env bash
# Makes transport-ib/src/sys/bindings.rs from the verbs header of this machine, or compares.
#
# usage: ci/ib-bindings.sh [--check]
#
# The committed file came from libibverbs-dev 44 and bindgen 0.72.1. A newer header may add fields or constants, and another
# bindgen write them down in another way: such a difference is looked at by hand, so --check waives what it cannot compare.
# As root of a Debian machine it installs what is missing, bindgen under the build folder.
set -euo pipefail
cd "$(dirname "$0")/.."
committed=transport-ib/src/sys/bindings.rs
header=/usr/include/infiniband/verbs.h
bindgen_version=0.72.1 header_version=44

cannot() {
    [ "${1:-}" = --check ] || { echo "missing: $2" >&2; exit 1; }
    echo "waived: comparison of the verbs bindings: $2"
    exit 0
}

can_install=''
[ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null || can_install=yes
if [ "$can_install" ] && ! { [ -e "$header" ] && ls /usr/lib/llvm-*/lib/clang/*/include/stddef.h >/dev/null 2>&1; }; then
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends libibverbs-dev libclang-dev; } >/dev/null
fi
[ -e "$header" ] || cannot "${1:-}" "no infiniband/verbs.h (Debian: libibverbs-dev)"
seen=$(dpkg-query -W -f '${Version}' libibverbs-dev 2>/dev/null || true)
[[ ${1:-} != --check || $seen == $header_version.* || $seen == $header_version-* ]] ||
    cannot --check "libibverbs-dev is ${seen:-of an unknown version}, not $header_version"

bindgen=bindgen
if [ "$(bindgen --version 2>/dev/null)" != "bindgen $bindgen_version" ]; then
    tools=$(realpath -m "${CARGO_TARGET_DIR:-target}/tools")
    bindgen=$tools/bin/bindgen
    [ -x "$bindgen" ] || CARGO_TARGET_DIR=$tools/build cargo install --quiet --locked --debug --root "$tools" \
        --version "$bindgen_version" bindgen-cli
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
{
    # The header's own notice, which its licence asks to be kept.
    echo '// Made by ci/ib-bindings.sh from infiniband/verbs.h, whose notice follows. Not edited by hand.'
    echo '//'
    sed -n '1,/\*\//p' "$header" | sed -e 's#^/\*##' -e 's#^ \*/##' -e 's#^ \*##' -e 's#^#//#' -e 's#[ ]*$##'
    echo
    "$bindgen" transport-ib/src/sys/verbs.h --allowlist-type '_?ibv_.*_fn' \
        --allowlist-type 'ibv_(access_flags|wc_flags|send_flags|qp_attr_mask|port_state|event_type|wc_status|gid_type|mtu)' \
        --allowlist-type 'ibv_(send_wr|sge|wc|gid_entry|context|cq|qp|qp_attr|qp_init_attr|port_attr|device_attr|global_route)' \
        --allowlist-var 'IBV_LINK_LAYER_.*' --default-enum-style newtype_global --no-prepend-enum-name --with-derive-default \
        --no-doc-comments --rust-target 1.82 --rust-edition 2021 --formatter none --disable-header-comment
} >"$work/raw.rs"
rustfmt --edition 2024 --config-path rustfmt.toml "$work/raw.rs"
if [ "${1:-}" = --check ]; then
    diff -u "$committed" "$work/raw.rs"
    echo 'the verbs bindings are as the header has them'
else
    cp "$work/raw.rs" "$committed"
fi
