"""Sequences and states of a step, for kernels of recurrent layers."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import accumulate
from typing import Any
from unittest.mock import patch

import torch

from pyengine.kv_cache.states import LayerState, StateInputs

NUM_SLOTS = 9
FEW = 8
"""Tokens of a sequence that are taken one after the other, and not in chunks."""
LIMITS = {torch.float32: 2e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
"""Tolerances by the type of rows."""
STEPS = {
    "mixed": ((1, 19, 0, 5, 1, 16, 37), (-1, 2, 3, -1, 5, 6, 6), (1, 2, 4, -1, 5, -1, 7)),
    "decode": ((1, 1, 1, 1), (4, 0, -1, -1), (4, 3, 8, -1)),
    "one": ((3,), (1,), (1,)),
}
"""Lengths, sources and slots of sequences: in place, copied, from zeros, not kept, and empty."""

Compute = Callable[[tuple[torch.Tensor, ...], torch.Tensor, Any], torch.Tensor]
"""Results of rows, a state array, which it changes, and sequences."""


def inputs(step: str) -> StateInputs:
    """The sequences of a step."""
    lengths, sources, slots = STEPS[step]
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return StateInputs(starts, torch.tensor(sources), torch.tensor(slots), ())


def sequences(states: StateInputs) -> Any:
    """The same for kernels."""
    from pyengine.kernels.sequences import Sequences

    return Sequences(states.query_starts, states.sources, states.slots)


def num_tokens(step: str) -> int:
    """The tokens of a step."""
    return sum(STEPS[step][0])


def compare(
    step: str,
    rows: tuple[torch.Tensor, ...],
    shape: tuple[int, ...],
    compute: Compute,
    oracle: Callable[[tuple[torch.Tensor, ...], LayerState, StateInputs], torch.Tensor],
) -> None:
    """Results and states are those of `oracle`; slots that are not written keep their bits.

    `shape` is a slot's.
    """
    own = inputs(step)
    before = torch.randn(NUM_SLOTS, *shape)
    by_kernel, by_torch = before.clone(), before.clone()
    actual = compute(rows, by_kernel, sequences(own))
    expected = oracle(rows, LayerState(by_torch, by_torch), own)
    limit = LIMITS[rows[0].dtype]
    assert actual.dtype == rows[0].dtype and actual.is_contiguous()
    scale = expected.float().abs().max().item()
    torch.testing.assert_close(actual, expected, rtol=limit, atol=limit * scale)
    scale = by_torch.abs().max().item()
    torch.testing.assert_close(by_kernel, by_torch, rtol=2e-5, atol=2e-5 * scale)
    for slot in set(range(NUM_SLOTS)) - set(STEPS[step][2]):
        assert torch.equal(by_kernel[slot], before[slot])
    for slot in set(STEPS[step][2]) - {-1}:
        assert not torch.equal(by_kernel[slot], before[slot])


def check_beside(
    rows: tuple[torch.Tensor, ...],
    shape: tuple[int, ...],
    compute: Compute,
    module: Any,
    kernels: Sequence[str] = ("_chunked_kernel", "_recurrent_kernel"),
) -> None:
    """Sequences have the same bits alone and in one step, which launches `kernels` of `module`.

    `rows` are those of the step "mixed".
    """
    own, launched = inputs("mixed"), []

    class Counted:
        """A kernel whose launches are counted."""

        def __init__(self, kernel: Any, name: str) -> None:
            self._kernel, self._name = kernel, name

        def __getitem__(self, grid: Any) -> Any:
            launched.append(self._name)
            return self._kernel[grid]

    before = torch.randn(NUM_SLOTS, *shape)
    state = before.clone()
    with ExitStack() as stack:
        for name in kernels:
            stack.enter_context(patch.object(module, name, Counted(getattr(module, name), name)))
        together = compute(rows, state, sequences(own))
        assert sorted(launched) == list(kernels)
        launched.clear()
        for index in range(len(own.slots)):
            tokens = slice(*own.query_starts[index : index + 2].tolist())
            count = tokens.stop - tokens.start
            starts = torch.tensor([0, count], dtype=torch.int32)
            each = slice(index, index + 1)
            alone = StateInputs(starts, own.sources[each], own.slots[each], ())
            of_one = before.clone()
            result = compute(tuple(part[tokens] for part in rows), of_one, sequences(alone))
            assert torch.equal(result, together[tokens])
            slot = int(own.slots[index])
            assert slot < 0 or torch.equal(of_one[slot], state[slot])
        chunks = [count for count in STEPS["mixed"][0] if count > FEW]
        assert launched.count("_chunked_kernel") == (len(chunks) if len(kernels) > 1 else 0)


def in_a_wider_row(rows: torch.Tensor) -> torch.Tensor:
    """The same rows, with other numbers between them."""
    flat = rows.flatten(1)
    wide = torch.cat([flat, torch.full_like(flat, 7.0)], 1)
    return wide[:, : flat.shape[1]].unflatten(1, rows.shape[1:])
