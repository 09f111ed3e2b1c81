"""Build wheels for every platform on this machine, with zig as the linker, and check them.

    python -m tools.wheels                       # all of PLATFORMS
    python -m tools.wheels linux-x86_64 windows-x86_64

Needs the extra `wheels`, and rustup for the standard library of each target. Refuses a wheel that
uses more than Python's stable C API, has other contents than `try_wheel.py` expects, or is larger
than `MOST_BYTES`.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tools.try_wheel import check_contents

ROOT = Path(__file__).parents[1]
OUT = ROOT / "dist"
MOST_BYTES = 12 << 20


@dataclass(frozen=True)
class Platform:
    """A platform that has a wheel."""

    target: str
    """As rustc calls it."""
    tag: str
    """The end of the wheel's name."""
    options: tuple[str, ...] = ()
    """Options of maturin."""
    wrapper: str | None = None
    """The program that calls rustc."""


PLATFORMS = {
    "linux-x86_64": Platform(
        "x86_64-unknown-linux-gnu", "manylinux_2_17_x86_64", ("--compatibility", "manylinux_2_17")
    ),
    "linux-aarch64": Platform(
        "aarch64-unknown-linux-gnu",
        "manylinux_2_17_aarch64",
        ("--compatibility", "manylinux_2_17"),
    ),
    "musl-x86_64": Platform(
        "x86_64-unknown-linux-musl", "musllinux_1_2_x86_64", ("--compatibility", "musllinux_1_2")
    ),
    "macos-arm64": Platform("aarch64-apple-darwin", "macosx_11_0_arm64"),
    "macos-x86_64": Platform("x86_64-apple-darwin", "macosx_10_12_x86_64"),
    "windows-x86_64": Platform(
        "x86_64-pc-windows-gnu", "win_amd64", wrapper="tools/rustc_without_def.sh"
    ),
}


def rust_flags() -> str:
    """Flags that keep this machine's folders out of the extension."""
    cargo = os.environ.get("CARGO_HOME", str(Path.home() / ".cargo"))
    folders = {cargo: "cargo", str(ROOT): "pyengine"}
    return "\x1f".join(f"--remap-path-prefix={path}={name}" for path, name in folders.items())


def build(platform: Platform) -> Path:
    """Build one wheel; return its path."""
    installed = subprocess.run(
        ["rustup", "target", "list", "--installed"], check=True, capture_output=True, text=True
    ).stdout.split()
    if platform.target not in installed:
        subprocess.run(["rustup", "target", "add", platform.target], check=True)
    for old in OUT.glob(f"*{platform.tag}.whl"):
        old.unlink()
    environment = os.environ | {"CARGO_ENCODED_RUSTFLAGS": rust_flags()}
    # maturin runs `python3 -m ziglang`, so this environment comes first.
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    if platform.wrapper is not None:
        environment["RUSTC_WRAPPER"] = str(ROOT / platform.wrapper)
    maturin = [sys.executable, "-m", "maturin", "build", "--release", "--locked", "--zig"]
    subprocess.run(
        [*maturin, "--target", platform.target, *platform.options, "--out", str(OUT)],
        check=True,
        cwd=ROOT,
        env=environment,
    )
    (wheel,) = OUT.glob(f"*{platform.tag}.whl")
    return wheel


def check(wheel: Path) -> None:
    """Refuse a wheel that is too large, has other contents, or is not an abi3 wheel."""
    check_contents(wheel)
    if wheel.stat().st_size > MOST_BYTES:
        raise SystemExit(f"{wheel.name} is larger than {MOST_BYTES >> 20} MiB")
    scripts = Path(sys.executable).parent
    for command in (["abi3audit", "--strict", "--summary"], ["check-wheel-contents"]):
        subprocess.run([scripts / command[0], *command[1:], str(wheel)], check=True)


def main(names: list[str]) -> None:
    """Build and check the wheels of these platforms, all by default."""
    unknown = sorted(set(names) - set(PLATFORMS))
    if unknown:
        raise SystemExit(f"unknown: {', '.join(unknown)}; there are {', '.join(PLATFORMS)}")
    if shutil.which("rustup") is None:
        raise SystemExit("rustup was not found: other targets need it, see https://rustup.rs")
    for name in names or PLATFORMS:
        check(build(PLATFORMS[name]))


if __name__ == "__main__":
    main(sys.argv[1:])
