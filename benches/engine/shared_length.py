"""One layer of a decode step of 32 rows over a shared prefix, read once for all or once for each.

    python -m benches.engine.shared_length [--docs]     # some seconds
    .venv-peers/bin/python -m benches.engine.shared_length --plot   # docs/images/shared-length.svg

from the root of the repository; figures in `benches/results/shared-length-MACHINE.json`, with
`--docs` in docs/benchmarks/engine.md too. 9 query heads on 3 KV heads of dimension 64, blocks of 16
that lie anywhere in the pool, 16 tokens of each row's own after the prefix, all cores. Layers take
turns, so that their blocks are not in the caches, and the two ways too; medians, in microseconds.
Both give the same bits (checked).
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter_ns as clock
from typing import Any

import numpy as np

from benches.engine.page import publish
from benches.peers.report import heading, machine, results_file, results_name
from pyengine.utils.dtypes import dtype_of

ROOT = Path(__file__).parents[2]
PLOT = ROOT / "docs/images/shared-length.svg"
BLOCK, HEADS, KV_HEADS, DIM, ROWS, OWN, LAYERS = 16, 9, 3, 64, 32, 16, 6
LENGTHS = (0, 128, 256, 512, 1024, 2048, 4096)
DTYPES = ("float32", "bfloat16")
ROUNDS = 60
COLOURS = {"float32": "#00798c", "bfloat16": "#d1495b"}


def measure(dtype: str, length: int) -> dict[str, float]:
    """Microseconds with groups (`once`) and without (`each`)."""
    import torch

    from pyengine.attention.backend import AttentionOptions
    from pyengine.attention.cpu import CpuBackend
    from pyengine.kv_cache.pool import KVCacheSpec, KVPool
    from tests.support.attention import inputs_of, shared_rows

    kind = getattr(torch, dtype)
    shared, own = length // BLOCK, OWN // BLOCK
    spec = KVCacheSpec(KV_HEADS, DIM, DIM, dtype_of(kind))
    pool = KVPool([spec] * LAYERS, shared + ROWS * own, BLOCK, torch.device("cpu"))
    for tensor in (*pool.keys, *pool.values):
        tensor.normal_()
    ids = np.random.default_rng(0).permutation(pool.num_blocks).astype(np.int32)
    owned = ids[shared:].reshape(ROWS, own).tolist()
    tables = [ids[:shared].tolist() + row for row in owned]
    each = inputs_of([(1, length + OWN - 1)] * ROWS, tables, block=BLOCK)
    prefix = np.array([[0, ROWS, 0, shared, -1]] * bool(shared), np.int32).reshape(-1, 5)
    once = replace(each, shared=shared_rows(0, np.arange(ROWS, dtype=np.int32), prefix))
    backend, options = CpuBackend(pool), AttentionOptions(scaling=DIM**-0.5)
    plans = {"once": backend.plan(once), "each": backend.plan(each)}
    heads = (HEADS, KV_HEADS, KV_HEADS)
    query, key, value = (torch.randn(ROWS, number, DIM).to(kind) for number in heads)
    found = [plan.forward(0, (query, key, value), options) for plan in plans.values()]
    assert torch.equal(*found), "the two ways give different bits"
    seconds: dict[str, list[int]] = {name: [] for name in plans}
    for at in range(ROUNDS):
        for name, plan in plans.items():
            start = clock()
            plan.forward(at % LAYERS, (query, key, value), options)
            seconds[name].append(clock() - start)
    return {name: median(each) / 1000 for name, each in seconds.items()}


def table(results: dict[str, Any]) -> Iterator[str]:
    """In markdown: how much of the time without groups the time with them is."""
    about, found = results["about"], results["microseconds"]
    yield f"{heading(about, [results.get('rounds', ROUNDS)])}, microseconds"
    yield ""
    yield "| tokens shared | " + " | ".join(f"{d}, once | each | share" for d in found) + " |"
    yield "|---:|" + "---:|---:|---:|" * len(found)
    for length in map(str, LENGTHS):
        cells = [
            f"{item['once']:,.0f} | {item['each']:,.0f} | {item['once'] / item['each']:.2f}"
            for item in (of_dtype[length] for of_dtype in found.values())
        ]
        yield f"| {int(length):,} | " + " | ".join(cells) + " |"


def plot(results: dict[str, Any], path: Path) -> None:
    """Draw a run."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    from benches.peers.plots import STYLE

    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(6, 3.2))
        for dtype, of_dtype in results["microseconds"].items():
            for name, style in (("once", "o-"), ("each", "s--")):
                points = [of_dtype[str(length)][name] for length in LENGTHS]
                label = f"{dtype}, read {name if name == 'once' else 'for each row'}"
                axes.plot(LENGTHS, points, style, color=COLOURS[dtype], markersize=4, label=label)
        axes.set_yscale("log")
        axes.set_xlabel("tokens that 32 rows share")
        axes.set_title("one layer of a decode step, microseconds", fontsize=10)
        axes.legend(fontsize=7, frameon=False)
        about = results["about"]
        caption = f"{about['cpu']}, {about['cores']} cores, {about['date']}; medians"
        figure.text(0.99, 0.005, caption, ha="right", fontsize=5, color="#777777")
        figure.tight_layout(rect=(0, 0.02, 1, 1))
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


def main() -> None:
    """Measure, or draw what was measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--plot", action="store_true", help="draw the last run, measure nothing")
    parser.add_argument("--docs", action="store_true", help="write the table into the docs")
    parser.add_argument("--show", action="store_true", help="print its table, measure nothing")
    parser.add_argument("--results", help="name of file and place (shared-length-MACHINE)")
    options = parser.parse_args()
    name = options.results or results_name("shared-length")
    target = results_file(name)
    if options.plot:
        return plot(json.loads(target.read_text()), PLOT)
    if not options.show:
        target.write_text(json.dumps(run(), indent=1) + "\n")
    publish(name, table(json.loads(target.read_text())), write=options.docs)
    return None


def run() -> dict[str, Any]:
    """Measure all lengths in both dtypes."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for dtype in DTYPES:
        found[dtype] = {str(length): measure(dtype, length) for length in LENGTHS}
    return {"about": machine(), "rounds": ROUNDS, "microseconds": found}


if __name__ == "__main__":
    main()
