"""A block manager beside a simulated device, so that a wrong block is seen and not only counted.

The device keeps for each slot the request and the tokens whose KV was written there. A step writes
what it computes and then reads all tokens up to its last one; each must be there.
"""

from dataclasses import dataclass, field
from typing import Any

from pyengine.kv_cache import BlockManager, Prefilled, Remapping, Sequence, StepBuffers, StepPlan
from tests.support.blocks import step_arrays

KV = tuple[bytes, tuple[int, ...]]
"""The KV in a slot: the weights that computed it, and the tokens up to its position."""


@dataclass(eq=False)
class Request:
    """A sequence, with the tokens that the engine knows."""

    sequence: Sequence
    tokens: list[int]
    weights: bytes

    @property
    def table(self) -> list[int]:
        return self.sequence.block_table

    def kv(self, position: int) -> KV:
        return self.weights, tuple(self.tokens[: position + 1])


@dataclass(eq=False)
class Step:
    """An open step. It is launched with the block tables at the time of `launch`."""

    pool: "Pool"
    plan: StepPlan
    requests: list[Request] = field(default_factory=list)
    arrays: dict[str, Any] = field(default_factory=dict)

    def prefill(self, request: Request, max_tokens: int = 64) -> Any:
        answer = self.plan.prefill(request.sequence, max_tokens)
        if isinstance(answer, Prefilled):
            self.requests.append(request)
        return answer

    def decode(self, *requests: Request) -> list[int]:
        rejected = self.plan.decode([request.sequence for request in requests])
        self.requests += [each for at, each in enumerate(requests) if at not in rejected]
        return rejected

    def launch(self) -> "Step":
        """Give the device its inputs: it may run the step from now on."""
        arrays = step_arrays(tokens=64, sequences=8, width=self.pool.manager.num_blocks)
        self.plan.fill(StepBuffers(**arrays))
        self.arrays = {name: array.tolist() for name, array in arrays.items()}
        return self

    def commit(self, *sampled: int) -> list[Remapping]:
        """The device has run the step; each request that samples gets one of the tokens."""
        if not self.arrays:
            self.launch()
        sampling = self.pool.run(self)
        remappings = self.plan.commit(list(sampled))
        for request, token in zip(sampling, sampled, strict=True):
            request.tokens.append(token)
        return remappings

    def rollback(self) -> None:
        self.plan.rollback()


class Pool:
    """A block manager and its device."""

    def __init__(self, manager: BlockManager) -> None:
        self.manager = manager
        self.slots: dict[int, KV] = {}
        [window] = manager.groups
        self.window = window or 1 << 30

    def request(self, *tokens: int, namespace: bytes = b"", weights: bytes = b"") -> Request:
        """A new request. Its KV depends on `weights`, which the manager does not see."""
        sequence = self.manager.sequence(tokens, namespace=namespace)
        return Request(sequence, list(tokens), weights)

    def begin(self) -> Step:
        return Step(self, self.manager.begin_step(64))

    def compute(self, *requests: Request, sampled: int = 0) -> list[int]:
        """One step that prefills these requests; returns how many tokens each found cached."""
        step = self.begin()
        cached = [step.prefill(request).num_cached_tokens for request in requests]
        step.commit(*[sampled] * len(requests))
        return cached

    def write(self, block: int, kv: KV) -> None:
        """A transfer writes the KV of a block whose last token is that of `kv`."""
        weights, tokens = kv
        size = self.manager.block_size
        for offset in range(size):
            end = len(tokens) - size + offset + 1
            self.slots[block * size + offset] = weights, tokens[:end]

    def run(self, step: Step) -> list[Request]:
        """Copy, write, read. Returns the requests that sample."""
        size, arrays = self.manager.block_size, step.arrays
        for source, copy in step.plan.copies():
            for offset in range(size):
                if source * size + offset in self.slots:
                    self.slots[copy * size + offset] = self.slots[source * size + offset]
        starts = arrays["query_start_loc"]
        for row, request in enumerate(step.requests):
            for at in range(starts[row], starts[row + 1]):
                if arrays["slot_mapping"][at] >= 0:
                    position = arrays["positions"][at]
                    self.slots[arrays["slot_mapping"][at]] = request.kv(position)
        sampling = []
        for row, request in enumerate(step.requests):
            length, table = arrays["seq_lens"][row], arrays["block_tables"][row]
            first = arrays["positions"][starts[row]] - self.window + 1
            for position in range(max(0, first), length):
                held = self.slots.get(table[position // size] * size + position % size)
                assert held == request.kv(position), f"position {position} of {request.tokens}"
            if length == len(request.tokens):
                sampling.append(request)
        return sampling

    def cached(self, *tokens: int, namespace: bytes = b"") -> int:
        """How many leading tokens are cached."""
        with self.manager.match_prefix(tokens, namespace=namespace) as pin:
            return pin.num_tokens

    def usage(self) -> tuple[int, int, int, int, int]:
        """Blocks that are free, evictable, active, pinned, loading: together all blocks."""
        usage = self.manager.usage()
        counts = usage.free, usage.evictable, usage.active, usage.pinned, usage.loading
        assert sum(counts) == self.manager.num_blocks
        return counts
