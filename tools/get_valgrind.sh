#!/bin/sh
# As root, installs valgrind with the distribution's package manager; else says how.
for install in \
    "apt-get install -y -q --no-install-recommends valgrind libc6-dbg" \
    "dnf install -y -q valgrind" \
    "zypper --non-interactive --quiet install valgrind" \
    "pacman -S --noconfirm --needed valgrind" \
    "apk add --quiet valgrind"; do
    command -v "${install%% *}" > /dev/null && break
    install=
done
if [ -z "$install" ]; then
    echo "valgrind was not found, nor a known package manager: see https://valgrind.org"
    exit 1
fi
if [ "$(id -u)" != 0 ]; then
    echo "valgrind was not found: sudo $install"
    exit 1
fi
echo "valgrind was not found, installing it: $install"
# The lists of packages may be empty (a container) or old.
$install > /dev/null 2>&1 || { [ "${install%% *}" = apt-get ] && apt-get update -q > /dev/null && $install > /dev/null; }
command -v valgrind > /dev/null || { echo "that did not work"; exit 1; }
