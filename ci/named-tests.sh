#!/usr/bin/env bash
# Every test and file that TROUBLESHOOTING.md and SECURITY.md name is there.
set -euo pipefail
cd "$(dirname "$0")/.."
# missing FILE...: names in these texts that nothing here has.
missing() {
    grep -ohE '`[a-z][a-z0-9_/-]*/[a-z0-9_./-]+\.(rs|sh)(::[a-z0-9_]+)?`' "$@" | tr -d '`' | sort -u | while read -r name; do
        file=${name%%::*} test=${name##*::}
        if [ ! -f "$file" ]; then echo "$name: no such file"
        elif [ "$file" != "$name" ] && ! grep -qE "\bfn $test\(" "$file"; then echo "$name: no such test"; fi
    done
}
[ -z "$(missing TROUBLESHOOTING.md SECURITY.md)" ] || { missing TROUBLESHOOTING.md SECURITY.md >&2; exit 1; }
# shellcheck disable=SC2016 # backquotes of Markdown
[ "$(printf '`fifo/tests/ends.rs::nothing` `fifo/none.rs`' | missing - | wc -l)" = 2 ] || { echo "named-tests: misses are not noticed" >&2; exit 1; }
echo "named-tests: ok, $(grep -ohE '::[a-z0-9_]+`' TROUBLESHOOTING.md SECURITY.md | sort -u | wc -l) tests are there; misses are noticed"
