"""The first run on a GPU: is it right, and how fast is it? In nine minutes, without a network.

    python3 -m benches.gpu.first_run --device cuda --out FOLDER [--only NAME,...]

from the root of a checkout that holds the built extension and, in target/gpu-first-run, what
`make gpu-first-run-kit` made. FOLDER/summary.md has a line for each part as soon as it is over,
results.jsonl every figure at once. No part stops another. SIGTERM ends the run; what it has found
is kept. With `--device cpu` everything is tiny, to show that it runs.
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

from benches.gpu.first_run.driver import ROOT, Driver
from benches.gpu.first_run.packing import install, keep_built, keep_checks, keep_logs
from benches.gpu.first_run.parts import PARTS, Part
from benches.gpu.first_run.results import append, page, read

KIT = ROOT / "target" / "gpu-first-run"
CACHE = ROOT / "target" / "gpu-first-run-cache"
"""Installed packages and compiled code; a second run finds them."""
ON_CUDA, ON_CPU = {"minutes": 9, "jobs": 6, "slow": 1}, {"minutes": 30, "jobs": 2, "slow": 4}
CUT_OFF = 128 + signal.SIGTERM
"""The status after SIGTERM."""
_FILES = ("results.jsonl", "summary.md", "found.md", "checks.md", "logs.tar.gz", "built.tar.gz")


class CutOff(BaseException):
    """SIGTERM."""


def _cut_off(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise CutOff


def environment(cache: Path) -> dict[str, str]:
    """The environment of parts: installed packages, caches of compiled code, no network."""
    path = [str(cache / "site"), os.environ.get("PYTHONPATH", "")]
    defaults = {
        "FLASHINFER_WORKSPACE_BASE": str(cache / "flashinfer"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking for devices must not initialise CUDA
        "TOKENIZERS_PARALLELISM": "false",
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
    }
    return {**defaults, **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def selected(options: argparse.Namespace) -> list[Part]:
    """The parts of `--only`, or all; those that run on the device."""
    names = options.only.split(",") if options.only else [part.name for part in PARTS]
    parts = [part for part in PARTS if part.name in names]
    return [part for part in parts if options.device != "cpu" or part.tiny is not None]


def write_pages(driver: Driver) -> None:
    """Write what is known so far; the summary is there already."""
    out = driver.out
    lines = page(read(out / "results.jsonl"), driver.device)
    (out / "found.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    keep_checks(driver.logs, out)
    keep_logs(driver.logs, out)


def run(options: argparse.Namespace, scratch: Path) -> int:
    """Run parts; 0 if all are right."""
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for name in _FILES:
        (out / name).unlink(missing_ok=True)
    begin = datetime.now(UTC).isoformat(timespec="seconds")
    append(out / "summary.md", f"# First run, {begin}, {options.device}\n")
    driver = Driver(
        options.device,
        out,
        scratch,
        environment(options.cache),
        options.minutes,
        options.jobs,
        options.slow,
    )
    status, how = CUT_OFF, "cut off"
    try:
        installed = install(options.kit, options.cache / "site")
        driver.note(f"installed  {', '.join(installed) or 'nothing: there is no kit'}")
        driver.run(selected(options), lambda: write_pages(driver))
        status, how = int(bool(driver.failed)), "through"
    except (CutOff, KeyboardInterrupt):
        pass
    finally:
        failed = f"; failed: {', '.join(driver.failed)}" if driver.failed else ""
        driver.note(f"end, {how}{failed}")
        write_pages(driver)
        keep_built(options.cache / "flashinfer", out)
    return status


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line; 1 if a part failed, 143 after SIGTERM."""
    names = ", ".join(part.name for part in PARTS)
    parser = argparse.ArgumentParser(
        prog="python3 -m benches.gpu.first_run", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, or cpu (default: cuda)")
    parser.add_argument("--out", type=Path, default=Path("target/gpu"), help="folder for results")
    parser.add_argument("--only", default="", metavar="NAME,...", help=f"parts, of {names}")
    parser.add_argument("--minutes", type=float, help="limit of the run (9; on a CPU 30)")
    parser.add_argument("--jobs", type=int, help="parts side by side (6; on a CPU 2)")
    parser.add_argument("--slow", type=float, help="a factor for the limits of parts (1; 4)")
    parser.add_argument("--kit", type=Path, default=KIT, help="folder of the kit")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder for compiled code")
    options = parser.parse_args(arguments)
    limits = ON_CPU if options.device == "cpu" else ON_CUDA
    for name, value in limits.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.cache = options.cache.resolve()
    unknown = set(filter(None, options.only.split(","))) - {part.name for part in PARTS}
    if unknown:
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {names}")
    signal.signal(signal.SIGTERM, _cut_off)
    scratch = Path(tempfile.mkdtemp(prefix="gpu-first-run-"))
    try:
        return run(options, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
