#!/usr/bin/env bash
# Every test and file that TROUBLESHOOTING.md and SECURITY.md name is there, and every symptom names one.
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
# unseen FILE: rows of its tables, but for their heads, that name nothing in the last column.
unseen() { awk -F'|' '/^\|---/ { body = 1; next } !/^\|/ { body = 0 } body && $(NF - 1) !~ /`[a-z]/ { print "no test: " $0 }' "$1"; }
[ -z "$(missing TROUBLESHOOTING.md SECURITY.md)" ] || { missing TROUBLESHOOTING.md SECURITY.md >&2; exit 1; }
[ -z "$(unseen TROUBLESHOOTING.md)" ] || { unseen TROUBLESHOOTING.md >&2; exit 1; }
[ "$(printf '| a | b |\n|---|---|\n| x | y |\n' | unseen /dev/stdin | wc -l)" = 1 ] || { echo "named-tests: a row without a test is not noticed" >&2; exit 1; }
# shellcheck disable=SC2016 # backquotes of Markdown
[ "$(printf '`fifo/tests/ends.rs::nothing` `fifo/none.rs`' | missing - | wc -l)" = 2 ] || { echo "named-tests: misses are not noticed" >&2; exit 1; }
echo "named-tests: ok, $(grep -ohE '::[a-z0-9_]+`' TROUBLESHOOTING.md SECURITY.md | sort -u | wc -l) tests are there; misses are noticed"
