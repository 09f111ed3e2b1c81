"""The arguments of a part: the device, and the files that figures go to."""

import json
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from benches.gpu.bench import Bench
from benches.gpu.first_run.results import append, is_wrong, read
from benches.gpu.target import NotHere, Target


@dataclass(frozen=True)
class Context(Target):
    """A part of a run. `folder` is its own; `out` is that of the run."""

    part: str
    out: Path
    wrong: list[str] = field(default_factory=list)
    """Pieces that failed."""

    def record(self, **figures: Any) -> None:
        """Write figures to results.jsonl and the log.

        `failed`, `ok=False` and a non-empty `wrong` make the part's status 1.
        """
        if is_wrong(figures):
            self.wrong.append(str(figures.get("piece", "")))
        line = json.dumps({"part": self.part, **figures}, default=str)
        print(line, flush=True)
        append(self.out / "results.jsonl", line)

    def attempt(self, piece: str, call: Callable[..., Any], *args: Any) -> None:
        """Run a piece of the part. An error is recorded, and the next piece runs."""
        begin = monotonic()
        try:
            call(*args)
        except NotHere as why:
            self.record(piece=piece, skipped=str(why))
        except Exception as error:
            traceback.print_exc()
            said = f"{type(error).__name__}: {error}"[:400]
            self.record(piece=piece, failed=said, seconds=round(monotonic() - begin, 1))

    def bench(self, shape_name: str) -> Bench:
        """Engines in the shape of a model."""
        return Bench(self.device, self.folder, shape_name)

    def rates(self) -> tuple[float, float]:
        """Bytes per second of a copy and operations per second of a matrix product.

        Those that this run has measured; a guess before.
        """
        for line in reversed(read(self.out / "results.jsonl")):
            if "bytes_per_second" in line:
                return line["bytes_per_second"], line["flops_per_second"]
        return 3e12, 8e14
