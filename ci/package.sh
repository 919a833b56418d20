#!/usr/bin/env bash
# Each crate stands alone: it is packed, unpacked, and then built and tested outside of this workspace against the other
# unpacked ones, as a user of the published crates would have it. Leaves them in the folder that ci/outside.sh builds on.
set -euo pipefail
cd "$(dirname "$0")/.."
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
outside=$target/outside
fail() {
    echo "package: $*" >&2
    exit 1
}

# The crates that are to be published, in the order of their dependencies.
crates=(portway-fifo portway-proxy portway-transport-ib portway-transport-ipc portway-clique)
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)

rm -rf "$target"/package/*.crate
CARGO_TARGET_DIR=$target cargo package --quiet --workspace --exclude portway-bench --no-verify --allow-dirty 2>"$target/package.log" ||
    { cat "$target/package.log" >&2; fail "cargo package failed"; }

mkdir -p "$outside"
for crate in "${crates[@]}"; do
    file=$target/package/$crate-$version.crate
    [ -f "$file" ] || fail "$crate: no $file"
    # Unpacked anew, but files that have not changed keep their times, so that nothing is built twice.
    rm -rf "$outside/new" && mkdir -p "$outside/new"
    tar -xzf "$file" -C "$outside/new"
    mkdir -p "$outside/$crate/package"
    (cd "$outside/$crate/package" && find . -type f) | while read -r old; do
        [ -f "$outside/new/$crate-$version/$old" ] || rm "$outside/$crate/package/$old"
    done
    (cd "$outside/new/$crate-$version" && find . -type f) | while read -r new; do
        cmp -s "$outside/new/$crate-$version/$new" "$outside/$crate/package/$new" && continue
        mkdir -p "$outside/$crate/package/$(dirname "$new")"
        cp "$outside/new/$crate-$version/$new" "$outside/$crate/package/$new"
        touch "$outside/$crate/package/$new"
    done
done
rm -rf "$outside/new"

# Whoever builds below this folder takes our crates from it: cargo reads the file on its way up.
mkdir -p "$outside/.cargo"
{
    echo '[patch.crates-io]'
    for crate in "${crates[@]}"; do echo "$crate = { path = \"$outside/$crate/package\" }"; done
} >"$outside/.cargo/config.toml"

# dependencies FOLDER: the names of all that the crate there needs without features, its own first.
dependencies() { (cd "$1" && cargo tree --quiet --no-default-features --edges normal --prefix none | awk '{ print $1 }' | sort -u); }
# pinned EXPECTED: complains if the list that it reads is another one.
pinned() { diff <(tr ' ' '\n' <<<"$1") - ; }

cp rust-toolchain.toml "$outside/"
# Built beside the rest, with its profile, so that what comes from the registry is there already.
export CARGO_TARGET_DIR=$target
for crate in "${crates[@]}"; do
    # A workspace with one member, since this folder may lie inside ours.
    printf '[workspace]\nresolver = "3"\nmembers = ["package"]\n[profile.dev]\nopt-level = 1\n' >"$outside/$crate/Cargo.toml"
    cp Cargo.lock "$outside/$crate/" # the same versions of what comes from the registry
    for file in README.md CHANGELOG.md; do
        [ -s "$outside/$crate/package/$file" ] || fail "$crate: no $file in the package"
    done
    for key in description license rust-version readme; do
        grep -q "^$key = " "$outside/$crate/package/Cargo.toml" || fail "$crate: no $key in the packed manifest"
    done
    # Every feature says in the manifest, in the line above it, what it is for (of the packed one cargo drops comments).
    awk -v crate="$crate" '/^\[/ { on = ($0 == "[features]") } on && /^[a-z].* = / && !said { print crate ": feature without a word: " $0; bad = 1 }
        { said = /^#/ } END { exit bad }' "${crate#portway-}/Cargo.toml" || exit 1
    (
        cd "$outside/$crate/package"
        cargo check --quiet
        cargo test --quiet --doc --all-features >"$outside/log" 2>&1 ||
            { cat "$outside/log" >&2; fail "$crate: its documentation's examples fail outside of the workspace"; }
        cargo check --quiet --examples --all-features
    )
    echo "package: $crate: ok, $(grep -o '[0-9]* passed' "$outside/log" | awk '{ n += $1 } END { print n }') examples of its documentation"
done

# A user of the FIFO alone gets these and no others.
fifo="bytemuck bytemuck_derive portway-fifo proc-macro2 quote syn thiserror thiserror-impl unicode-ident"
dependencies "$outside/portway-fifo/package" | pinned "$fifo" || fail "portway-fifo: other dependencies than are pinned here"
if { dependencies "$outside/portway-fifo/package"; echo zlib; } | pinned "$fifo" >/dev/null; then
    fail "one dependency more is not noticed"
fi
echo "package: portway-fifo: ok, $(($(wc -w <<<"$fifo") - 1)) dependencies without features, with their own; one more is noticed"
