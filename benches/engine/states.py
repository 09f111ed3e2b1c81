"""Models with recurrent layers: decodes, a shared prefix, and second requests.

    .venv/bin/python -m benches.engine.states [SHAPE ...] [--rounds 5] [--pairs 1000]

Weights are random, of the shapes of released models. Prints markdown:

- a decode of 32 rows, beside the products of the same step alone, of the same steps; medians, the
  slowest in brackets. `bound` adds the time in which torch multiplies as many numbers as the states
  of 32 rows have in place: each is read and written once.
- 32 requests with 2,048 shared tokens and 16 of their own, with the cache and without it.
- the tokens that a second request computes again of what it shares with an earlier one, over
  random pairs: requests share 64 to 1,500 tokens and diverge there.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

from benches.engine.floor.parts import products
from benches.peers.report import machine
from pyengine import LLM, SamplingParams
from pyengine.utils.openmp import torch_threads

ROWS, CONTEXT, DECODES = 32, 128, 24
SHARED, OWN = 2048, 16
_KINDS = ["linear_attention"] * 3 + ["full_attention"]
SHAPES: dict[str, dict[str, Any]] = {
    "LFM2-350M": {
        "model_type": "lfm2",
        "vocab_size": 65_536,
        "hidden_size": 1024,
        "intermediate_size": 4608,
        "block_auto_adjust_ff_dim": False,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "max_position_embeddings": 128_000,
    },
    "Qwen3.5-0.8B": {
        "model_type": "qwen3_5_text",
        "vocab_size": 248_320,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "layer_types": _KINDS * 6,
        "tie_word_embeddings": True,
        "max_position_embeddings": 262_144,
    },
    "Granite-4.0-H-350M": {
        "model_type": "granitemoehybrid",
        "vocab_size": 100_352,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "shared_intermediate_size": 2048,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "num_hidden_layers": 32,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "mamba_n_heads": 48,
        "mamba_d_head": 32,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_expand": 2,
        "position_embedding_type": "nope",
        "layer_types": [
            "attention" if layer in (10, 13, 17, 27) else "mamba" for layer in range(32)
        ],
        "tie_word_embeddings": True,
        "max_position_embeddings": 32_768,
    },
}


@contextmanager
def engine(shape: dict[str, Any], **settings: Any) -> Iterator[LLM]:
    """An engine of a shape with random weights in bfloat16."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        defaults: dict[str, Any] = {
            "device": "cpu",
            "dtype": "bfloat16",
            "load_format": "dummy",
            "max_num_seqs": ROWS,
            "kv_cache_memory": 3 << 30,
        }
        with LLM(Path(folder), **{**defaults, **settings}) as llm:
            yield llm


class TimedProducts:
    """Seconds of each step of an engine, and of the products in it."""

    def __init__(self, llm: LLM) -> None:
        self._engine: Any = vars(llm)["_engine"]
        runner = self._engine._executor.runner
        runner.pool.populate()
        self._decoder = runner._model._decoder
        self._spent = 0.0
        self.steps: list[tuple[float, float]] = []
        for _, linear in products(self._decoder):
            linear.product = _Timed(linear.product, self._add)
        head = self._decoder._head
        self._decoder._head = _Timed(head, self._add)
        self._step, self._engine.step = self._engine.step, self._timed_step

    def _add(self, seconds: float) -> None:
        self._spent += seconds

    def _timed_step(self) -> Any:
        self._spent, start = 0.0, perf_counter()
        result = self._step()
        if result.num_tokens == len(result.rows) == ROWS:
            self.steps.append((perf_counter() - start, self._spent))
        return result


class _Timed:
    """An object whose methods are timed."""

    def __init__(self, inner: Any, add: Callable[[float], None]) -> None:
        self._inner, self._add = inner, add

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if not callable(value):
            return value

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = perf_counter()
            result = value(*args, **kwargs)
            self._add(perf_counter() - start)
            return result

        return timed


def prompts(count: int, length: int, vocabulary: int, seed: int = 0) -> list[list[int]]:
    """Random prompts."""
    rnd = Random(seed)
    return [[rnd.randrange(3, vocabulary) for _ in range(length)] for _ in range(count)]


def decodes(shape: dict[str, Any], rounds: int) -> str:
    """The row of decodes of a shape."""
    params = SamplingParams(temperature=0, max_tokens=DECODES + 1, ignore_eos=True)
    with engine(shape) as llm:
        timed = TimedProducts(llm)
        for number in range(rounds):
            asked = prompts(ROWS, CONTEXT, shape["vocab_size"], number)
            llm.generate(asked, params, use_tqdm=False)
            del timed.steps[: 2 if number == 0 else 0]
        num_bytes = ROWS * int(str(llm.describe()["state_bytes"]))
        threads = int(str(llm.describe()["num_threads"]))
    whole, alone = zip(*timed.steps, strict=True)
    ratio = median(step / products for step, products in timed.steps)
    states = update_seconds(num_bytes, threads)
    bound = 1 + states / median(alone)
    return (
        f"{1e3 * median(whole):.1f} ({1e3 * max(whole):.1f}) | {1e3 * median(alone):.1f} "
        f"({1e3 * max(alone):.1f}) | {num_bytes / 1e6:,.0f} | {1e3 * states:.1f} | {ratio:.2f} | "
        f"{bound:.2f}"
    )


def update_seconds(num_bytes: int, threads: int) -> float:
    """Seconds to multiply float32 numbers in place, the least of ten."""
    import torch

    with torch_threads(threads):
        numbers, seconds = torch.ones(num_bytes // 4), []
        for _ in range(10):
            start = perf_counter()
            numbers.mul_(1.0)
            seconds.append(perf_counter() - start)
    return min(seconds)


def shared_prefix(shape: dict[str, Any]) -> str:
    """The row of requests that share a prefix."""
    [shared] = prompts(1, SHARED, shape["vocab_size"])
    asked = [shared + own for own in prompts(ROWS, OWN, shape["vocab_size"], 1)]
    params = SamplingParams(temperature=0, max_tokens=1)
    seconds, computed = [], []
    for caching in (True, False):
        with engine(shape, enable_prefix_caching=caching) as llm:
            llm.generate(prompts(1, 64, shape["vocab_size"], 2), params, use_tqdm=False)
            start = perf_counter()
            outputs = llm.generate(asked, params, use_tqdm=False)
            seconds.append(perf_counter() - start)
            computed.append(
                sum(len(each) for each in asked)
                - sum(output.num_cached_tokens for output in outputs)
            )
    ratio = seconds[1] / seconds[0]
    return f"{computed[0]:,} | {computed[1]:,} | {seconds[0]:.2f} | {seconds[1]:.2f} | {ratio:.1f}"


def second_requests(shape: dict[str, Any], pairs: int) -> str:
    """The row of tokens that second requests compute again of a shared prefix."""
    rnd, vocabulary = Random(7), 1000
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    small = {
        **shape,
        "vocab_size": vocabulary,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "full_attn_idxs": [1],
        "max_position_embeddings": 4096,
    }
    again = []
    with engine(small, kv_cache_memory=2 << 30, max_num_seqs=4) as llm:
        for _ in range(pairs):
            length = rnd.randrange(64, 1500)
            [shared] = prompts(1, length, vocabulary, rnd.randrange(1 << 30))
            first, second = rnd.sample(range(3, vocabulary), 2)
            tails = [[token] * rnd.randrange(1, 400) for token in (first, second)]
            for tail in tails:
                [output] = llm.generate([shared + tail], params, use_tqdm=False)
            again.append(length - output.num_cached_tokens)
    ordered = sorted(again)
    return f"{ordered[len(ordered) // 2]} | {ordered[len(ordered) * 9 // 10]} | {ordered[-1]}"


def main() -> None:
    """Measure, and print markdown."""
    parser = argparse.ArgumentParser(description="Models with recurrent layers.")
    parser.add_argument("shapes", nargs="*", default=list(SHAPES), metavar="SHAPE")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=1000)
    options = parser.parse_args()
    about = machine()
    print(f"{about['cpu']} ({about['isa']}), {about['cores']} cores, {about['date']}\n")
    print(
        "| decode of 32 rows | step, ms | its products, ms | states, MB | read and written, ms | "
        "step / products | bound |"
    )
    print("|---|---|---|---|---|---|---|")
    for name in options.shapes:
        print(f"| {name} | {decodes(SHAPES[name], options.rounds)} |", flush=True)
    print("\n| 32 requests, 2,048 tokens shared | computed | without cache | s | s | times |")
    print("|---|---|---|---|---|---|")
    for name in options.shapes:
        print(f"| {name} | {shared_prefix(SHAPES[name])} |", flush=True)
    if options.pairs:
        print(f"\n| {options.pairs:,} second requests: computed again | median | 90 % | most |")
        print("|---|---|---|---|")
        print(f"| LFM2 | {second_requests(SHAPES['LFM2-350M'], options.pairs)} |")


if __name__ == "__main__":
    main()
