#!/usr/bin/env bash
# The sources are formatted as rustfmt.toml says, and no line of prose is longer than 120 characters.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo fmt --all --check
# prose FILE...: the lines that are neither of a table nor of code, and where they stand.
prose() { awk 'FNR == 1 { code = 0 } /^ *```/ { code = !code } !code && !/^ *[|]/ { print FILENAME ":" FNR ": " $0 }' "$@"; }
long() { prose "$@" | LC_ALL=C.UTF-8 grep -E '^[^:]+:[0-9]+: .{121,}$' || true; }
mapfile -t pages < <(git ls-files '*.md')
[ -z "$(long "${pages[@]}")" ] || { long "${pages[@]}" >&2; exit 1; }
[ "$(printf '%0121d\n```\n%0121d\n```\n' 0 0 | long /dev/stdin | wc -l)" = 1 ] || { echo "format: a long line is not noticed" >&2; exit 1; }
echo "format: ok; a long line of prose is noticed"
