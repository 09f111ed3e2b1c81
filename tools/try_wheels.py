"""Try each wheel in dist/ in the best way that this machine offers, and print that way.

A wheel for this platform runs in every Python that is found, one for aarch64 in an emulated Debian,
and, with Debian's musl-tools, one for musl in a Python that is built for it. Other wheels run with
the command in `MUSL_PYTHON`, `WINDOWS_PYTHON` or `MACOS_PYTHON`; without it, the libraries that the
extension needs are inspected.
"""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from tools.wheels import OUT, PLATFORMS, ROOT

_AARCH64_ROOT = ROOT / "target" / "aarch64-root"
_MUSL_PYTHON = ROOT / "target" / "musl-python"
_NATIVE = {
    "linux-x86_64": ("Linux", "x86_64"),
    "linux-aarch64": ("Linux", "aarch64"),
    "macos-arm64": ("Darwin", "arm64"),
    "macos-x86_64": ("Darwin", "x86_64"),
    "windows-x86_64": ("Windows", "AMD64"),
}
_COMMANDS = {
    "macos-arm64": "MACOS_PYTHON",
    "macos-x86_64": "MACOS_PYTHON",
    "musl-x86_64": "MUSL_PYTHON",
    "windows-x86_64": "WINDOWS_PYTHON",
}


def try_one(name: str, wheel: Path) -> str:
    """Try the wheel of a platform; return how."""
    trial = [sys.executable, str(ROOT / "tools" / "try_wheel.py")]
    command = os.environ.get(_COMMANDS.get(name, ""))
    if _NATIVE.get(name) == (platform.system(), platform.machine()):
        subprocess.run([*trial, "--every", str(wheel)], check=True)
        return "used in every Python of this machine"
    if command:
        subprocess.run([*trial, "--python", command, str(wheel)], check=True)
        return f"used with `{command}`"
    if name == "linux-aarch64" and shutil.which("qemu-aarch64-static"):
        subprocess.run(
            [str(ROOT / "tools" / "get_aarch64_python.sh"), str(_AARCH64_ROOT)], check=True
        )
        command = f"qemu-aarch64-static -L {_AARCH64_ROOT} {_AARCH64_ROOT}/usr/bin/python3"
        subprocess.run([*trial, "--python", command, str(wheel)], check=True)
        return "used in an emulated Debian"
    if name == "musl-x86_64" and platform.machine() == "x86_64" and shutil.which("musl-gcc"):
        subprocess.run([str(ROOT / "tools" / "get_musl_python.sh"), str(_MUSL_PYTHON)], check=True)
        subprocess.run([*trial, "--python", str(_MUSL_PYTHON / "python"), str(wheel)], check=True)
        return "used in a Python that was built for musl"
    if name.startswith(("macos", "windows")):
        subprocess.run([sys.executable, "-m", "tools.inspect_wheel", str(wheel)], check=True)
        return "its libraries were looked at"
    return f"not tried: {_COMMANDS.get(name, 'an emulator')} is missing"


def main() -> None:
    """Try the wheels, and print a table."""
    rows = []
    for name, each in PLATFORMS.items():
        for wheel in OUT.glob(f"*{each.tag}.whl"):
            rows.append((wheel.name, wheel.stat().st_size / (1 << 20), try_one(name, wheel)))
    if not rows:
        raise SystemExit("dist/ has no wheels: make wheels")
    for file, size, how in rows:
        print(f"{file}  {size:.1f} MiB  {how}")


if __name__ == "__main__":
    main()
