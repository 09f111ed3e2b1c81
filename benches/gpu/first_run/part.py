"""Runs a part in this process: `python -m benches.gpu.first_run.part NAME DEVICE OUT FOLDER`.

The status is 1 if a piece of it failed.
"""

import importlib
import sys
from pathlib import Path

from benches.gpu.first_run.context import Context
from benches.gpu.first_run.parts import PARTS


def main(name: str, device: str, out: str, folder: str) -> int:
    """Run the part; its figures are in OUT/results.jsonl."""
    part = next(part for part in PARTS if part.name == name)
    context = Context(device, folder, name, Path(out))
    module, _, function = part.call.partition(":")
    arguments = context.either(part.arguments, part.tiny)
    call = getattr(importlib.import_module(f"benches.gpu.first_run.{module}"), function)
    context.attempt(name, call, context, *arguments)
    return int(bool(context.wrong))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
