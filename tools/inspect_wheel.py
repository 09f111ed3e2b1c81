"""Print the libraries that the extension in a wheel for macOS or Windows needs, without running it.

    python -m tools.inspect_wheel dist/pyengine_kv-*-win_amd64.whl

Fails if it needs a library that is not part of every such system, or one version of Python.
"""

import io
import re
import sys
import tempfile
import zipfile
from pathlib import Path

import pefile
from macholib.mach_o import LC_BUILD_VERSION, LC_LOAD_DYLIB, LC_VERSION_MIN_MACOSX
from macholib.MachO import MachO

# Windows 10 has these; python3.dll is the stable ABI.
_WINDOWS = re.compile(
    r"python3\.dll|(kernel32|ntdll|advapi32|bcrypt(primitives)?|ws2_32|userenv|ucrtbase|msvcrt"
    r"|dbghelp|user32|api-ms-win-[a-z0-9-]+)\.dll"
)
_MACOS = re.compile(r"/usr/lib/lib(System\.B|charset\.1|iconv\.2|c\+\+\.1)\.dylib")
_X86_64, _ARM64 = 0x01000007, 0x0100000C


def of_windows(extension: bytes) -> tuple[str, list[str]]:
    """The processor and the linked libraries."""
    image = pefile.PE(data=extension)
    if image.FILE_HEADER.Machine != pefile.MACHINE_TYPE["IMAGE_FILE_MACHINE_AMD64"]:
        raise SystemExit("it is not for x86-64")
    exported = [symbol.name for symbol in image.DIRECTORY_ENTRY_EXPORT.symbols]
    if missing := {b"PyInit__cpu", b"PyInit__kv"} - set(exported):
        raise SystemExit(f"it does not export {missing}: {exported}")
    names = {entry.dll.decode().lower() for entry in image.DIRECTORY_ENTRY_IMPORT}
    return "Windows x86-64", sorted(names)


def of_macos(extension: bytes) -> tuple[str, list[str]]:
    """The processor, the oldest system, and the linked libraries."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(extension)
        file.flush()
        (header,) = MachO(file.name).headers
    processor = {_X86_64: "x86_64", _ARM64: "arm64"}[header.header.cputype]
    oldest, names = "unknown", []
    for load, command, text in header.commands:
        if load.cmd == LC_LOAD_DYLIB:
            names.append(text.rstrip(b"\0").decode())
        if load.cmd in {LC_BUILD_VERSION, LC_VERSION_MIN_MACOSX}:
            version = command.minos if load.cmd == LC_BUILD_VERSION else command.version
            oldest = f"{version >> 16}.{version >> 8 & 0xFF}"
    return f"macOS {processor}, from {oldest}", sorted(names)


def main(wheel: Path) -> None:
    """Print the linked libraries; refuse those that not every system has."""
    archive = zipfile.ZipFile(io.BytesIO(wheel.read_bytes()))
    if "-win_" in wheel.name:
        (system, names), usual = of_windows(archive.read("pyengine/_kv.pyd")), _WINDOWS
    elif "-macosx_" in wheel.name:
        (system, names), usual = of_macos(archive.read("pyengine/_kv.abi3.so")), _MACOS
    else:
        raise SystemExit(f"{wheel.name}: run it with tools/try_wheel.py instead")
    print(f"{wheel.name}: {system}, linked with {', '.join(names) or 'nothing'}", flush=True)
    strange = [name for name in names if not usual.fullmatch(name)]
    if strange:
        raise SystemExit(f"not every system has {', '.join(strange)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
