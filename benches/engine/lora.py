"""Throughput with LoRA adapters: many in one batch, one, and none.

    python -m benches.engine.lora [--model FOLDER] [--dtype bfloat16] [--rank 16] [--rounds 3]

32 requests of the embedded model, or of another SmolLM2-135M, decode at once: over 8 adapters and
the base, with one adapter, with the base alone in the same engine, and in an engine without
adapters. Rounds take turns; the medians of tokens per second and per second of processor time
count: the latter with one thread (`--threads 1`), where other programs use the machine.
"""

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np

from pyengine import LLM, LoRARequest, SamplingParams
from pyengine.models.loader import dummy_weight_shapes
from tests.support.adapters import save_adapter
from tests.support.checkpoints import write_json

_REQUESTS, _ADAPTERS, _OUTPUT, _PROMPT = 32, 8, 64, 32


_CONFIG = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
}
"""The embedded model's."""


def throughput(
    llm: LLM, prompts: list[list[int]], requests: list[LoRARequest | None]
) -> tuple[float, float]:
    """Tokens per second of all requests together, and per second of processor time."""
    params = SamplingParams(max_tokens=_OUTPUT, temperature=0.0, ignore_eos=True)
    start = np.array([perf_counter(), process_time()])
    llm.generate(prompts, params, use_tqdm=False, lora_request=requests)
    taken = np.array([perf_counter(), process_time()]) - start
    wall, processor = len(prompts) * _OUTPUT / taken
    return wall, processor


def measured(
    model: str | None, dtype: str, rank: int, rounds: int, threads: int | None
) -> dict[str, tuple[float, float]]:
    """The median throughputs of each case."""
    random = np.random.default_rng(0)
    settings: dict[str, Any] = {"dtype": dtype, "num_blocks": 512, "enable_prefix_caching": False}
    settings["num_threads"] = threads
    rates: dict[str, list[tuple[float, float]]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_json(folder / "config.json", _CONFIG)
        shapes = dummy_weight_shapes(folder)
        loras: list[LoRARequest | None] = []
        for number in range(_ADAPTERS):
            path = save_adapter(folder / f"{number}", shapes, seed=number, rank=rank, scale=0.01)
            loras.append(LoRARequest(f"adapter-{number}", path))
        plain = stack.enter_context(LLM(model, **settings))
        llm = stack.enter_context(LLM(model, enable_lora=True, **settings))
        cases: dict[str, tuple[LLM, list[LoRARequest | None]]] = {
            "no adapters": (plain, [None]),
            "the base beside adapters": (llm, [None]),
            "one adapter": (llm, loras[:1]),
            "8 adapters and the base": (llm, [*loras, None]),
        }
        for _ in range(rounds + 1):
            prompts = random.integers(1000, 40000, (_REQUESTS, _PROMPT)).tolist()
            for name, (engine, given) in cases.items():
                own = [given[at % len(given)] for at in range(_REQUESTS)]
                rates.setdefault(name, []).append(throughput(engine, prompts, own))
    pairs = {name: zip(*values[1:], strict=True) for name, values in rates.items()}
    return {name: (median(wall), median(processor)) for name, (wall, processor) in pairs.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    rates = measured(options.model, options.dtype, options.rank, options.rounds, options.threads)
    most = rates["8 adapters and the base"]
    print(
        "| case | tokens/s | 8 and base / this | tokens/s of processor time | 8 and base / this |"
    )
    print("|---|---|---|---|---|")
    for name, (wall, processor) in rates.items():
        ratios = most[0] / wall, most[1] / processor
        print(f"| {name} | {wall:.0f} | {ratios[0]:.2f} | {processor:.0f} | {ratios[1]:.2f} |")


if __name__ == "__main__":
    main()
