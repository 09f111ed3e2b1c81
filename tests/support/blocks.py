"""Short ways to bring a block manager into a state, and to see that a call left it alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from pyengine.kv_cache import BlockManager, Pin, Remapping, Sequence


def compute(manager: BlockManager, *sequences: Sequence, sampled: int = 0) -> list[Remapping]:
    """One step that prefills every token of these sequences; each gets `sampled` as the next."""
    budget = sum(sequence.num_tokens for sequence in sequences)
    plan = manager.begin_step(budget)
    for sequence in sequences:
        plan.prefill(sequence, budget)
    return plan.commit([sampled] * plan.num_samples)


def computed(manager: BlockManager, tokens: Any, **settings: Any) -> Sequence:
    """A sequence whose tokens are all computed and that has sampled one token, 0."""
    sequence = manager.sequence(tokens, **settings)
    compute(manager, sequence)
    return sequence


def leave_evictable(manager: BlockManager, tokens: Any, **settings: Any) -> list[int]:
    """Compute tokens and free the sequence: its full blocks, now evictable."""
    sequence = computed(manager, tokens, **settings)
    blocks = sequence.block_table[: len(tokens) // manager.block_size]
    sequence.free()
    return blocks


def retain(manager: BlockManager, tokens: Any) -> Pin:
    """A pin on computed tokens that no sequence holds."""
    sequence = computed(manager, tokens)
    pin = sequence.pin()
    sequence.free()
    return pin


def counts(manager: BlockManager, block: int) -> tuple[int, int]:
    """Both counters of a block: refs, seq_refs."""
    return manager.refs(block), manager.seq_refs(block)


def snapshot(manager: BlockManager, *, without: str = "") -> tuple[Any, ...]:
    """Everything that the manager shows of itself, but for one counter."""
    blocks = [(*counts(manager, b), manager.state(b)) for b in range(manager.num_blocks)]
    stats = manager.stats().as_dict()
    stats.pop(without, None)
    return repr(manager.usage()), stats, blocks


@contextmanager
def unchanged(manager: BlockManager, *, without: str = "") -> Iterator[None]:
    """The body leaves the manager as it was (but for one counter), and sound."""
    before = snapshot(manager, without=without)
    yield
    assert snapshot(manager, without=without) == before
    manager.check()


def step_arrays(
    tokens: int = 32,
    sequences: int = 4,
    width: int = 8,
    dtype: npt.DTypeLike = np.int64,
    filler: int = 0,
) -> dict[str, Any]:
    """What `StepBuffers` takes, every element `filler`."""
    shapes: dict[str, tuple[int, ...]] = {
        "input_ids": (tokens,),
        "positions": (tokens,),
        "slot_mapping": (tokens,),
        "query_start_loc": (sequences + 1,),
        "seq_lens": (sequences,),
        "block_tables": (sequences, width),
        "logits_indices": (sequences,),
    }
    return {name: np.full(shape, filler, dtype) for name, shape in shapes.items()}
