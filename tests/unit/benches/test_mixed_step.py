"""The stand-in for piecewise graphs runs what is between the pieces, and no piece."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from benches.gpu.launches import decoder
from benches.gpu.mixed_step import Attention, measured, record_nothing
from pyengine.attention.backend import QKV, AttentionOptions
from pyengine.executor.model_runner import ForwardPass
from pyengine.executor.piecewise_graphs import PiecewiseGraphs


class CountingAttention(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def forward(self, layer: int, qkv: QKV, options: AttentionOptions) -> torch.Tensor:
        self.rows.append(len(qkv[0]))
        return super().forward(layer, qkv, options)


def test_only_attention_runs_in_a_replay() -> None:
    model = decoder("llama", 2, "cpu", torch.float32)
    calls: list[int] = []

    def counted(*arguments: Any) -> torch.Tensor:
        calls.append(1)
        return model(*arguments)

    forward = ForwardPass(counted, [None] * 2)  # type: ignore[arg-type]
    pieces = PiecewiseGraphs(forward, 8, torch.device("cpu"))
    pieces.capture([16], record_nothing)
    assert len(calls) == 2  # the pass before the capture, and the capture
    ids = torch.arange(5)
    inputs: Any = SimpleNamespace(input_ids=ids, positions=ids, logits_indices=ids[:3])
    attention = CountingAttention()
    assert measured(partial(pieces.run, inputs, attention), 2) > 0
    assert attention.rows == [5, 5] * 5
    assert len(calls) == 2
