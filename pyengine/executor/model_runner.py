"""The forward pass of a step, and the interface of runners: tokens and blocks, no requests."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from pyengine.attention.backend import AttentionBackend, AttentionMetadata, StepInputs
from pyengine.attention.context import PagedContext
from pyengine.executor.input_buffers import InputBuffers, Plan, RunnerLimits
from pyengine.executor.mtp import DraftRow, MTPLayers, MTPStep
from pyengine.executor.states import StateLayers, StatePlan, StateSlots, StepStates
from pyengine.kv_cache.pool import KVPool
from pyengine.models.adapters import StepAdapters
from pyengine.models.loaded import LoadedModel, callable_model
from pyengine.models.model import Model
from pyengine.utils.device_arrays import concatenated, device_of, with_known
from pyengine.utils.devices import for_torch, on_device
from pyengine.utils.host_copy import upload
from pyengine.utils.packaging import require_torch
from pyengine.utils.tensors import tensor_of

if TYPE_CHECKING:
    from pyengine.executor.compiled import CompiledForward
    from pyengine.executor.cuda_graphs import Agree, DecodeGraphs, Record, RecordPieces
    from pyengine.executor.piecewise_graphs import PiecewiseGraphs


@dataclass(frozen=True, slots=True)
class StepLogits:
    """Logits in the model's dtype, on its device: arrays on the CPU, else tensors.

    `sampling` is `[S, vocab]`, one row per sample of the plan, in its order. `extra` is
    `[E, vocab]`, the requested further rows, in their order. If the runner replays a graph they are
    its memory: valid until the next step runs. So is `hidden`, `[R, hidden]`: the states after the
    last norm of the requested tokens; None if none were requested.
    """

    sampling: Any
    extra: Any
    hidden: Any = None


Forward: TypeAlias = Callable[[Any], StepLogits]
"""Run a prepared step. The argument: int64 `[S]` on the device, the tokens that the step before
sampled, which this step may compute; None or empty if it computes known tokens only."""


class Runner(Protocol):
    """A model over its KV pool."""

    def prepare(
        self,
        plan: Plan,
        *,
        extra_rows: npt.NDArray[np.int64] | None = None,
        hidden_rows: npt.NDArray[np.int64] | None = None,
        mtp: MTPStep | None = None,
        states: StateSlots | None = None,
    ) -> Forward:
        """Read everything from `plan`; the result computes its tokens.

        `extra_rows` are further rows of logits, in `0 .. num_tokens` (for the log-probabilities of
        a prompt); `hidden_rows` are tokens, in the same range, whose hidden states are wanted: such
        a step runs without graphs and uncompiled. MTP layers compute the same tokens from the
        states in `mtp`, and keep theirs there. `states` are the slots of a model with recurrent
        layers; None: no state is read or kept.

        Two steps may be prepared at a time. They are run in order, each once or never.
        """


class ForwardPass:
    """The forward pass of a model whose layers attend to `windows` (None: to everything)."""

    def __init__(
        self,
        model: Model,
        windows: Sequence[int | None],
        states: StateLayers | None = None,
        *,
        takes_arrays: bool = True,
    ) -> None:
        """`takes_arrays`: the model computes over arrays of the host, not over tensors."""
        self._model, self._takes_arrays = model, takes_arrays
        self._windows = windows
        self._states = states
        self.compiled: CompiledForward | None = None

    def __call__(self, inputs: StepInputs, metadata: AttentionMetadata) -> Any:
        """The logits of `inputs.logits_indices`."""
        states = None if self._states is None else self._states.inputs(inputs)
        slots = inputs.adapter_slots
        if slots is not None and not self._takes_arrays:
            slots = tensor_of(slots)
        context = PagedContext(metadata, self._windows, states=states, adapter_slots=slots)
        if self.compiled is not None:
            return self.compiled(inputs, context)
        ids, positions, rows = inputs.input_ids, inputs.positions, inputs.logits_indices
        return self._model(ids, positions, rows, context)

    def with_hidden(
        self, inputs: StepInputs, metadata: AttentionMetadata, hidden_rows: Any
    ) -> tuple[Any, Any]:
        """The same, and the hidden states of `hidden_rows`; it is never compiled."""
        states = None if self._states is None else self._states.inputs(inputs)
        context = PagedContext(metadata, self._windows, states=states)
        ids, positions, rows = inputs.input_ids, inputs.positions, inputs.logits_indices
        return self._model.with_hidden(ids, positions, rows, hidden_rows, context)


class ModelRunner:
    """Runs a model over its KV pool. See `Runner`."""

    def __init__(
        self,
        loaded: LoadedModel,
        pool: KVPool,
        backend: AttentionBackend,
        limits: RunnerLimits,
        *,
        record: "Record | None" = None,
        agree: "Agree | None" = None,
    ) -> None:
        """With `record`, `capture` can be called; the backend must support graphs then.

        `agree` is for a divided model.
        """
        self._model = loaded.model
        self.pool = pool
        self._is_on_cuda = pool.device.type == "cuda"
        states = None
        if pool.snapshots is not None:
            states = StateLayers(pool.snapshots.states, takes_arrays=loaded.model.takes_arrays)
        windows = pool.groups.layer_windows
        self._forward = ForwardPass(
            callable_model(loaded.model), windows, states, takes_arrays=loaded.model.takes_arrays
        )
        self._adapters = loaded.adapters
        self._backend = backend
        size, device = pool.block_size, pool.device
        apart = record is not None
        if pool.groups.has_parts:
            limits = replace(limits, tables=pool.tables)
        self.buffers = InputBuffers(limits, size, device, backend, apart=apart)
        """The buffers of the next step."""
        self._other_buffers = InputBuffers(
            limits, size, device, backend, apart=apart, beside=self.buffers
        )
        self._mtp = MTPLayers(loaded, pool, backend) if loaded.num_mtp_layers else None
        self._draft_buffers = InputBuffers(limits, size, device) if self._mtp else None
        self._record = record
        self._most_decodes = min(limits.max_num_seqs, limits.max_num_batched_tokens)
        self._most_tokens = limits.max_num_batched_tokens
        self.graphs: DecodeGraphs | None = None
        """Graphs of decode steps, from `capture` on."""
        self.piecewise: PiecewiseGraphs | None = None
        """Graphs of other steps, in pieces, from `capture_piecewise` on."""
        self._agree = agree
        self._most_samples = limits.max_num_samples

    @property
    def graph_sizes(self) -> list[int]:
        """The batch sizes that `capture` is for, smallest first; none without `record`."""
        if self._record is None:
            return []
        from pyengine.executor.cuda_graphs import graph_sizes

        return graph_sizes(self._most_decodes)

    def capture(self, sizes: Sequence[int] | None = None) -> None:
        """Capture decode steps per batch size, `graph_sizes` by default, to replay them.

        Call it after `compile`.
        """
        wanted = self.graph_sizes if sizes is None else sizes
        if self._record is None or not wanted:
            return
        from pyengine.executor.cuda_graphs import DecodeGraphs

        if self.graphs is None:
            backend, blocks, agree = self._backend, self.pool.num_blocks, self._agree
            self.graphs = DecodeGraphs(self._forward, backend, self.buffers, blocks, agree)
        with on_device(self.pool.device):
            self.graphs.capture(wanted, self._record)

    @property
    def piecewise_sizes(self) -> list[int]:
        """The numbers of tokens that `capture_piecewise` is for, smallest first."""
        from pyengine.executor.piecewise_graphs import piecewise_sizes

        return piecewise_sizes(self._most_tokens)

    def capture_piecewise(self, record: "RecordPieces", sizes: Sequence[int] | None = None) -> None:
        """Capture steps that `capture` is not for, per number of tokens. See `capture`.

        Call it after `capture`, and not for a model that is divided or has MTP layers. Nothing is
        captured if `capture` failed.
        """
        if self.graphs is not None and self.graphs.has_failed:
            return
        from pyengine.executor.piecewise_graphs import PiecewiseGraphs

        if self.piecewise is None:
            device = for_torch(self.pool.device)
            self.piecewise = PiecewiseGraphs(self._forward, self._most_samples, device)
        with on_device(self.pool.device):
            self.piecewise.capture(self.piecewise_sizes if sizes is None else sizes, record)

    def compile(self, backend: str = "inductor") -> None:
        """Compile the forward pass, with a message on standard error: it takes a while.

        `backend` is torch's name of the compiler. Raises `ConfigurationError` if it cannot.
        """
        require_torch("compile=True")
        from pyengine.executor.compiled import CompiledForward

        name, start = self._model.name, monotonic()
        print(f"pyengine: compiling {name}, up to a minute or two ...", file=sys.stderr)
        with on_device(self.pool.device):
            self._forward.compiled = CompiledForward(self._model, self.pool.num_layers, backend)
        print(f"pyengine: {name} is compiled ({monotonic() - start:.0f} s)", file=sys.stderr)

    @property
    def is_compiled(self) -> bool:
        """True if `compile` has succeeded."""
        return self._forward.compiled is not None

    def prepare(
        self,
        plan: Plan,
        *,
        extra_rows: npt.NDArray[np.int64] | None = None,
        hidden_rows: npt.NDArray[np.int64] | None = None,
        mtp: MTPStep | None = None,
        states: StateSlots | None = None,
        adapters: StepAdapters | None = None,
    ) -> Forward:
        """See `Runner.prepare`.

        `adapters` are those of a model with adapters; None: no token has one.
        """
        copies = plan.copies()
        step_states = None if states is None else StepStates(cast("StatePlan", plan), states)
        extra = extra_rows if extra_rows is not None and len(extra_rows) else None
        wanted = hidden_rows if hidden_rows is not None and len(hidden_rows) else None
        is_plain = extra is None and wanted is None
        padding = None
        if self.graphs is not None and self.graphs.sizes and is_plain:
            padding = self.graphs.padding(plan)
        slots = None if adapters is None else adapters.slots
        filled = self.buffers.fill(plan, padding, step_states, slots)
        self.buffers, self._other_buffers = self._other_buffers, self.buffers
        num_tokens, num_samples = plan.num_tokens, plan.num_samples
        num_rows = num_samples + (0 if extra is None else len(extra))
        compute: Callable[[StepInputs, AttentionMetadata], Any] = self._forward
        pieces = self.piecewise if padding is None and wanted is None else None
        if pieces is not None and pieces.sizes and pieces.fits(num_tokens, num_rows):
            compute = pieces.run

        def forward(sampled: Any) -> StepLogits:
            if copies:
                self.pool.copy_blocks(copies)
            if step_states is not None:
                step_states.before(self.pool, filled.buffers.arrays.slot_mapping[:, :num_tokens])
            if adapters is not None:
                assert self._adapters is not None
                self._adapters.load(adapters)
            inputs = filled.upload()
            if sampled is not None and len(sampled):  # else no token is pending
                inputs = replace(inputs, input_ids=with_known(inputs.input_ids, sampled))
            hidden = None
            if padding is not None:
                assert self.graphs is not None
                logits = self.graphs.run(inputs)
            else:
                if extra is not None:
                    rows = [inputs.logits_indices, upload(extra, device_of(inputs.logits_indices))]
                    inputs = replace(inputs, logits_indices=concatenated(rows))
                metadata = self._backend.metadata(
                    inputs if self._backend.takes_arrays else inputs.tensors()
                )
                tokens = None
                if wanted is not None:
                    tokens = upload(wanted, device_of(inputs.logits_indices))
                if self._mtp is not None:
                    logits, hidden = self._mtp.forward(inputs, metadata, mtp, tokens)
                elif tokens is not None:
                    logits, hidden = self._forward.with_hidden(inputs, metadata, tokens)
                else:
                    logits = compute(inputs, metadata)
            if step_states is not None:
                step_states.after(self.pool)
            first_extra = num_samples if extra is not None else len(logits)  # else padding
            return StepLogits(logits[:num_samples], logits[first_extra:], hidden)

        return self._on_its_device(forward) if self._is_on_cuda else forward

    def _on_its_device(self, forward: Forward) -> Forward:
        """Make the pool's device the current one while `forward` runs, in whatever thread."""

        def forward_there(sampled: Any) -> StepLogits:
            import torch

            with on_device(self.pool.device), torch.inference_mode():
                return forward(sampled)

        return forward_there

    def prepare_drafts(
        self, plan: Plan, draft_rows: Sequence[DraftRow]
    ) -> Callable[[], list[list[int]]]:
        """Read everything from `plan`, which decodes these sequences; the result drafts for them.

        Only for a model with MTP layers. It runs on the device after the steps that were prepared
        before.
        """
        mtp, buffers = self._mtp, self._draft_buffers
        assert mtp is not None and buffers is not None
        copies = plan.copies()
        buffers.fill(plan)
        rows = [draft.row for draft in draft_rows]
        positions = buffers.arrays.seq_lens[rows].astype(np.int64) - 1
        tables = buffers.tables[:, rows]

        def draft() -> list[list[int]]:
            with on_device(self.pool.device):
                self.pool.copy_blocks(copies)  # the step copies again, to the same effect
                return mtp.draft(draft_rows, positions, tables)

        return draft
