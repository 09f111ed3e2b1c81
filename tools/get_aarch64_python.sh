#!/bin/sh
# Unpacks Debian's Python for aarch64 into the folder $1, for an emulator. Needs Debian or Ubuntu, but not root:
# nothing is installed.
set -eu
root=$1
test -e "$root/usr/bin/python3" && exit 0
command -v apt-get > /dev/null || { echo "apt-get was not found: Debian's packages for arm64 come with it"; exit 1; }
state=$(mktemp -d)
trap 'rm -rf "$state"' EXIT
mkdir -p "$state/lists/partial" "$state/cache/archives/partial" "$root"
: > "$state/status"
apt() {
    apt-get -q -o Dir::State="$state" -o Dir::State::lists="$state/lists" -o Dir::State::status="$state/status" \
        -o Dir::Cache="$state/cache" -o APT::Architecture=arm64 -o APT::Architectures=arm64 \
        -o Debug::NoLocking=1 -o APT::Install-Recommends=false "$@" > "$state/log" 2>&1 ||
        { cat "$state/log"; exit 1; }
}
apt update
apt install -y --download-only python3 libgomp1
for package in "$state"/cache/archives/*.deb; do
    dpkg-deb -x "$package" "$root"
done
