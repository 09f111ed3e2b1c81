"""Run a cargo command for the crates that run on every platform, without Python and Linux.

    python tools/portable.py test --release
    python tools/portable.py +1.89 test                             # with another toolchain
    python tools/portable.py zigbuild-test x86_64-pc-windows-gnu    # another platform's tests

The last form builds with zig; a runner in the environment of cargo starts the tests.
"""

import os
import subprocess
import sys

CRATES = ("kv-core", "kv-trace", "kv-store", "kv-router", "suffix-index", "kv-conformance")
FEW = {"KV_OPS": "5000", "PROPTEST_CASES": "6"}
"""Fewer random operations for another platform's tests, as an emulator is slow."""


def main(arguments: list[str]) -> int:
    """Run the command; return cargo's exit status."""
    toolchain = [arguments.pop(0)] if arguments[0].startswith("+") else []
    command, *options = arguments
    packages = [option for crate in CRATES for option in ("-p", crate)]
    if command != "zigbuild-test":
        words = ["cargo", *toolchain, command, *packages, *options]
        return subprocess.run(words, check=False).returncode
    target, *options = options
    subprocess.run(["rustup", "target", "add", target], check=True)
    words = ["cargo-zigbuild", "test", "--target", target, *packages, *options]
    return subprocess.run(words, check=False, env=FEW | os.environ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
