"""Long contexts: this engine and llama.cpp, the same GGUF file, all cores, in turns.

    .venv/bin/python -m benches.engine.long_contexts FILE [FILE ...] [--rounds 3]
    .venv/bin/python -m benches.engine.long_contexts FILE --make

A point is a number of sequences at a context. Every engine is a separate process: it fills the
context, then gives the tokens per second of the last 2,048 tokens of a prompt, and of 12 decode
steps of all sequences. No sequences share KV blocks. llama.cpp runs with flash attention and
without, batches of 512 tokens, a KV stream per sequence and its default KV type (float16); it is
looked for in `.venv-llama` (see `end_to_end.py`) or at `LLAMA_PYTHON`.

Filling is not timed. llama.cpp computes the first sequence and copies its state. This engine's pool
holds random numbers instead, and its steps are not computed up to the timed chunks: attention over
any numbers takes as long.

`--make` writes a file of random weights first, of the shape of Llama 3.2 1B (Q4_K, a vocabulary of
32,000).

Prints a table in markdown: medians of rounds, the slowest round in brackets, and the ratio to the
better setting of llama.cpp.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

from benches.engine.child import LLAMA_PYTHON, Child
from benches.engine.gguf import Shape, make_random
from benches.engine.llama import BATCH as CHUNK
from benches.engine.llama import CHUNKS, STEPS
from benches.peers.report import machine

CONTEXTS, ROWS = (8192, 16384), (1, 8)
ENGINES = ("pyengine", "llama.cpp, flash attention", "llama.cpp")
LLAMA_1B = Shape(hidden=2048, inner=8192, layers=16, heads=32, kv_heads=8, context=32_768)
TIMED = CHUNK * CHUNKS
"""Tokens of a prompt that are timed, one step of this engine's."""
BLOCK, WINDOW_BLOCKS = 16, 1500
"""Tokens of a block, and blocks for layers with windows."""
NOISE = 1 << 20
"""Random numbers that are repeated in a pool."""


def rates(name: str, path: Path, rows: int, context: int) -> dict[str, float]:
    """Tokens per second of the prompt's last chunks and of decodes."""
    own = [sys.executable, "-m", "benches.engine.long_contexts", "--serve", str(path)]
    peer = [str(LLAMA_PYTHON), "-m", "benches.engine.llama", str(path)]
    commands = {
        "pyengine": [*own, "--rows", str(rows), "--contexts", str(context)],
        "llama.cpp, flash attention": [*peer, str(rows), str(context), "on"],
        "llama.cpp": [*peer, str(rows), str(context), "off"],
    }
    with Child(commands[name]) as engine:
        while engine.ask("fill"):
            pass
        prompt, decode = engine.ask("prompt"), engine.ask("decode")
    return {"prompt": CHUNK / median(prompt), "decode": rows / median(decode)}


class Own:
    """This engine over a pool of random numbers."""

    def __init__(self, path: str, rows: int, context: int, dtype: str) -> None:
        from pyengine import LLM

        self.rows, self.context = rows, context
        self.steps: list[tuple[int, float]] = []
        """Tokens and seconds of the computed steps."""
        self.first_timed = -1
        """Prompts are computed from this position on; up to it they are not."""
        self.pools: list[Any] = []
        self._watch()
        self.llm = LLM(
            path,
            device="cpu",
            dtype=dtype,
            max_num_seqs=rows,
            max_model_len=context + TIMED,
            max_num_batched_tokens=TIMED,
            enable_prefix_caching=False,
            block_size=BLOCK,
            num_blocks=rows * (context + TIMED) // BLOCK + WINDOW_BLOCKS,
        )
        described = self.llm.describe()
        names = ("dtype", "kv_cache_dtype", "attention_backend", "num_threads")
        print(json.dumps({name: described[name] for name in names}), file=sys.stderr)
        self.generate(1, CHUNK, 1)

    def _watch(self) -> None:
        """Time the steps of the engine, and leave out those that fill a context."""
        import torch

        from pyengine.executor.model_runner import ForwardPass
        from pyengine.kv_cache.pool import KVPool

        make, forward, num_logits = KVPool.__init__, ForwardPass.__call__, [0]

        def keep(pool: Any, *given: Any, **named: Any) -> None:
            make(pool, *given, **named)
            self.pools.append(pool)

        def timed(of: Any, inputs: Any, plan: Any) -> Any:
            num_tokens = len(inputs.input_ids)
            is_left_out = num_tokens > self.rows and inputs.host_seq_lens.max() <= self.first_timed
            if is_left_out:
                return torch.zeros(len(inputs.logits_indices), num_logits[0])
            begin = perf_counter()
            logits = forward(of, inputs, plan)
            self.steps.append((num_tokens, perf_counter() - begin))
            num_logits[0] = logits.shape[1]
            return logits

        for owner, name, function in (
            (KVPool, "__init__", keep),
            (ForwardPass, "__call__", timed),
        ):
            setattr(owner, name, function)

    def generate(self, rows: int, length: int, max_tokens: int) -> None:
        """Random prompts of one length."""
        from pyengine import SamplingParams

        random = Random(rows)
        prompts = [[random.randrange(10, 30_000) for _ in range(length)] for _ in range(rows)]
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        self.steps.clear()
        self.llm.generate(prompts, params, use_tqdm=False)

    def fill(self) -> bool:
        """Fill the pool with random numbers; no second call is needed."""
        import torch

        for tensor in (*self.pools[0].keys, *self.pools[0].values):
            flat = tensor.view(-1)
            noise = torch.randn(NOISE).to(flat.dtype)
            for part in flat.split(NOISE):
                part.copy_(noise[: len(part)])
        return False

    def prompt(self) -> list[float]:
        """The seconds of the last tokens of a prompt, per chunk as llama.cpp has them."""
        self.first_timed = self.context - TIMED
        self.generate(1, self.context, 1)
        ((num_tokens, seconds),) = [step for step in self.steps if step[0] > self.rows]
        return [seconds * CHUNK / num_tokens] * CHUNKS

    def decode(self) -> list[float]:
        """The seconds of steps in which all sequences decode."""
        self.first_timed = self.context + TIMED
        until_all = self.rows * self.context // TIMED
        self.generate(self.rows, self.context, until_all + STEPS + 8)
        seconds = [seconds for num_tokens, seconds in self.steps if num_tokens == self.rows]
        return seconds[-STEPS:]


def serve(path: str, point: list[int], dtype: str) -> None:
    """Answer line by line, as `llama.py` does."""
    engine = Own(path, point[0], point[1], dtype)
    stages = {"fill": engine.fill, "prompt": engine.prompt, "decode": engine.decode}
    for line in sys.stdin:
        print(json.dumps(stages[json.loads(line)]()), flush=True)


def table(path: Path, rounds: int, points: list[tuple[int, int]]) -> Iterator[str]:
    """The rows of a file, in markdown."""
    yield f"\n| {path.name} | {' | '.join(ENGINES)} | ratio |"
    yield "|---" + "|---:" * (len(ENGINES) + 1) + "|"
    for rows, context in points:
        rounds_of: dict[str, list[dict[str, float]]] = {name: [] for name in ENGINES}
        for turn in range(rounds):
            for name in ENGINES if turn % 2 else reversed(ENGINES):
                rounds_of[name].append(rates(name, path, rows, context))
        for stage in ("prompt", "decode"):
            all_rates = [[rate[stage] for rate in rounds_of[name]] for name in ENGINES]
            medians = [median(some) for some in all_rates]
            cells = " | ".join(f"{median(some):,.1f} ({min(some):,.1f})" for some in all_rates)
            count = f"{rows} x " if stage == "decode" else ""
            ratio = medians[0] / max(medians[1:])
            yield f"| {stage} at {count}{context:,} | {cells} | {ratio:.2f} |"


def main() -> None:
    """Measure, or serve."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, choices=ROWS)
    parser.add_argument("--dtype", default="auto", help="of rows, in this engine")
    parser.add_argument("--make", action="store_true", help="write the first file before")
    parser.add_argument("--serve", action="store_true", help="for this script itself")
    options = parser.parse_args()
    if options.serve:
        serve(str(options.files[0]), [*options.rows, *options.contexts], options.dtype)
        return
    if options.make:
        make_random(options.files[0], LLAMA_1B)
    print(json.dumps(machine()))
    points = [(rows, context) for context in options.contexts for rows in options.rows]
    for path in options.files:
        for row in table(path, options.rounds, points):
            print(row, flush=True)


if __name__ == "__main__":
    main()
