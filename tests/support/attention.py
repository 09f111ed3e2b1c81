"""Steps for attention backends, made by hand."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pyengine.attention.backend import SharedRows, StepInputs


def shared_rows(
    group: int, order: npt.NDArray[np.int32], prefixes: npt.NDArray[np.int32]
) -> SharedRows:
    """The sequences that share leading blocks, as the block manager writes them."""
    shared = SharedRows(group, len(order))
    shared.order, shared.prefixes = order, prefixes
    return shared


def step_inputs(
    starts: npt.NDArray[np.int32],
    lens: npt.NDArray[np.int32],
    tables: npt.NDArray[np.int32],
    positions: npt.NDArray[np.int64],
    slots: npt.NDArray[np.int64],
    **more: Any,
) -> StepInputs:
    """The arrays of a step as backends take them, without token ids unless these are given."""
    none = torch.zeros(0, dtype=torch.int64)
    return StepInputs(
        **{"input_ids": none, "logits_indices": none, **more},
        positions=torch.from_numpy(positions),
        slot_mapping=torch.from_numpy(slots),
        query_start_loc=torch.from_numpy(starts),
        seq_lens=torch.from_numpy(lens),
        block_tables=torch.from_numpy(tables),
        host_query_start_loc=starts,
        host_seq_lens=lens,
        host_block_tables=tables,
    )


def inputs_of(
    new_and_context: list[tuple[int, int]], *groups: list[list[int]], block: int
) -> StepInputs:
    """A step of sequences, (new tokens, tokens before them) each; their tables, per layer group."""
    starts = np.cumsum([0, *(n for n, _ in new_and_context)], dtype=np.int32)
    lens = np.array([n + c for n, c in new_and_context], dtype=np.int32)
    width = max(map(len, groups[0]))
    padded = np.array(
        [[t + [0] * (width - len(t)) for t in tables] for tables in groups], dtype=np.int32
    )
    spans = [range(context, context + new) for new, context in new_and_context]
    slots = [
        [
            t[p // block] * block + p % block
            for t, span in zip(tables, spans, strict=True)
            for p in span
        ]
        for tables in groups
    ]
    positions = np.array([p for span in spans for p in span])
    return step_inputs(starts, lens, padded, positions, np.array(slots))
