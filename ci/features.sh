#!/usr/bin/env bash
# Every set of features of every crate builds: they only add, so each must do without the others.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo metadata --no-deps --format-version 1 | python3 -c '
import itertools, json, sys
for package in json.load(sys.stdin)["packages"]:
    names = sorted(name for name in package["features"] if name != "default")
    for size in range(len(names) + 1):
        for chosen in itertools.combinations(names, size):
            print(package["name"], ",".join(chosen) or "-")
' | while read -r package features; do
  [ "$features" = - ] && features=
  cargo check --quiet --package "$package" --no-default-features --features "$features"
  echo "features: $package [$features] ok"
done
