"""What a step looks like to the model and to the attention backends."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pyengine.attention.interface import AttentionOptions, AttentionPlan
from pyengine.core.errors import ConfigurationError

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The T tokens of B sequences of one step, flattened in plan order; G layer groups.

    Tensors, on the device of the model:

    - `input_ids`, `positions`: int64 `[T]`.
    - `slot_mapping`: int64 `[G, T]`, where the layers of a group put each token's keys and
      values; -1: nowhere.
    - `query_start_loc`: int32 `[B + 1]`, where each sequence's tokens begin; the last is T.
    - `seq_lens`: int32 `[B]`, tokens of each sequence after this step.
    - `block_tables`: int32 `[G, B, W]`; a row is valid up to `ceil(seq_len / block_size)`.
      Where a group slides, blocks behind the window of the sequence's first new token read as
      the trash block.
    - `logits_indices`: int64 `[S]`, the rows of the T to sample from.

    The `host_` arrays are views of the same numbers in host memory, so that planning never
    waits for the device. They are valid until the next step is filled in.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    logits_indices: torch.Tensor
    host_query_start_loc: Int32Array
    host_seq_lens: Int32Array
    host_block_tables: Int32Array


@dataclass(slots=True)
class PagedContext:
    """What the model is given as `paged=`: the plan of this step's attention.

    `kept` has, for every layer, the window that its group keeps (None: everything). `attended`
    counts the layers that attended so far; the runner compares it with the layers of the pool,
    since a layer that keeps its state elsewhere would be wrong in silence.
    """

    plan: AttentionPlan
    kept: Sequence[int | None]
    attended: int = field(default=0)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """`AttentionPlan.forward`, counted.

        Raises `ConfigurationError` for a layer that sees further back than its group keeps its
        blocks.
        """
        self.attended += 1
        kept, asked = self.kept[layer], options.sliding_window
        if kept is not None and (asked is None or asked > kept):
            sight = "every position" if asked is None else f"the last {asked} positions"
            raise ConfigurationError(
                f"layer {layer} attends to {sight}, but of its keys and values only the last "
                f"{kept} are kept, as the model's configuration says that its attention slides: "
                "the two contradict each other, this model is not supported"
            )
        return self.plan.forward(layer, query, key, value, options)


class CompiledModel(NamedTuple):
    """What a model is given as `paged=` while it is compiled: the number that names it.

    A graph cannot hold a step; `opaque.running` says which one is meant when it runs.
    """

    number: int
