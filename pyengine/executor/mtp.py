"""A model's MTP layers as drafters: their keys and values, and their predictions.

Layer i of the MTP layers has, at position j, the token t_j and the state before it: of layer i - 1
at position j - 1, and for the first one the model's last hidden state there. It predicts t_(j + 1).
Its keys and values go into slot j, in one more layer of the block of t_j, and depend on the tokens
up to j only: prefixes are shared as without MTP layers. Layer i begins at position i + 1, and sees
no key before.

In each step the MTP layers compute its tokens, as any other layer does: their keys and values are
those of accepted tokens, whatever drafts were tried. After a token is known, they draft from there;
the step that computes those positions overwrites the drafts' keys and values. They attend by the
gather backend.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from pyengine.attention.backend import AttentionPlan, StepInputs
from pyengine.attention.gather import GatherBackend
from pyengine.kv_cache.pool import KVPool
from pyengine.models.loaded import LoadedModel, MTPModel
from pyengine.utils.host_copy import upload

Int64Array = npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class StepStates:
    """Hidden states of a step's tokens, `[K, heads, hidden]`, once it has run."""

    tensor: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class HiddenState:
    """The states of one token, one for each MTP layer: a row of `StepStates`."""

    step: StepStates
    row: int


@dataclass(frozen=True, slots=True)
class MTPStep:
    """The MTP layers' part of a step.

    `before` are the states of the token before each sequence's first one, None if unknown. `rows`,
    int64 `[K]`, are the step's tokens whose states go into `after`.
    """

    before: Sequence[HiddenState | None]
    rows: npt.NDArray[np.int64]
    after: StepStates


@dataclass(frozen=True, slots=True)
class DraftRow:
    """A sequence to draft for: its place in the plan, its last token, the states before that.

    It gets at most `count` tokens: no more than its last block has slots after that token.
    """

    row: int
    token_id: int
    before: HiddenState
    count: int


class MTPLayers:
    """The MTP layers of a model over the last layers of its KV pool."""

    def __init__(self, loaded: LoadedModel, pool: KVPool) -> None:
        self._model = cast(MTPModel, loaded.model)
        self._pool = pool
        self._backend = GatherBackend(pool)
        self._count = loaded.num_mtp_layers
        self._size = loaded.hidden_size
        self._dtype = loaded.dtype

    @torch.inference_mode()
    def forward(
        self, inputs: StepInputs, plan: AttentionPlan, step: MTPStep | None
    ) -> torch.Tensor:
        """The logits of `inputs.logits_indices`; the MTP layers compute the step's tokens, too.

        `step` has the states before them, and receives the states for later steps.
        """
        states = self._model.hidden_states(inputs.input_ids, inputs.positions, plan)
        self._extend(states, inputs, step)
        return self._model.logits(states[inputs.logits_indices])

    def _extend(self, hidden: torch.Tensor, inputs: StepInputs, step: MTPStep | None) -> None:
        """Compute the MTP layers' keys and values of a step, from its hidden states."""
        starts = inputs.query_start_loc[:-1].long()
        before = self._gathered(step.before if step is not None else [None] * len(starts))
        states = [hidden]
        for layer in range(self._count):
            previous = states[-1].roll(1, 0)
            previous[starts] = before[:, layer]
            states.append(self._layer(layer, previous, inputs))
        if step is not None:
            rows = upload(step.rows, self._pool.device)
            step.after.tensor = torch.stack(states[:-1], 1)[rows]

    @torch.inference_mode()
    def draft(
        self, asked: Sequence[DraftRow], positions: Int64Array, tables: npt.NDArray[np.int32]
    ) -> list[list[int]]:
        """The MTP layers' predictions for B sequences, each the most probable token.

        `positions` `[B]` are those of their known tokens, `tables` `[G, B, W]` their blocks, with a
        slot for it. A step that will compute these tokens is planned.

        The first layer continues from the known token, each further one from the draft before it;
        after the last layer, that layer repeats.
        """
        device, counts = self._pool.device, np.array([row.count for row in asked], dtype=np.int64)
        ids = upload(np.array([row.token_id for row in asked], dtype=np.int64), device)[:, None]
        before = self._gathered([row.before for row in asked])
        found = torch.zeros(len(counts), int(counts.max(initial=0)), dtype=torch.int64)
        alive = np.arange(len(counts))
        states = before[:, 0, None][:, :0]
        for number in range(found.shape[1]):
            chosen = np.flatnonzero(counts[alive] > number)
            alive, index = alive[chosen], upload(chosen, device)
            ids, states, before = ids[index], states[index], before[index]
            layer, first = min(number, self._count - 1), positions[alive]
            if number < self._count:
                previous = torch.cat([before[:, layer, None], states], 1)
            else:
                previous, first = states[:, -1:], first + number
            rows = previous.shape[1]
            inputs = self._inputs(ids[:, -rows:], first, tables[:, alive])
            states = self._layer(layer, previous.flatten(0, 1), inputs).view_as(previous)
            drawn = self._model.mtp_logits(layer, states[:, -1]).argmax(-1)
            found[torch.from_numpy(alive), number] = drawn.cpu()
            ids = torch.cat([ids, drawn[:, None]], 1)
        return [
            tokens[:count] for tokens, count in zip(found.tolist(), counts.tolist(), strict=True)
        ]

    def _layer(self, layer: int, previous: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
        """One layer over the tokens of `inputs`, `[T]`: its states `[T, hidden]`."""
        plan = self._backend.plan(inputs, first_key=layer + 1)
        ids, positions = inputs.input_ids, inputs.positions
        return self._model.mtp_states(layer, ids, previous, positions, plan)

    def _inputs(
        self, ids: torch.Tensor, first: Int64Array, tables: npt.NDArray[np.int32]
    ) -> StepInputs:
        """Rows of some sequences, `ids` `[B, R]` from the positions `first` `[B]` on."""
        count, rows = ids.shape
        size, device = self._pool.block_size, self._pool.device
        positions = first[:, None] + np.arange(rows)
        blocks = tables[:, np.arange(count)[:, None], positions // size]
        slots = blocks.astype(np.int64) * size + positions % size
        starts = np.arange(0, rows * count + 1, rows, dtype=np.int32)
        lens = (first + rows).astype(np.int32)
        return StepInputs(
            input_ids=ids.flatten(),
            positions=upload(positions.reshape(-1), device),
            slot_mapping=upload(slots.reshape(len(tables), -1), device),
            query_start_loc=upload(starts, device),
            seq_lens=upload(lens, device),
            block_tables=upload(tables, device),
            logits_indices=upload(starts[1:].astype(np.int64) - 1, device),
            host_query_start_loc=starts,
            host_seq_lens=lens,
            host_block_tables=tables,
        )

    def _gathered(self, wanted: Sequence[HiddenState | None]) -> torch.Tensor:
        """The states `wanted`, `[B, layers, hidden]`; zeros for missing ones."""
        shape = (len(wanted), self._count, self._size)
        out = torch.zeros(shape, dtype=self._dtype, device=self._pool.device)
        by_step: dict[int, tuple[torch.Tensor, list[int], list[int]]] = {}
        for place, state in enumerate(wanted):
            if state is not None and state.step.tensor is not None:
                key = id(state.step)
                _, places, rows = by_step.setdefault(key, (state.step.tensor, [], []))
                places.append(place)
                rows.append(state.row)
        for tensor, places, rows in by_step.values():
            out[places] = tensor[rows]
        return out
