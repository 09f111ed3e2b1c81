"""Where the time of a step goes on this machine's CPUs, beside what memory and processor allow.

    .venv/bin/python -m benches.engine.floor [--model FOLDER] [--dtype float32|bfloat16] [--docs]
    .venv/bin/python -m benches.engine.floor --show

from the root of the repository. SmolLM2-135M-Instruct in float32, in bfloat16, and in 4 bits (the
default model's own file); or a folder or GGUF file. Steps: one sequence and 32 that decode after 64
tokens, one after 4,096, and a prompt of 512.

A table for each step has its parts: the bytes that a part must move and its operations, the floor
(bytes by the bandwidth of memory, or operations by the rate of large products, whichever is more),
the time that the part takes in a running engine, its share of the step, and how much longer one
thread takes. Bandwidth and rates are measured in the same run, with the engine's threads. Weights
that stay in a cache are read faster than memory: the floor of such a part is not a floor, and the
heading has the rate of both.

Times are means of the fastest quarter of the steps. Rotation and KV write are in the same call as
attention: they are the difference to steps whose attention does neither.

Results: `benches/results/floor-MACHINE.json`; a run replaces the variants that it measures.
`PYENGINE_CPU_ISA=avx2` holds the kernels to a lower level. `--docs` puts the tables into
docs/benchmarks/engine.md, between this machine's marks.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benches.engine.float_model import float_folder
from benches.engine.floor.measure import CASES, Variant, measure
from benches.engine.floor.parts import FloorError
from benches.engine.floor.tables import tables
from benches.engine.page import publish
from benches.peers.report import machine, results_file, results_name
from pyengine.errors import PyEngineError
from pyengine.models.decoder.cpu_numbers import Dtype
from pyengine.models.source import embedded_gguf

DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")


def variants(options: argparse.Namespace) -> list[Variant]:
    """What is asked for."""
    dtypes: tuple[Dtype, ...] = DTYPES if options.dtype is None else (options.dtype,)
    if options.model is not None:
        name = options.model.stem if options.model.is_file() else options.model.name
        if options.model.is_file() and options.dtype is None:
            return [Variant(name, options.model, "auto")]
        return [Variant(f"{name}, {dtype}", options.model, dtype) for dtype in dtypes]
    floats = [Variant(dtype, float_folder(), dtype) for dtype in dtypes]
    return floats if options.dtype else [*floats, Variant("4 bits", embedded_gguf(), "auto")]


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, help="a folder or a GGUF file")
    parser.add_argument("--dtype", choices=DTYPES, help="one dtype only")
    parser.add_argument("--bits4", action="store_true", help="the default model's 4 bits only")
    parser.add_argument("--threads", type=int, help="compute threads (the engine's choice)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each step (3)")
    parser.add_argument("--only", default="", help="steps whose name contains this")
    parser.add_argument("--results", help="name of file and place (floor-MACHINE)")
    parser.add_argument("--docs", action="store_true", help="write the tables into the docs")
    parser.add_argument("--show", action="store_true", help="print the tables of the last runs")
    options = parser.parse_args()
    if options.model is not None and not options.model.exists():
        parser.error(f"--model {options.model}: there is no such file or folder")
    for name in ("threads", "rounds"):
        number = getattr(options, name)
        if number is not None and number < 1:
            parser.error(f"--{name} {number}: at least 1")
    if not any(options.only in case.name for case in CASES):
        names = "; ".join(case.name for case in CASES)
        parser.error(f"--only {options.only!r}: there are {names}")
    return options


def main() -> None:
    """Measure, print, write."""
    options = parse()
    name = options.results or results_name("floor")
    path = results_file(name)
    content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"variants": {}}
    if not options.show:
        selected = (
            [Variant("4 bits", embedded_gguf(), "auto")] if options.bits4 else variants(options)
        )
        content["machine"] = machine()
        for variant in selected:
            try:
                figures = measure(variant, options.rounds, options.threads, only=options.only)
            except (FloorError, PyEngineError) as error:
                sys.exit(f"{variant.name}: {error}")
            content["variants"][variant.name] = figures
        if not options.only and options.model is None:
            path.write_text(json.dumps(content, indent=1) + "\n")
    publish(name, tables(content), write=options.docs)


if __name__ == "__main__":
    main()
