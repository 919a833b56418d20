#!/usr/bin/env bash
# Makes transport-ib/src/sys/bindings.rs from the verbs header of this machine, or compares.
#
# usage: ci/ib-bindings.sh [--check]
#
# The committed file came from libibverbs-dev 44 and bindgen 0.72.1. A newer header may add fields or constants; a
# difference is looked at by hand. Without the header, bindgen or libclang --check prints a waiver.
set -euo pipefail
cd "$(dirname "$0")/.."
committed=transport-ib/src/sys/bindings.rs
header=/usr/include/infiniband/verbs.h

missing=''
[ -e "$header" ] || missing='infiniband/verbs.h (Debian: libibverbs-dev)'
command -v bindgen >/dev/null || missing='bindgen (cargo install bindgen-cli)'
if [ "$missing" ]; then
    [ "${1:-}" = --check ] || { echo "missing: $missing" >&2; exit 1; }
    echo "waived: comparison of the verbs bindings, no $missing"
    exit 0
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
{
    # The header's own notice, which its licence asks to be kept.
    echo '// Made by ci/ib-bindings.sh from infiniband/verbs.h, whose notice follows. Not edited by hand.'
    echo '//'
    sed -n '1,/\*\//p' "$header" | sed -e 's#^/\*##' -e 's#^ \*/##' -e 's#^ \*##' -e 's#^#//#' -e 's#[ ]*$##'
    echo
    bindgen transport-ib/src/sys/verbs.h --allowlist-type '_?ibv_.*_fn' \
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
