"""A model's MTP layers as drafters: their keys and values, and their predictions.

Layer i of the MTP layers has, at position j, the token t_j and the state before it: of layer i - 1
at position j - 1, and for the first one the model's last hidden state there. It predicts t_(j + 1).
Its keys and values go into slot j, in one more layer of the block of t_j, and depend on the tokens
up to j only: prefixes are shared as without MTP layers. Layer i begins at position i + 1, and sees
no key before.

In each step the MTP layers compute its tokens, as any other layer does: their keys and values are
those of accepted tokens, whatever drafts were tried. After a token is known, they draft from there;
the step that computes those positions overwrites the drafts' keys and values.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from pyengine.attention.backend import AttentionBackend, AttentionMetadata, StepInputs
from pyengine.attention.choice import backend_class
from pyengine.kv_cache.pool import KVPool
from pyengine.models.loaded import LoadedModel, callable_model
from pyengine.models.model import MTPModel
from pyengine.utils.device_arrays import (
    concatenated,
    device_of,
    largest_ids,
    on_host,
    stacked,
    zeros,
)
from pyengine.utils.host_copy import upload

Int64Array = npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class StepStates:
    """Hidden states of a step's tokens, `[K, heads, hidden]`, once it has run."""

    rows: Any = None


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
    """A sequence to draft for: its row in the plan, its last token, the states before that.

    It gets at most `count` tokens: no more than its last block has slots after that token.
    """

    row: int
    token_id: int
    before: HiddenState
    count: int


class MTPLayers:
    """The MTP layers of a model over the last layers of its KV pool."""

    def __init__(self, loaded: LoadedModel, pool: KVPool, backend: AttentionBackend) -> None:
        """They attend by `backend` if that is "cpu", else by "gather": both skip first keys."""
        self._model = cast("MTPModel", callable_model(loaded.model))
        self._pool = pool
        self._backend: Any = backend
        if backend.name != "cpu":
            self._backend = backend_class("gather")(pool)
        self._count = loaded.num_mtp_layers
        self._size = loaded.hidden_size
        self._dtype = loaded.dtype

    def forward(
        self,
        inputs: StepInputs,
        metadata: AttentionMetadata,
        step: MTPStep | None,
        hidden_rows: Any = None,
    ) -> tuple[Any, Any]:
        """The logits of `inputs.logits_indices`, and the model's hidden states of `hidden_rows`.

        The MTP layers compute the step's tokens, too: `step` has the states before them, and
        receives the states for later steps.
        """
        states = self._model.hidden_states(inputs.input_ids, inputs.positions, metadata)
        self._extend(states, inputs, step)
        hidden = None if hidden_rows is None else states[hidden_rows]
        return self._model.logits(states[inputs.logits_indices]), hidden

    def _extend(self, hidden: Any, inputs: StepInputs, step: MTPStep | None) -> None:
        """Compute the MTP layers' keys and values of a step, from its hidden states."""
        device = device_of(inputs.input_ids)
        starts = inputs.host_query_start_loc[:-1].astype(np.int64)
        before = self._gathered(step.before if step is not None else [None] * len(starts))
        states = [hidden]
        for layer in range(self._count):
            previous = concatenated([states[-1][-1:], states[-1][:-1]])
            previous[upload(starts, device)] = before[:, layer]
            states.append(self._layer(layer, previous, inputs))
        if step is not None:
            step.after.rows = stacked(states[:-1], 1)[upload(step.rows, device)]

    def draft(
        self, rows: Sequence[DraftRow], positions: Int64Array, tables: npt.NDArray[np.int32]
    ) -> list[list[int]]:
        """The MTP layers' predictions for B sequences, each the most probable token.

        `positions` `[B]` are those of their known tokens, `tables` `[G, B, W]` their blocks, with a
        slot for it. A step that will compute these tokens is planned.

        The first layer continues from the known token, each further one from the draft before it;
        after the last layer, that layer repeats.
        """
        device, counts = self._pool.device, np.array([row.count for row in rows], dtype=np.int64)
        ids = upload(np.array([row.token_id for row in rows], dtype=np.int64), device)[:, None]
        before = self._gathered([row.before for row in rows])
        drafts = np.zeros((len(counts), int(counts.max(initial=0))), np.int64)
        alive = np.arange(len(counts))
        states = before[:, 0, None][:, :0]
        for number in range(drafts.shape[1]):
            chosen = np.flatnonzero(counts[alive] > number)
            alive, index = alive[chosen], upload(chosen, device)
            ids, states, before = ids[index], states[index], before[index]
            layer, first = min(number, self._count - 1), positions[alive]
            if number < self._count:
                previous = concatenated([before[:, layer, None], states], 1)
            else:
                previous, first = states[:, -1:], first + number
            width = previous.shape[1]
            inputs = self._inputs(ids[:, -width:], first, tables[:, alive])
            flat = previous.reshape(-1, self._size)
            states = self._layer(layer, flat, inputs).reshape(previous.shape)
            drawn = largest_ids(self._model.mtp_logits(layer, states[:, -1]))
            drafts[alive, number] = on_host(drawn)
            ids = concatenated([ids, drawn[:, None]], 1)
        return [
            tokens[:count] for tokens, count in zip(drafts.tolist(), counts.tolist(), strict=True)
        ]

    def _layer(self, layer: int, previous: Any, inputs: StepInputs) -> Any:
        """One layer over the tokens of `inputs`, `[T]`: its states `[T, hidden]`."""
        prepared = inputs if self._backend.takes_arrays else inputs.tensors()
        metadata = self._backend.metadata(prepared, first_key=layer + 1)
        ids, positions = inputs.input_ids, inputs.positions
        return self._model.mtp_states(layer, ids, previous, positions, metadata)

    def _inputs(self, ids: Any, first: Int64Array, tables: npt.NDArray[np.int32]) -> StepInputs:
        """Rows of some sequences, `ids` `[B, R]` from the positions `first` `[B]` on."""
        count, rows = ids.shape
        size, device = self._pool.block_size, self._pool.device
        positions = first[:, None] + np.arange(rows)
        blocks = tables[:, np.arange(count)[:, None], positions // size]
        slots = blocks.astype(np.int64) * size + positions % size
        starts = np.arange(0, rows * count + 1, rows, dtype=np.int32)
        lens = (first + rows).astype(np.int32)
        return StepInputs(
            input_ids=ids.reshape(-1),
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

    def _gathered(self, wanted: Sequence[HiddenState | None]) -> Any:
        """The states `wanted`, `[B, layers, hidden]`; zeros for missing ones."""
        out = zeros((len(wanted), self._count, self._size), self._dtype, self._pool.device)
        by_step: dict[int, tuple[Any, list[int], list[int]]] = {}
        for row, state in enumerate(wanted):
            if state is not None and state.step.rows is not None:
                key = id(state.step)
                _, targets, sources = by_step.setdefault(key, (state.step.rows, [], []))
                targets.append(row)
                sources.append(state.row)
        for states, targets, sources in by_step.values():
            out[targets] = states[sources]
        return out
