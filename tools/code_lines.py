"""Count the code lines of a Rust crate by file, with its validators separate.

    python tools/code_lines.py rust/kv-core/src

Code lines are neither blank nor a comment, and outside `#[cfg(test)]`. Validators are the
files named check.rs and those in a folder of that name.
"""

import re
import sys
from pathlib import Path


def code_lines(text: str) -> int:
    """The code lines of a file that rustfmt has formatted."""
    count, skipped_until, is_test = 0, "", False
    for line in text.splitlines():
        word = line.strip()
        if skipped_until:
            if line == skipped_until:
                skipped_until = ""
        elif re.match(r"#\[cfg\((test|doctest)\)\]", word):
            is_test = True
        elif is_test and not word.startswith(("#[", "//")):
            is_test = False
            if not word.endswith(";"):
                skipped_until = line[: len(line) - len(word)] + "}"
        elif word and not word.startswith("//") and not is_test:
            count += 1
    return count


def main(folder: str) -> None:
    """Print a line for each file, and the sums."""
    root, sums = Path(folder), {"code": 0, "validators": 0}
    for path in sorted(root.rglob("*.rs")):
        if path.stem == "tests":
            continue
        inside = path.relative_to(root)
        kind = "validators" if "check" in inside.with_suffix("").parts else "code"
        count = code_lines(path.read_text())
        sums[kind] += count
        print(f"{count:6,} {inside}")
    for kind, total in sums.items():
        print(f"{total:6,} {kind}")


if __name__ == "__main__":
    main(sys.argv[1])
