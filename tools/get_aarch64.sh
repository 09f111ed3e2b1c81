#!/bin/sh
# As root on Debian or Ubuntu, installs an emulator and a linker for aarch64; else says what is needed.
packages="qemu-user-static gcc-aarch64-linux-gnu libc6-dev-arm64-cross"
install="apt-get install -y -q --no-install-recommends $packages"
if ! command -v apt-get > /dev/null; then
    echo "qemu-aarch64-static or aarch64-linux-gnu-gcc was not found: install what Debian calls $packages"
    exit 1
fi
if [ "$(id -u)" != 0 ]; then
    echo "qemu-aarch64-static or aarch64-linux-gnu-gcc was not found: sudo $install"
    exit 1
fi
echo "an emulator and a linker for aarch64 were not found, installing them: $install"
# The lists of packages may be empty (a container) or old.
$install > /dev/null 2>&1 || { apt-get update -q > /dev/null && $install > /dev/null; }
command -v qemu-aarch64-static > /dev/null && command -v aarch64-linux-gnu-gcc > /dev/null ||
    { echo "that did not work"; exit 1; }
