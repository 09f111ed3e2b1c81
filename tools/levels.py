"""`make test-levels`: the tests marked `levels`, once for each instruction level of this processor.

Switches of torch, oneDNN, MKL and the attention kernel hide higher levels. The last line names the
levels that ran, and the levels that this processor lacks, each with the machine that last ran it.
With `REQUIRE_ISA=amx,avx2`, a lack of these is a failure. `--record` writes the levels that pass,
and this machine, to `tools/levels.json`. Other arguments are pytest's.
"""

import json
import os
import platform
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path


@dataclass(frozen=True)
class Level:
    """Instructions that a processor has or lacks."""

    name: str
    flags: frozenset[str]
    """As Linux calls them in /proc/cpuinfo."""
    aten: str
    onednn: str
    kernel: str
    mkl: str

    def environment(self) -> dict[str, str]:
        """The switches that hide higher levels."""
        return {
            "ATEN_CPU_CAPABILITY": self.aten,
            "ONEDNN_MAX_CPU_ISA": self.onednn,
            "PYENGINE_CPU_ISA": self.kernel,
            "MKL_ENABLE_INSTRUCTIONS": self.mkl,
        }


_AVX2 = frozenset({"avx2", "fma"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
_VNNI = _AVX512 | {"avx512_vnni"}
_BF16 = _VNNI | {"avx512_bf16"}
_AMX = _BF16 | {"amx_tile", "amx_bf16", "amx_int8"}
LEVELS = (
    Level("plain", frozenset(), "default", "SSE41", "plain", "SSE4_2"),
    Level("neon", frozenset({"asimd"}), "default", "DEFAULT", "neon", ""),
    Level("avx2", _AVX2, "avx2", "AVX2", "avx2", "AVX2"),
    Level("avx512", _AVX512, "avx512", "AVX512_CORE", "avx512", "AVX512"),
    Level("avx512_vnni", _VNNI, "avx512", "AVX512_CORE_VNNI", "avx512", "AVX512"),
    Level("avx512_bf16", _BF16, "avx512", "AVX512_CORE_BF16", "avx512_bf16", "AVX512"),
    Level("amx", _AMX, "avx512", "DEFAULT", "amx", "AVX512"),
)

RECORD = Path(__file__).with_suffix(".json")
"""For each level, the machine and the date of the last recorded run that passed."""

FOLDERS = ["tests/unit/attention", "tests/unit/kv_cache", "tests/unit/models"]
"""Where the tests are: nothing else is imported."""


def _cpu_info(field: str) -> str:
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    found = re.search(rf"^(?:{field})\s*:(.*)$", text, re.MULTILINE)
    return found[1].strip() if found else ""


def cpu_flags() -> frozenset[str]:
    """The features of the processor according to Linux; nothing on other systems."""
    return frozenset(_cpu_info("flags|Features").split())


def record(passed: list[str]) -> None:
    """Record that these levels passed on this machine today."""
    machine = _cpu_info("model name") or platform.processor() or platform.machine()
    run = {"machine": machine, "date": f"{datetime.now(UTC):%Y-%m-%d}"}
    RECORD.write_text(json.dumps(_recorded() | dict.fromkeys(passed, run), indent=2) + "\n")


def _recorded() -> dict[str, dict[str, str]]:
    recorded: dict[str, dict[str, str]] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return recorded


def with_last_run(level: str) -> str:
    """The name of a level, with the machine and the date of the last recorded run."""
    run = _recorded().get(level)
    return f"{level} (last: {run['machine']}, {run['date']})" if run else f"{level} (no record)"


def required_levels(names: str) -> set[str]:
    """The levels of `REQUIRE_ISA`. Exits if one is unknown."""
    wanted = set(filter(None, names.split(",")))
    known = [level.name for level in LEVELS]
    if unknown := sorted(wanted.difference(known)):
        sys.exit(f"REQUIRE_ISA={names}: {unknown[0]} is none of {', '.join(known)}")
    return wanted


def run(level: Level, arguments: list[str]) -> bool:
    """True if the tests pass at a level. Prints pytest's output at the end."""
    # One thread, because other levels run on the other processors.
    environment = os.environ | level.environment() | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "levels", *arguments, *FOLDERS]
    start = time.monotonic()
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    verdict = "passed" if found.returncode == 0 else "FAILED"
    switches = " ".join(f"{name}={value}" for name, value in level.environment().items())
    took = f"{time.monotonic() - start:.0f} s"
    print(f"== {level.name}: {switches}\n{found.stdout}{found.stderr}", end="")
    print(f"== {level.name}: {verdict} in {took}", flush=True)
    return found.returncode == 0


def main(arguments: list[str]) -> int:
    """Run every available level; 0 if all pass and no required one is missing."""
    required, flags = required_levels(os.environ.get("REQUIRE_ISA", "")), cpu_flags()
    is_recorded = "--record" in arguments
    arguments = [argument for argument in arguments if argument != "--record"]
    here = [level for level in LEVELS if level.flags <= flags]
    lacking = [level.name for level in LEVELS if level not in here]
    with ThreadPoolExecutor(min(os.cpu_count() or 1, len(here))) as pool:
        verdicts = list(pool.map(lambda level: run(level, arguments), here))
    passed = [level.name for level, verdict in zip(here, verdicts, strict=True) if verdict]
    failed = [level.name for level, verdict in zip(here, verdicts, strict=True) if not verdict]
    missing = sorted(required.intersection(lacking))
    parts = [f"passed at {', '.join(passed) or 'none'}"]
    parts += [f"FAILED at {', '.join(failed)}"] if failed else []
    parts += [f"lacking here: {', '.join(map(with_last_run, lacking))}"] if lacking else []
    parts += [f"REQUIRED and lacking: {', '.join(missing)}"] if missing else []
    if is_recorded:
        record(passed)
    print(f"make test-levels: {'; '.join(parts)}")
    return 1 if failed or missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
