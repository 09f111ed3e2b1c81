"""An oracle of the contents of a KV cache, and the expected state of its sequences.

The KV of a position depends on the namespace and on every token up to it. That chain is what a
slot holds here. A step writes it the way a runner does: from the filled arrays, all rows before any
row is read.
"""

from dataclasses import dataclass, field
from typing import Any

from pyengine.kv_cache import Pin, Sequence, StepBuffers, StepPlan, Transfer
from tests.support.blocks import step_arrays

Chain = tuple[bytes, tuple[int, ...]]


@dataclass(eq=False)
class ExpectedSequence:
    """The expected state of a sequence."""

    held: list[Sequence]
    """Its handle; empty once it was dropped."""
    namespace: bytes
    tokens: list[int]
    computed: int = 0
    table: list[int] = field(default_factory=list)
    read_cache: bool = True

    @property
    def handle(self) -> Sequence:
        return self.held[0]


@dataclass(eq=False)
class ExpectedEntry:
    """The expected entry of a sequence in a plan."""

    expected: ExpectedSequence
    start: int
    length: int
    before: tuple[int, list[int]]

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def samples(self) -> bool:
        return self.end == len(self.expected.tokens)


@dataclass(eq=False)
class ExpectedPin:
    """The expected state of a pin."""

    handle: Pin
    namespace: bytes
    tokens: list[int]
    blocks: list[int]


@dataclass(eq=False)
class ExpectedTransfer:
    """The expected state of a transfer."""

    held: list[Transfer]
    """Its handle; empty once it was dropped."""
    expected: ExpectedSequence
    """The sequence that asked for it."""
    namespace: bytes
    tokens: list[int]
    """Up to its last block."""
    first: int
    blocks: list[int]
    """Those that it fills, of consecutive indices from `first` on."""
    holds: list[int]
    """Cached blocks before them."""
    is_abandoned: bool = False

    @property
    def handle(self) -> Transfer:
        return self.held[0]


class KVOracle:
    """The token in every slot of a pool."""

    def __init__(self, block_size: int, num_blocks: int) -> None:
        self.block_size = block_size
        self.slots: dict[int, Chain] = {}
        self.arrays = step_arrays(tokens=256, sequences=64, width=num_blocks)
        self.buffers = StepBuffers(**self.arrays)

    @staticmethod
    def chain(expected: ExpectedSequence | ExpectedPin, position: int) -> Chain:
        return expected.namespace, tuple(expected.tokens[: position + 1])

    def assert_holds(
        self, expected: ExpectedSequence | ExpectedPin, blocks: list[int], length: int
    ) -> None:
        """The first `length` positions, read through `blocks`, are those of this sequence."""
        for position in range(length):
            block = blocks[position // self.block_size]
            slot = block * self.block_size + position % self.block_size
            assert self.slots.get(slot) == self.chain(expected, position), (
                expected,
                position,
                block,
            )

    def load(self, transfer: ExpectedTransfer, num_blocks: int) -> None:
        """The bytes of its first blocks have come; in the others there is anything."""
        size = self.block_size
        for row, block in enumerate(transfer.blocks):
            for offset in range(size):
                end = (transfer.first + row) * size + offset + 1
                chain = transfer.namespace, tuple(transfer.tokens[:end])
                self.slots[block * size + offset] = chain if row < num_blocks else (b"torn", ())

    def chain_of(self, block: int) -> Chain:
        """Of the last token in a block that is computed; all its tokens are of one prefix."""
        size = self.block_size
        namespace, tokens = self.slots[(block + 1) * size - 1]
        for offset in range(size):
            before = tokens[: len(tokens) - size + offset + 1]
            assert self.slots[block * size + offset] == (namespace, before)
        return namespace, tokens

    def copy(self, source: int, copy: int) -> None:
        for offset in range(self.block_size):
            held = self.slots.get(source * self.block_size + offset)
            if held is not None:
                self.slots[copy * self.block_size + offset] = held

    def execute(self, plan: StepPlan, entries: list[ExpectedEntry]) -> None:
        """Fill, compare with the expected entries, copy, write, read."""
        plan.fill(self.buffers)
        for source, copy in plan.copies():
            self.copy(source, copy)
        a: dict[str, Any] = {name: array.tolist() for name, array in self.arrays.items()}
        starts, sampling = a["query_start_loc"], []
        for row, entry in enumerate(entries):
            rows, positions = range(starts[row], starts[row + 1]), range(entry.start, entry.end)
            assert a["positions"][rows.start : rows.stop] == list(positions)
            for at, position in zip(rows, positions, strict=True):
                assert a["input_ids"][at] == entry.expected.tokens[position]
                slot = a["slot_mapping"][at]
                if slot >= 0:
                    self.slots[slot] = self.chain(entry.expected, position)
            assert a["seq_lens"][row] == entry.end
            if entry.samples:
                sampling.append(rows.stop - 1)
        for row, entry in enumerate(entries):
            self.assert_holds(entry.expected, a["block_tables"][row], entry.end)
        assert a["logits_indices"][: len(sampling)] == sampling
        assert (plan.num_tokens, plan.num_samples) == (starts[len(entries)], len(sampling))
