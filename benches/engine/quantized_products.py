"""Products of linear layers by weights of few bits: our kernel's, llama.cpp's and torch's.

    .venv/bin/python -m benches.engine.quantized_products --ggml FOLDER [--rounds 5]
    .venv/bin/python -m benches.engine.quantized_products --show

from the root of the repository, on a machine that does nothing else. FOLDER has llama.cpp's
libggml-base.so and libggml-cpu.so: `llama_cpp/lib` of the package llama-cpp-python. A round
multiplies float32 rows by copies of a weight that together are larger than most caches. A figure is
the median time of one product. torch multiplies bfloat16 rows by its int4 weights in groups of 32.

Results: `benches/results/quantized-products-MACHINE.json`. `--docs` puts the tables into
docs/benchmarks/engine.md, between this machine's marks.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from benches.engine.page import publish
from benches.peers.report import heading, machine, results_file, results_name
from pyengine.cpu import CpuAttention, QuantizedWeight

SHAPES = ((1536, 576), (49152, 576), (4096, 4096), (14336, 4096))
FORMATS = ("Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
BLOCKS = {
    "Q4_0": (32, 18, (0,)),
    "Q4_1": (32, 20, (0, 2)),
    "Q5_0": (32, 22, (0,)),
    "Q5_1": (32, 24, (0, 2)),
    "Q8_0": (32, 34, (0,)),
    "Q4_K": (256, 144, (0, 2)),
    "Q5_K": (256, 176, (0, 2)),
    "Q6_K": (256, 210, (208,)),
}
"""Weights of a block, its bytes, and where it has half-precision floats."""
ROWS = (1, 8, 32, 512)
THREADS = (1, 2)
READ = 48 << 20
"""Bytes of weights that a round reads."""
SECONDS = 0.15
"""Of a round of many rows, about: it then takes fewer of the copies."""


def random_blocks(format: str, outputs: int, inputs: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Blocks of random bits, but for their half-precision floats, which are small."""
    size, num_bytes, halves = BLOCKS[format]
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (outputs * inputs // size, num_bytes), np.uint8)
    for at in halves:
        blocks[:, at + 1] = 0x1C
    return blocks.reshape(-1)


def plan(format: str, outputs: int, inputs: int) -> tuple[int, dict[str, Any]]:
    """How many copies there are, and how many are multiplied by so many rows."""
    size, num_bytes, _ = BLOCKS[format]
    copies = max(1, READ // (outputs * inputs // size * num_bytes))
    few = [max(1, min(copies, int(SECONDS * 1e11 / (n * outputs * inputs)))) for n in ROWS]
    return copies, {"threads": THREADS, "rows": list(zip(ROWS, few, strict=True))}


def times_of(work: Callable[[], None], rounds: int) -> float:
    """The median of the seconds, after a first call."""
    seconds = []
    for _ in range(rounds + 1):
        start = perf_counter()
        work()
        seconds.append(perf_counter() - start)
    return median(seconds[1:])


def ours(format: str, outputs: int, inputs: int, rounds: int) -> dict[str, dict[str, float]]:
    """Microseconds by threads and rows."""
    from pyengine.utils.openmp import openmp_runtime

    copies, planned = plan(format, outputs, inputs)
    data = random_blocks(format, outputs, inputs)
    weights = [QuantizedWeight(format, data, outputs, inputs) for _ in range(copies)]
    results: dict[str, dict[str, float]] = {}
    for threads in THREADS:
        attention = CpuAttention(threads, openmp_runtime())
        for count, few in planned["rows"]:
            rows = np.random.default_rng(0).normal(size=(count, inputs)).astype(np.float32)
            out = np.empty((count, outputs), np.float32)

            def work(few: int = few, rows: Any = rows, out: Any = out, by: Any = attention) -> None:
                for weight in weights[:few]:
                    weight.multiply(by, rows, out)

            us = 1e6 * times_of(work, rounds) / few
            results.setdefault(str(threads), {})[str(count)] = us
    return results


def torch_int4(outputs: int, inputs: int, rounds: int) -> dict[str, dict[str, float]]:
    """Microseconds of torch's int4 product by threads and rows."""
    import torch

    copies, planned = plan("Q4_1", outputs, inputs)
    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.int32)
    operators: Any = torch.ops.aten
    convert = operators._convert_weight_to_int4pack_for_cpu
    weights = [convert(codes, 1) for _ in range(copies)]
    scales = torch.rand(inputs // 32, outputs, 2, dtype=torch.bfloat16)
    results: dict[str, dict[str, float]] = {}
    for threads in THREADS:
        torch.set_num_threads(threads)
        for count, few in planned["rows"]:
            rows = torch.randn(count, inputs, dtype=torch.bfloat16)

            def work(few: int = few, rows: Any = rows) -> None:
                for weight in weights[:few]:
                    operators._weight_int4pack_mm_for_cpu(rows, weight, 32, scales)

            us = 1e6 * times_of(work, rounds) / few
            results.setdefault(str(threads), {})[str(count)] = us
    return results


def ggml(
    folder: str, format: str, outputs: int, inputs: int, rounds: int
) -> dict[str, dict[str, float]]:
    """Microseconds by threads and rows, in a separate process."""
    copies, planned = plan(format, outputs, inputs)
    command = [sys.executable, "-m", "benches.engine.ggml_products", folder, format]
    numbers = [str(number) for number in (outputs, inputs, copies, rounds)]
    done = subprocess.run(
        [*command, *numbers, json.dumps(planned)], check=True, stdout=subprocess.PIPE
    )
    found: dict[str, dict[str, float]] = json.loads(done.stdout)
    return found


def tables(content: dict[str, Any]) -> Iterator[str]:
    """Our times, and how many times them the others take, in markdown."""
    yield heading(content["machine"], [content["rounds"]])
    for threads in map(str, THREADS):
        names = [f"{n} row{'s' if n > 1 else ''}" for n in ROWS]
        columns = [f"{name}: us, GB/s, llama.cpp, torch int4" for name in names]
        yield f"\n| threads: {threads} | {' | '.join(columns)} |"
        yield "|---|" + "---:|" * len(ROWS)
        for name, found in content["microseconds"].items():
            format, shape = name.split()
            outputs, inputs = map(int, shape.split("x"))
            size, num_bytes, _ = BLOCKS[format]
            cells = []
            for count in map(str, ROWS):
                us = found["ours"][threads][count]
                speed = outputs * inputs / size * num_bytes / us / 1e3
                others = [
                    f"{found[other][threads][count] / us:.2f}" if other in found else "-"
                    for other in ("llama.cpp", "torch")
                ]
                cells.append(f"{us:,.0f}, {speed:.1f}, {others[0]}, {others[1]}")
            yield f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    """Measure, or show."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ggml", help="the folder of llama.cpp's libraries")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--show", action="store_true", help="the tables of the last runs")
    parser.add_argument("--docs", action="store_true", help="write the tables into the docs")
    asked = parser.parse_args()
    name = results_name("quantized-products")
    path = results_file(name)
    content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if not asked.show:
        found = content.get("microseconds", {})
        for format in asked.formats.split(","):
            for shape in SHAPES:
                if shape[1] % BLOCKS[format][0]:
                    continue
                measured = {"ours": ours(format, *shape, asked.rounds)}
                if asked.ggml:
                    measured["llama.cpp"] = ggml(asked.ggml, format, *shape, asked.rounds)
                if format == "Q4_1":
                    measured["torch"] = torch_int4(*shape, asked.rounds)
                found[f"{format} {shape[0]}x{shape[1]}"] = measured
                content = {"machine": machine(), "rounds": asked.rounds, "microseconds": found}
                path.write_text(json.dumps(content, indent=1) + "\n")
                print(format, shape, json.dumps(measured), file=sys.stderr)
    publish(name, tables(content), write=asked.docs)


if __name__ == "__main__":
    main()
