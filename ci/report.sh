#!/usr/bin/env bash
# Makes results, makes the page of one and of two of them, and loads both in a browser without a window, in light and in dark:
# nothing on the console, nothing asked of the network, and as many points in each plot as the results have rows. A page with
# an error and a request on it is the control. The pages and pictures of them stay in target/page.
#
# As root of a Debian machine it installs the browser.
set -euo pipefail
cd "$(dirname "$0")/.."

has_browser() {
    command -v chromium-headless-shell || command -v chromium || command -v chromium-browser || command -v google-chrome
}
if ! has_browser >/dev/null && [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium-headless-shell fonts-dejavu-core; } >/dev/null ||
        echo "the browser could not be installed" >&2
fi
if ! has_browser >/dev/null; then
    echo "waived: a page of results in a browser: there is no Chromium"
    exit 0
fi
folder=$PWD/target/page
mkdir -p "$folder"
PORTWAY_REQUIRE_BROWSER=1 PORTWAY_PAGE_FOLDER=$folder cargo test --quiet --package portway-bench --test page
ls "$folder"/page-*.png
