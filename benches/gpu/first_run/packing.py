"""Packages that a run installs, and its results: at most eight files below 16 MiB."""

import io
import shutil
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

MAX_LOG, MAX_FILE = 1 << 20, 15 << 20
"""Bytes: of a log's end, and of an archive."""


def install(kit: Path, site: Path) -> list[str]:
    """Unpack the kit's wheels and flashinfer's prebuilt modules into `site`; return their names.

    The wheels have no scripts and no data outside their packages, so no installer is needed.
    """
    wheels = sorted((kit / "wheels").glob("*.whl"))
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as file:
            file.extractall(site)
    modules = sorted((kit / "prebuilt").glob("*/*.so"))
    if (site / "flashinfer").is_dir():
        for module in modules:
            target = site / "flashinfer" / "data" / "aot" / module.parent.name
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy(module, target)
    return [path.stem for path in (*wheels, *modules)]


def keep_logs(logs: Path, out: Path) -> None:
    """Write the ends of all logs to logs.tar.gz."""
    target = out / "logs.tar.gz"
    new = target.with_suffix(".new")
    with tarfile.open(new, "w:gz") as archive:
        for log in sorted(logs.glob("*")):
            data = log.read_bytes()[-MAX_LOG:]
            info = tarfile.TarInfo(log.name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    new.replace(target)


def keep_built(cache: Path, out: Path) -> None:
    """Write flashinfer's modules that were compiled here to built.tar.gz, for the next kit.

    They are named as in the kit's `prebuilt` folder. The largest are left out if the archive
    would be too large.
    """
    libraries = sorted(_built(cache), key=lambda path: path.stat().st_size)
    target = out / "built.tar.gz"
    while libraries:
        with tarfile.open(target, "w:gz") as archive:
            for library in libraries:
                archive.add(library, f"{library.parent.name}/{library.name}")
        if target.stat().st_size < MAX_FILE:
            return
        libraries.pop()
    target.unlink(missing_ok=True)


def _built(cache: Path) -> Iterator[Path]:
    for library in cache.rglob("*.so"):
        if library.parent.name == library.stem and "cached_ops" in library.parts:
            yield library


def keep_checks(logs: Path, out: Path) -> None:
    """Write a line for each of the project's checks to checks.md."""
    lines = ["# Checks"]
    for report in sorted(logs.parent.glob("*/checks.md")):
        lines += ["", f"## {report.parent.name}", ""]
        lines += [
            line[:300]
            for line in report.read_text(encoding="utf-8").splitlines()
            if line.startswith("- ")
        ]
    (out / "checks.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
