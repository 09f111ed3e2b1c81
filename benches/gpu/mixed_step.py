"""The host's time for a layer of a step with prefills on a GPU, with stand-ins for the device.

    python -m benches.gpu.mixed_step [--steps 200]

A small random llama on the CPU, of two depths: the table has the difference, per layer. Attention
does nothing, and neither does the replay of a graph. All else runs, with the kernels of few tokens
on the CPU. The calls of CUDA are left out, which `launches` counts: 4 a layer in pieces (a graph,
the KV write, attention, the copy of its result), 9 compiled. The time is the processor's, of one
thread.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from time import thread_time
from types import SimpleNamespace
from typing import Any

import torch

from benches.gpu.launches import Counting, decoder
from pyengine.attention.backend import QKV, AttentionOptions
from pyengine.executor.compiled import CompiledForward
from pyengine.executor.cuda_graphs import Between, Compute, Interrupt
from pyengine.executor.model_runner import ForwardPass
from pyengine.executor.piecewise_graphs import PiecewiseGraphs

TOKENS, ROWS = 4, 2
"""Few: the CPU computes what a GPU would."""
FEWEST, MOST = 1, 4
"""Layers."""


class Attention(Counting):
    """Gives the same tensor again."""

    def __init__(self) -> None:
        self._result: torch.Tensor | None = None

    def forward(self, layer: int, qkv: QKV, options: AttentionOptions) -> torch.Tensor:
        """See `AttentionMetadata.forward`."""
        if self._result is None or len(self._result) != len(qkv[0]):
            self._result = super().forward(layer, qkv, options)
        return self._result


def record_nothing(compute: Callable[[Interrupt], torch.Tensor]) -> Compute:
    """Replays of pieces that do nothing; what is between them runs. See `RecordPieces`."""
    calls: list[Callable[[], object]] = []

    def interrupt(
        between: Between, sources: Sequence[torch.Tensor], shape: Sequence[int]
    ) -> torch.Tensor:
        result = sources[0].new_zeros(shape)
        calls.append(partial(between, list(sources), result))
        return result

    logits = compute(interrupt)

    def replay() -> torch.Tensor:
        for between in calls:
            between()
        return logits

    return replay


def times(layers: int, steps: int) -> dict[str, float]:
    """Seconds of a step in each way."""
    model = decoder("llama", layers, "cpu", torch.float32)
    forward = ForwardPass(model, [None] * layers)
    ids = torch.arange(TOKENS)
    inputs: Any = SimpleNamespace(input_ids=ids, positions=ids, logits_indices=ids[:ROWS].clone())
    pieces = PiecewiseGraphs(forward, 256, torch.device("cpu"))
    seconds = {"uncompiled": measured(partial(forward, inputs, Attention()), steps)}
    forward.compiled = CompiledForward(model, layers)
    seconds["compiled"] = measured(partial(forward, inputs, Attention()), steps)
    pieces.capture([16], record_nothing)
    seconds["in pieces"] = measured(partial(pieces.run, inputs, Attention()), steps)
    return seconds


def measured(step: Callable[[], object], steps: int) -> float:
    """The median of so many, after three."""
    seconds = []
    for _ in range(steps + 3):
        begin = thread_time()
        step()
        seconds.append(thread_time() - begin)
    return median(seconds[3:])


def main(arguments: list[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="python -m benches.gpu.mixed_step", description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    few, many = (times(layers, options.steps) for layers in (FEWEST, MOST))
    print("| way | us per layer | us per step beside |\n|---|---:|---:|")
    for way, seconds in few.items():
        layer = (many[way] - seconds) / (MOST - FEWEST)
        print(f"| {way} | {1e6 * layer:.0f} | {1e6 * (seconds - FEWEST * layer):.0f} |")


if __name__ == "__main__":
    main()
