"""The process of a section: runs its parts and writes down what comes of each at once.

    python -m benches.gpu_check.child < job.json

The job names a module with a function `parts(setup)`. Every line that is written is an object with
one key: `parts` (their names), `begin`, `row`, `error`, `end`. What was written is kept if the
process dies. A part whose failure leaves the device unusable ends the process with `DEAD_DEVICE`,
so that the next part gets a fresh one.
"""

import gc
import importlib
import json
import os
import sys
import traceback
from dataclasses import asdict
from threading import Thread
from time import sleep
from typing import Any, TextIO

from benches.gpu_check.rows import Setup

DEAD_DEVICE = 75
LAST_LINES = 12
_WATCH_SECONDS = 0.5


class Lines:
    """Messages, one per line, each written before the next thing happens."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def say(self, key: str, value: Any) -> None:
        """Write one message."""
        self._file.write(json.dumps({key: value}, default=str) + "\n")
        self._file.flush()


def run(job: dict[str, Any], lines: Lines) -> None:
    """Run the parts of a section that are not done."""
    setup = Setup(**job["setup"])
    parts = importlib.import_module(job["module"]).parts(setup)
    lines.say("parts", [name for name, _ in parts])
    for name, rows in parts:
        if name in job["done"]:
            continue
        lines.say("begin", name)
        try:
            for row in rows():
                lines.say("row", asdict(row))
        except Exception as error:
            text = "".join(traceback.format_exception(error)).strip().splitlines()
            lines.say("error", "\n".join(text[-LAST_LINES:]))
            traceback.print_exc()
            del error
        lines.say("end", name)
        if not _device_lives(setup):
            os._exit(DEAD_DEVICE)


def _device_lives(setup: Setup) -> bool:
    """Give back memory; False where CUDA answers nothing but errors any more."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is None or not setup.on_cuda or not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except Exception:
        return False
    return True


def _end_with_parent() -> None:
    """See to it that this process does not outlive the one that started it, however that ends."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            sleep(_WATCH_SECONDS)
        os._exit(1)

    Thread(target=watch, daemon=True).start()


def main() -> None:
    """Read the job, run it."""
    _end_with_parent()
    job = json.load(sys.stdin)
    with open(job["lines"], "a", encoding="utf-8") as file:
        run(job, Lines(file))


if __name__ == "__main__":
    main()
