"""A worker that has graphs without CUDA: `python -m tests.support.capturing_worker SOCKET DRIVER`.

A file says what fails, as for `faulty_worker`: `capture RANK` (the third capture, on that rank);
`pass RANK` (the pass before it); `refresh RANK` (the refresh before a replay, by chance). `inject`
does the same in the process of a test, which is rank 0.
"""

import os
import sys
from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.distributed as dist

from pyengine.attention import choice
from pyengine.executor.tensor_parallel import ranks, worker
from tests.support.faulty_worker import InjectedError, asked
from tests.support.static_attention import StaticBackend, StaticMetadata

_RANDOM = Random(1)
replays: list[int] = []
"""The sizes of the graphs that this process has replayed."""


def _fails(word: str) -> bool:
    return asked() == f"{word} {dist.get_rank()}"


class Recorder:
    """No graph: a capture runs nothing, a replay makes the launches again."""

    def __init__(self, *, has_peers: bool) -> None:
        assert has_peers
        self._captures = 0

    def __call__(self, compute: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        self._captures += 1
        if self._captures == 3 and _fails("capture"):
            raise InjectedError("while capturing")

        def replay() -> torch.Tensor:
            logits = compute()
            replays.append(len(logits))
            return logits

        return replay


class _FaultyMetadata(StaticMetadata):
    def refresh(self, inputs: Any) -> None:
        if _fails("refresh") and _RANDOM.random() < 0.4:
            raise InjectedError("while refreshing")
        super().refresh(inputs)

    def forward(self, layer: int, rows: Any, options: Any) -> torch.Tensor:
        if _fails("pass") and layer == 1 and len(rows[0]) == 2:
            raise InjectedError("in layer 1")
        return super().forward(layer, rows, options)


class CapturedBackend(StaticBackend):
    def graph_metadata(self, inputs: Any) -> StaticMetadata:
        return _FaultyMetadata(self.pool, inputs)


def inject(setattr: Any) -> None:
    """Let the gather backend have graphs; the argument sets an attribute."""
    classes = choice.backend_class
    setattr(ranks, "CudaGraphRecorder", Recorder)
    setattr(
        choice, "backend_class", lambda name: CapturedBackend if name == "gather" else classes(name)
    )


if __name__ == "__main__":
    inject(setattr)
    os._exit(worker.main(sys.argv[1:]))
