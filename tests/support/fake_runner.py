"""A runner without a model: logits that depend on exactly what the paged KV cache holds.

Every slot keeps the token whose KV would be there. A row's logits are drawn from a hash of all
tokens that its block table leads to, so one wrong, stale or lost block changes the tokens that come
out. A slot of -1 must hold its token already.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pyengine.cache import StepBuffers
from pyengine.runner import StepLogits

VOCAB_SIZE = 97
_LOGITS: dict[int, torch.Tensor] = {}


def logits_of(tokens: Any) -> torch.Tensor:
    """The logits after these tokens: what the model would say, paged or not."""
    key = hash(tuple(int(token) for token in tokens))
    if key not in _LOGITS:
        generator = torch.Generator().manual_seed(key % 2**63)
        _LOGITS[key] = torch.randn(VOCAB_SIZE, generator=generator) * 3
    return _LOGITS[key]


def continued(prompt: list[int], length: int) -> list[int]:
    """The greedy continuation, without engine, scheduler or cache."""
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(int(logits_of(tokens).argmax()))
    return tokens[len(prompt) :]


@dataclass
class Fault:
    """Raise on the n-th execution, once."""

    at: int
    error: BaseException


class FakeRunner:
    """Stands where `ModelRunner` does."""

    def __init__(
        self, num_blocks: int, block_size: int, *, max_tokens: int = 4096, max_seqs: int = 256
    ) -> None:
        self.block_size = block_size
        self.slots = np.full((num_blocks + 1) * block_size, -1, dtype=np.int64)
        self.computed: list[int] = []
        """Tokens computed by each execution."""
        self.fault: Fault | None = None
        width = num_blocks
        self.arrays = {
            "input_ids": np.zeros(max_tokens, np.int64),
            "positions": np.zeros(max_tokens, np.int64),
            "slot_mapping": np.zeros(max_tokens, np.int64),
            "query_start_loc": np.zeros(max_seqs + 1, np.int32),
            "seq_lens": np.zeros(max_seqs, np.int32),
            "block_tables": np.zeros((max_seqs, width), np.int32),
            "logits_indices": np.zeros(max_seqs, np.int64),
        }
        self._buffers = StepBuffers(**self.arrays)

    def execute(self, plan: Any, *, extra_rows: Any = None) -> StepLogits:
        if self.fault is not None and len(self.computed) == self.fault.at:
            fault, self.fault = self.fault, None
            raise fault.error
        for source, target in plan.copies():
            size = self.block_size
            kept = self.slots[source * size : (source + 1) * size]
            self.slots[target * size : (target + 1) * size] = kept
        plan.fill(self._buffers)
        total, sequences, samples = plan.num_tokens, plan.num_sequences, plan.num_samples
        a = self.arrays
        ids, slots = a["input_ids"][:total], a["slot_mapping"][:total]
        written = slots >= 0
        self.slots[slots[written]] = ids[written]  # the whole batch writes before any row reads
        rows: list[Any] = []
        for row in range(sequences):
            start, end = a["query_start_loc"][row : row + 2]
            length = int(a["seq_lens"][row])
            blocks = a["block_tables"][row, : -(-length // self.block_size)].astype(np.int64)
            offsets = np.arange(self.block_size)
            context = self.slots[(blocks[:, None] * self.block_size + offsets).ravel()[:length]]
            assert (context >= 0).all(), "a position that was never written is read"
            assert (a["positions"][start:end] == np.arange(length - (end - start), length)).all()
            assert (context[length - (end - start) :] == ids[start:end]).all()
            rows += [context[: position + 1] for position in a["positions"][start:end]]
        self.computed.append(total)
        wanted = a["logits_indices"][:samples]
        extra = [] if extra_rows is None else extra_rows
        return StepLogits(self._stack(rows, wanted), self._stack(rows, extra))

    @staticmethod
    def _stack(rows: list[Any], wanted: Any) -> torch.Tensor:
        if len(wanted) == 0:
            return torch.empty(0, VOCAB_SIZE)
        return torch.stack([logits_of(rows[row]) for row in wanted])
