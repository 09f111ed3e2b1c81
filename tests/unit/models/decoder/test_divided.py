"""Ranks that divide a model compute what one process computes; each reads its part only."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pyengine.attention.backend import AttentionBackend
from pyengine.attention.cpu import CpuBackend
from pyengine.attention.gather import GatherBackend
from pyengine.errors import ConfigurationError
from pyengine.kv_cache import CpuAttention
from pyengine.models.decoder.checkpoint import StoredTensor
from pyengine.models.decoder.decoder import Decoder
from pyengine.models.decoder.loading import open_model, spec_of
from pyengine.models.decoder.ranks import Rank, divided
from tests.unit.models.decoder.steps import Runner, Running, generate
from tests.unit.models.decoder.test_families import SETS, TOLERANCE, Saved
from tests.unit.models.decoder.tiny_models import MODELS, Tiny

_EVEN = {
    "gemma4-keys": {"num_global_key_value_heads": 2},
    "mimo_v2_flash": {"num_attention_heads": 8, "num_key_value_heads": 2},
}
"""Settings of models that two ranks cannot divide as they are."""


class Meeting:
    """Threads of one process that meet as ranks do."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.rows: list[Any] = [None] * size

    def exchanged(self, number: int, rows: Any) -> list[Any]:
        """The rows of all ranks."""
        self.rows[number] = rows
        self.barrier.wait()
        found = list(self.rows)
        self.barrier.wait()
        return found


@dataclass(frozen=True, slots=True)
class ThreadRank(Rank):
    """A rank that is a thread of this process."""

    meeting: Meeting = field(default_factory=lambda: Meeting(1))

    def sum(self, rows: Any) -> Any:
        total = 0
        for each in self.meeting.exchanged(self.number, rows):
            total = total + each
        return total

    def gather(self, rows: Any, width: int) -> Any:
        found = self.meeting.exchanged(self.number, rows)
        cat: Any = torch.cat if isinstance(rows, torch.Tensor) else np.concatenate
        whole = cat(found, 1)
        assert whole.shape[1] == width
        return whole


def ranks(size: int) -> list[Rank]:
    meeting = Meeting(size)
    return [ThreadRank(number, size, meeting) for number in range(size)]


def on_all_ranks(size: int, run: Callable[[Rank], Any]) -> list[Any]:
    """The results of `run` on every rank, at the same time."""
    found: list[Any] = [None] * size
    failures: list[BaseException] = []

    def work(rank: Rank) -> None:
        try:
            found[rank.number] = run(rank)
        except BaseException as error:
            failures.append(error)
            rank.meeting.barrier.abort()  # type: ignore[attr-defined]

    threads = [threading.Thread(target=work, args=(rank,)) for rank in ranks(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return found


def answers(
    folder: Path, kernels: str, prompts: list[list[int]], rank: Rank | None = None
) -> list[Running]:
    made, backend = SETS[kernels]
    opened = open_model(folder)
    decoder = opened.decoder(made()) if rank is None else opened.decoder(made(), rank)
    return generate(Runner(decoder, backend), prompts, 4)


def even(tiny: Tiny) -> Tiny:
    if tiny.name not in _EVEN:
        return tiny
    return Tiny(f"{tiny.name}-even", tiny.family, {**tiny.settings, **_EVEN[tiny.name]})


def _is_divisible(tiny: Tiny) -> bool:
    settings = even(tiny).configuration
    return not settings.get("num_key_value_heads", 2) or settings["num_key_value_heads"] % 2 == 0


DIVISIBLE = [tiny for tiny in MODELS if tiny.name != "phi3-partial"]


@pytest.mark.parametrize("kernels", SETS)
@pytest.mark.parametrize("tiny", DIVISIBLE, ids=lambda tiny: tiny.name)
def test_two_ranks_compute_what_one_process_computes(
    tiny: Tiny, kernels: str, saved: Saved, prompts: list[list[int]]
) -> None:
    if kernels == "cpu" and not CpuAttention.is_fast():
        pytest.skip("this processor has no AVX2 with FMA")
    folder, _ = saved(even(tiny))
    whole = answers(folder, kernels, prompts)
    parts = on_all_ranks(2, lambda rank: answers(folder, kernels, prompts, rank))
    for running in parts:
        for expected, found in zip(whole, running, strict=True):
            assert found.tokens == expected.tokens
            difference = torch.stack(found.logits) - torch.stack(expected.logits)
            assert difference.abs().max() <= TOLERANCE
