"""Counts the instructions of the block manager's hot operations, and holds them to what they were.

    make guard             compares with benches/results/instructions.json
    make guard-update      writes it

callgrind counts instructions, not time, so a count is the same on a busy machine. Three things make
it the same on another one too: hashes have a fixed seed, the C library uses its plain
copying routines, whatever the processor has, and the program sees one fixed name and one
environment wherever it is: both stand above its stack, and shift it. Needs valgrind and cargo.
"""

import json
import os
import platform
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import which

ROOT = Path(__file__).resolve().parents[1]
LIMITS = ROOT / "benches" / "results" / "instructions.json"
# Five runs of one build were equal to the instruction, builds in two folders 0.13 % apart. Of a
# stack that begins elsewhere, forks were 1.04 % apart.
TOLERANCE = 0.02
# rustc 1.88, 1.95 and 1.97 were up to 5 % apart.
OTHER_TOOLCHAIN = 0.10
# Which routines glibc takes would depend on the processor; of `rep movsb` every byte is counted.
PLAIN = (
    "glibc.cpu.hwcaps=-AVX512F,-AVX512VL,-AVX2,-AVX_Fast_Unaligned_Load,-SSSE3,-SSE4_1,-SSE4_2"
    ",-ERMS,-FSRM"
)
MOST_AT_ONCE = 4

Counts = dict[str, int]


class Failed(Exception):
    """Nothing could be counted; the message says why."""


def output(*command: str | Path, env: dict[str, str] | None = None, cwd: Path = ROOT) -> str:
    """The output of a command. Its errors go to our stderr, if it has our environment."""
    try:
        done = subprocess.run(
            command, env=env, text=True, cwd=cwd, check=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE if env else None,
        )  # fmt: skip
    except FileNotFoundError:
        raise Failed(f"{command[0]} was not found") from None
    except subprocess.CalledProcessError as error:
        raise Failed(f"{' '.join(map(str, command))}: failed\n{error.stderr or ''}") from None
    return done.stdout


def build() -> Path:
    """The binary that runs one operation."""
    command = ("cargo", "build", "--release", "-p", "kv-bench", "--bin", "instructions")
    messages = output(*command, "--message-format=json-render-diagnostics").splitlines()
    built = [message.get("executable") for message in map(json.loads, messages)]
    return Path(next(path for path in reversed(built) if path))


def count(binary: Path, operation: str) -> int:
    """Instructions of one round."""
    profile = binary.parents[1] / "callgrind" / f"{operation}.out"
    profile.parent.mkdir(exist_ok=True)
    rounds = output(
        which("valgrind") or "valgrind", "--tool=callgrind", f"--callgrind-out-file={profile}",
        "--toggle-collect=instructions::counted*", f"./{binary.name}", operation,
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", "GLIBC_TUNABLES": PLAIN}, cwd=binary.parent,
    )  # fmt: skip
    total = re.search(r"^totals: (\d+)", profile.read_text(), re.MULTILINE)
    if total is None or total[1] == "0":
        raise Failed(f"callgrind saw nothing of {operation}: {profile}")
    return round(int(total[1]) / int(rounds))


def toolchain() -> dict[str, str]:
    """The versions and settings that counts depend on, beside our code."""
    return {
        "machine": platform.machine(),
        "rustc": output("rustc", "--version").split()[1],
        "libc": " ".join(platform.libc_ver()),
    }


def compare(counts: Counts, recorded: Counts, tolerance: float) -> list[str]:
    """Prints a line for each operation and returns those that are not as they should be."""
    wrong = [f"{name}: recorded, but not an operation" for name in recorded.keys() - counts.keys()]
    print(f"{'instructions':>41} {'recorded':>10} {'limit':>10}")
    for name, counted in counts.items():
        before = recorded.get(name)
        if before is None:
            wrong.append(f"{name}: {counted:,} instructions, and no limit yet")
            continue
        limit, change = int(before * (1 + tolerance)), counted / before - 1
        note = "  `make guard-update` keeps the gain" if change < -tolerance else ""
        if counted > limit:
            note = "  TOO MANY"
            wrong.append(f"{name}: {counted:,} instructions, its limit is {limit:,}")
        print(f"{name:28} {counted:12,} {before:10,} {limit:10,} {change:+7.1%}{note}")
    return wrong


def main(update: bool) -> int:
    """The exit status."""
    binary = build()
    names = output(binary).split()
    with ThreadPoolExecutor(min(MOST_AT_ONCE, os.cpu_count() or 1)) as pool:
        counts = dict(zip(names, pool.map(lambda name: count(binary, name), names), strict=True))
    here = toolchain()
    if update:
        LIMITS.parent.mkdir(exist_ok=True)
        text = json.dumps({"toolchain": here, "instructions": counts}, indent=2)
        LIMITS.write_text(text + "\n")
        print(f"{LIMITS.relative_to(ROOT)}: written, say in the commit why the counts moved")
        return 0
    recorded = json.loads(LIMITS.read_text())
    there, tolerance = recorded["toolchain"], TOLERANCE
    if here["machine"] != there["machine"]:
        print(f"make guard: SKIPPED, counts are of {there['machine']}, this is {here['machine']}")
        return 0
    if here != there:
        tolerance = OTHER_TOOLCHAIN
        print(f"recorded with {there}, this is {here}: {tolerance:.0%} are allowed")
    wrong = compare(counts, recorded["instructions"], tolerance)
    if not wrong:
        print(f"make guard: {len(counts)} operations passed")
        return 0
    print("\nmake guard: the block manager does more work than it did.", *wrong, sep="\n  ")
    print(
        f"Where: callgrind_annotate {binary.parents[1]}/callgrind/OPERATION.out\n"
        "Meant to be so, or another compiler: make guard-update, and commit what it writes.",
    )
    return 1


if __name__ == "__main__":
    try:
        sys.exit(main("--update" in sys.argv[1:]))
    except Failed as error:
        sys.exit(f"make guard: {error}")
