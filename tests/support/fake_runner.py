"""A runner without a model: logits that depend on exactly what the paged KV cache holds.

Every slot keeps the token whose KV would be there, and the layer group that wrote it. A row's
logits are drawn from a hash of the tokens that the table of the group with the widest window leads
to, so one wrong, stale or lost block changes the tokens that come out; the other groups must lead
to the same tokens, as far back as they see. A slot of -1 must hold its token already.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pyengine.executor.model_runner import Forward, StepLogits
from pyengine.kv_cache import StepBuffers

VOCAB_SIZE = 97
Logits: TypeAlias = npt.NDArray[np.float32]
_LOGITS: dict[int, Logits] = {}


def logits_of(tokens: Any) -> Logits:
    """The logits after these tokens: what the model would say, paged or not."""
    key = hash(tuple(int(token) for token in tokens))
    if key not in _LOGITS:
        random = np.random.default_rng(key % 2**63)
        _LOGITS[key] = random.standard_normal(VOCAB_SIZE, dtype=np.float32) * 3
    return _LOGITS[key]


def continued(prompt: list[int], length: int, window: int | None = None) -> list[int]:
    """The greedy continuation, without engine, scheduler or cache.

    `window` is the widest of the groups', if all of them slide.
    """
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(int(logits_of(tokens[-(window or len(tokens)) :]).argmax()))
    return tokens[len(prompt) :]


@dataclass
class Fault:
    """Raise on the n-th execution, once."""

    at: int
    error: BaseException


class FakeRunner:
    """Stands where `ModelRunner` does."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        groups: Sequence[int | None] = (None,),
        width: int | None = None,
        max_tokens: int = 4096,
        max_seqs: int = 256,
    ) -> None:
        self.block_size = block_size
        self.windows = groups
        self.slots = np.full((num_blocks + 1) * block_size, -1, dtype=np.int64)
        self.writers = np.full_like(self.slots, -1)
        self.computed: list[int] = []
        """Tokens computed by each execution."""
        self.fault: Fault | None = None
        self._sets = [
            {
                "input_ids": np.zeros(max_tokens, np.int64),
                "positions": np.zeros(max_tokens, np.int64),
                "slot_mapping": np.zeros((len(groups), max_tokens), np.int64),
                "query_start_loc": np.zeros(max_seqs + 1, np.int32),
                "seq_lens": np.zeros(max_seqs, np.int32),
                "block_tables": np.zeros((len(groups), max_seqs, width or num_blocks), np.int32),
                "logits_indices": np.zeros(max_seqs, np.int64),
            }
            for _ in range(2)
        ]
        self._buffers = [StepBuffers(**arrays) for arrays in self._sets]
        self.arrays = self._sets[0]
        """The inputs of the running step."""
        self.pending = 0
        """Tokens that were computed before the host knew them."""

    def prepare(
        self,
        plan: Any,
        *,
        extra_rows: Any = None,
        hidden_rows: Any = None,
        mtp: Any = None,
        states: Any = None,
    ) -> Forward:
        """Take what is needed of the plan; the rest happens when the device gets there."""
        self._sets.reverse()
        self._buffers.reverse()
        plan.fill(self._buffers[0])
        arrays, copies = self._sets[0], plan.copies()
        sizes = plan.num_tokens, plan.num_sequences, plan.num_samples

        def forward(sampled: Any) -> StepLogits:
            self.arrays = arrays
            return self.run(sizes, copies, sampled, extra_rows)

        return forward

    def run(
        self, sizes: tuple[int, int, int], copies: Any, sampled: Any, extra_rows: Any
    ) -> StepLogits:
        if self.fault is not None and len(self.computed) == self.fault.at:
            fault, self.fault = self.fault, None
            raise fault.error
        for source, target in copies:
            for kept in (self.slots, self.writers):
                self.block(kept, target)[:] = self.block(kept, source)
        total, sequences, samples = sizes
        a = self.arrays
        ids = a["input_ids"][:total]
        pending = ids < 0
        self.pending += int(pending.sum())
        if pending.any():
            ids[pending] = sampled[-1 - ids[pending]]
        for group, slots in enumerate(a["slot_mapping"][:, :total]):
            written = slots >= 0
            self.slots[slots[written]] = ids[written]  # the whole batch writes before any row reads
            self.writers[slots[written]] = group
        rows = [context for row in range(sequences) for context in self._contexts(row)]
        self.computed.append(total)
        wanted = a["logits_indices"][:samples]
        extra = [] if extra_rows is None else extra_rows
        return StepLogits(self._stack(rows, wanted), self._stack(rows, extra))

    def block(self, kept: Any, block: int) -> Any:
        """The part of an array of slots that is this block's."""
        return kept[block * self.block_size : (block + 1) * self.block_size]

    def visible(self, row: int, group: int) -> Any:
        """The slots that the new tokens of a sequence see in the layers of this group, in order."""
        a, size = self.arrays, self.block_size
        start, end = a["query_start_loc"][row : row + 2]
        length = int(a["seq_lens"][row])
        window = self.windows[group] or length
        first = max(0, length - int(end - start) - window + 1)
        positions = np.arange(first, length)
        blocks = a["block_tables"][group, row, positions // size].astype(np.int64)
        return blocks * size + positions % size

    def _contexts(self, row: int) -> list[Any]:
        """The tokens visible to each new token of a sequence; all block tables must agree."""
        a = self.arrays
        start, end = a["query_start_loc"][row : row + 2]
        length = int(a["seq_lens"][row])
        seen = []
        for group in range(len(self.windows)):
            slots = self.visible(row, group)
            assert (self.slots[slots] >= 0).all(), "a position that was never written is read"
            assert (self.writers[slots] == group).all(), "another group's block is read"
            seen.append(self.slots[slots])
        tokens = max(seen, key=len)
        for narrower in seen:
            assert (narrower == tokens[len(tokens) - len(narrower) :]).all(), "groups disagree"
        assert (a["positions"][start:end] == np.arange(length - (end - start), length)).all()
        assert (tokens[len(tokens) - (end - start) :] == a["input_ids"][start:end]).all()
        widest = length if None in self.windows else max(w for w in self.windows if w)
        ends = range(len(tokens) - int(end - start) + 1, len(tokens) + 1)
        return [tokens[max(0, at - widest) : at] for at in ends]

    @staticmethod
    def _stack(rows: list[Any], wanted: Any) -> Logits:
        if len(wanted) == 0:
            return np.empty((0, VOCAB_SIZE), np.float32)
        return np.stack([logits_of(rows[row]) for row in wanted])
