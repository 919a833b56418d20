#!/usr/bin/env bash
# The crates build with the minimum Rust version that Cargo.toml states. Takes the compiler from Debian's packages
# (rustc-web, cargo-web), unpacked into the build folder; installs nothing. Needs apt-get; says so where there is none.
set -euo pipefail
cd "$(dirname "$0")/.."
version=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
dir=$PWD/target/msrv
mkdir -p "$dir/packages"
if [ ! -x "$dir/root/usr/bin/cargo" ]; then
  command -v apt-get >/dev/null || { echo "msrv: waived: no apt-get to take Rust $version from"; exit 0; }
  apt-get update -qq || true # an old list, or another run of apt, may do
  (
    cd "$dir/packages"
    for package in rustc-web cargo-web libstd-rust-web-dev "libstd-rust-web-$version"; do
      full=$(apt-cache madison "$package" | awk -v want="$version." '{ if (index($3, want) == 1) { print $3; exit } }')
      [ -n "$full" ] || { echo "msrv: waived: no $package $version in this system's packages"; exit 3; }
      apt-get download -q -o APT::Sandbox::User=root "$package=$full" >/dev/null
    done
    while read -r dependency; do apt-get download -q -o APT::Sandbox::User=root "$dependency" >/dev/null; done < <(
      for deb in *.deb; do dpkg-deb -f "$deb" Depends; done | tr ',' '\n' |
        sed 's/ *(.*//; s/|.*//; s/ //g' | grep -E '^lib' | grep -v -E '^(libc6|libc-dev|libc6-dev|libgcc-s1|libstdc\+\+6|libstd-rust-web)' | sort -u)
  ) || { status=$?; [ $status = 3 ] && exit 0; exit $status; }
  for deb in "$dir"/packages/*.deb; do dpkg-deb -x "$deb" "$dir/root"; done
fi
export PATH=$dir/root/usr/bin:$PATH LD_LIBRARY_PATH=$dir/root/usr/lib/x86_64-linux-gnu:$dir/root/lib/x86_64-linux-gnu:$dir/root/usr/lib
export RUSTC=$dir/root/usr/bin/rustc
"$RUSTC" --version
"$dir/root/usr/bin/cargo" check --quiet --workspace --all-features --target-dir "$dir/target"
echo "msrv: ok, Rust $version"
