"""Products of linear layers: torch's, oneDNN's with its layout, and our kernel's.

    .venv/bin/python -m benches.engine.linear_products [--rounds 9] [--only 49152x576]
        [--dtype bfloat16]
    .venv/bin/python -m benches.engine.linear_products --show

from the root of the repository, on a machine that does nothing else. A round multiplies rows by
copies of a weight that together are larger than the processor's caches, by each product in turns.
A figure is the median time of one product; `torch / ours` above 1 means that ours is faster.
Shapes are those of SmolLM2-135M and gemma-3-270m: outputs x inputs.

`PYENGINE_CPU_ISA=avx512_bf16` in the environment compares ours at a lower level.

Results: `benches/results/linear-products-MACHINE.json`, in bfloat16
`linear-products-bfloat16-MACHINE.json`; a run replaces the shapes that it measures.
`--docs` puts the tables into docs/benchmarks/engine.md, between this machine's marks.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from benches.engine.page import publish
from benches.peers.report import heading, machine, results_file, results_name
from pyengine.cpu import PackedWeight
from pyengine.cpu.threads import kernel_threads
from pyengine.models.decoder.cpu_numbers import NUMPY, Dtype
from pyengine.models.decoder.cpu_products import CpuProduct
from pyengine.models.decoder.float_products import ProductName
from pyengine.models.decoder.product_choice import Multiply, candidates
from pyengine.utils.dtypes import Rows, rounded
from pyengine.utils.openmp import torch_threads

SHAPES = (
    (49152, 576),
    (1536, 576),
    (576, 1536),
    (192, 576),
    (576, 576),
    (262144, 640),
    (2048, 640),
    (640, 2048),
)
ROWS = (1, 2, 4, 8, 16, 32, 128)
THREADS = (1, 2)
PRODUCTS: tuple[ProductName, ...] = ("torch", "onednn", "pyengine")
READ = 64 << 20
"""Bytes of weights that a round reads."""
SECONDS = 0.15
"""Of a round of many rows, about: it then takes fewer of the copies."""


def measure(
    outputs: int, inputs: int, rounds: int, dtype: Dtype
) -> dict[str, dict[str, dict[str, float]]]:
    """Microseconds by threads, rows and product."""
    rng = np.random.default_rng(0)
    weight = rounded(rng.random((outputs, inputs), dtype=np.float32) - 0.5, NUMPY[dtype])
    num_copies = max(1, READ // weight.nbytes)
    copies = [[weight.copy()] for _ in range(num_copies)]
    found = candidates(PRODUCTS[:-1], copies)
    packed = [PackedWeight(copy) for [copy] in copies]
    results: dict[str, dict[str, dict[str, float]]] = {}
    for threads in THREADS:
        kernel = kernel_threads(threads)
        found["pyengine"] = [CpuProduct(kernel, each).multiply for each in packed]
        with torch_threads(threads):
            for count in ROWS:
                floats = rng.random((count, inputs), dtype=np.float32) - 0.5
                rows = rounded(floats, NUMPY[dtype])
                few = max(1, min(num_copies, int(SECONDS * 2e10 / (count * outputs * inputs))))
                times: dict[str, list[float]] = {product: [] for product in PRODUCTS}
                for _ in range(rounds + 1):
                    for product in PRODUCTS:
                        times[product].append(_seconds(found[product][:few], rows) / few)
                medians = {product: 1e6 * median(each[1:]) for product, each in times.items()}
                results.setdefault(str(threads), {})[str(count)] = medians
                shown = ", ".join(f"{name} {us:,.0f}" for name, us in medians.items())
                print(
                    f"{outputs}x{inputs}, {threads} threads, {count} rows: {shown}", file=sys.stderr
                )
    return results


def _seconds(products: list[Multiply], rows: Rows) -> float:
    start = perf_counter()
    for multiply in products:
        multiply(rows)
    return perf_counter() - start


def tables(content: dict[str, Any]) -> Iterator[str]:
    """For each number of threads and other product how many times ours it takes, in markdown."""
    yield heading(content["machine"], [content["rounds"]])
    for threads in map(str, THREADS):
        for other in PRODUCTS[:-1]:
            yield f"\n| {other} / ours, threads: {threads} | {' | '.join(map(_rows, ROWS))} |"
            yield "|---|" + "---:|" * len(ROWS)
            for shape, results in content["microseconds"].items():
                cells = [
                    f"{times[other] / times['pyengine']:.2f}"
                    for times in (results[threads][str(count)] for count in ROWS)
                ]
                yield f"| {shape} | {' | '.join(cells)} |"


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def main() -> None:
    """Measure, or show."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", help="shapes, separated by commas")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--show", action="store_true", help="the tables of the last runs")
    parser.add_argument("--docs", action="store_true", help="write the tables into the docs")
    asked = parser.parse_args()
    kind = "" if asked.dtype == "float32" else f"-{asked.dtype}"
    name = results_name(f"linear-products{kind}")
    path = results_file(name)
    content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if not asked.show:
        found = content.get("microseconds", {})
        for outputs, inputs in SHAPES:
            shape = f"{outputs}x{inputs}"
            if not asked.only or shape in asked.only.split(","):
                found[shape] = measure(outputs, inputs, asked.rounds, asked.dtype)
        shapes = [f"{outputs}x{inputs}" for outputs, inputs in SHAPES]
        found = {shape: found[shape] for shape in shapes if shape in found}
        content = {"machine": machine(), "rounds": asked.rounds, "microseconds": found}
        path.write_text(json.dumps(content, indent=1) + "\n")
    publish(name, tables(content), write=asked.docs)


if __name__ == "__main__":
    main()
