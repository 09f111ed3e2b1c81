"""Steps with prefills as piecewise CUDA graphs: attention runs eagerly, the rest is replayed.

One pass over padded tokens is captured for each number of tokens. It is interrupted at each
layer's attention (breakable graphs of SGLang and vLLM). A step runs in the next larger pass::

    ids, positions ->  piece | attention | piece | attention | ... | piece  -> logits
    padded             graph   T rows      graph   T rows            graph     padded

Attention reads and writes the T rows of the step alone: padding has no keys and values, and no row
of a piece depends on another. This holds for compiled and for uncompiled models.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from pyengine.attention.backend import QKV, AttentionMetadata, AttentionOptions, StepInputs
from pyengine.executor.cuda_graphs import Between, Compute, Interrupt, RecordPieces
from pyengine.kernels.rope import Rotation

_log = logging.getLogger(__name__)

LARGEST = 512
"""Tokens; a larger step keeps a GPU busy for longer than its launches take."""


def piecewise_sizes(max_num_batched_tokens: int) -> list[int]:
    """Numbers of tokens worth a capture, in steps of 32 to 128, then of 64; and the largest."""
    sizes = [16, *range(32, 129, 32), *range(192, LARGEST + 1, 64)]
    largest = min(max_num_batched_tokens, LARGEST)
    return [size for size in sizes if size < largest] + [largest]


@dataclass(slots=True)
class _Step:
    """The step that is replayed, for its attention."""

    num_tokens: int = 0
    metadata: AttentionMetadata | None = None
    zeros: dict[tuple[object, ...], torch.Tensor] = field(default_factory=dict)
    """By type and shape of a row, as many as the largest pass has."""

    def warm_up(
        self, between: Between, sources: Sequence[torch.Tensor], shape: Sequence[int]
    ) -> torch.Tensor:
        """Neither attention nor an interruption. See `Interrupt`."""
        del between
        result = sources[0].new_zeros(shape)
        key = (result.dtype, *shape[1:])
        if len(self.zeros.get(key, ())) < len(result):
            self.zeros[key] = result.clone()  # the pass may write into its own
        return result

    def attend(self, layer: int, qkv: QKV, options: AttentionOptions, into: torch.Tensor) -> None:
        """Attend to the rows of the step; zeros for the others.

        Other numbers lie there, and those that are not finite would reach the choice of experts.
        """
        assert self.metadata is not None
        attended = self.metadata.forward(layer, qkv, options)
        zeros = self.zeros[into.dtype, *into.shape[1:]]
        torch.cat((attended, zeros[: len(into) - len(attended)]), out=into)


@dataclass(frozen=True, slots=True)
class _Pass:
    """A captured pass: inputs that never move, and its replay."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    logits_indices: torch.Tensor
    replay: Compute


class PiecewiseGraphs:
    """The captured passes of all sizes.

    `forward(inputs, metadata)` runs the model and returns the logits of `inputs.logits_indices`. It
    reads the ids, positions and rows of `inputs`. `max_num_samples` is the most rows of a step.
    """

    def __init__(
        self,
        forward: Callable[[StepInputs, AttentionMetadata], torch.Tensor],
        max_num_samples: int,
        device: torch.device,
    ) -> None:
        self._forward = forward
        self._max_num_samples = max_num_samples
        self._device = device
        self._passes: dict[int, _Pass] = {}
        self._step = _Step()  # not self, which would be a reference cycle
        self.sizes: list[int] = []
        """The numbers of tokens that are captured, smallest first."""

    def capture(self, sizes: Sequence[int], record: RecordPieces) -> None:
        """Capture a pass for each size, the largest first: their memory is shared.

        No capture follows one that fails. The log says why. Larger steps, and all without a pass,
        run eagerly.
        """
        left = sorted(sizes)
        while left:
            try:
                captured = self._captured(left[-1], record)
            except Exception as error:  # any kernel may refuse to be captured
                said = f"{type(error).__name__}: {error}"
                _log.warning("no piecewise CUDA graphs for steps of %s tokens, %s", left, said)
                break
            self._passes[left.pop()] = captured
        self.sizes = sorted(self._passes)

    @torch.inference_mode()
    def _captured(self, size: int, record: RecordPieces) -> _Pass:
        rows = min(size, self._max_num_samples)
        ids, positions, logits_indices = (
            torch.zeros(count, dtype=torch.int64, device=self._device)
            for count in (size, size, rows)
        )
        none, nothing = ids[:0].int(), np.empty(0, np.int32)
        inputs = StepInputs(
            input_ids=ids,
            positions=positions,
            slot_mapping=none,
            query_start_loc=none,
            seq_lens=none,
            block_tables=none,
            logits_indices=logits_indices,
            host_query_start_loc=nothing,
            host_seq_lens=nothing,
            host_block_tables=nothing,
        )
        forward, step = self._forward, self._step
        forward(inputs, _Interrupting(step.warm_up, step))  # all first-use setup runs now

        def compute(interrupt: Interrupt) -> torch.Tensor:
            return forward(inputs, _Interrupting(interrupt, step))

        return _Pass(ids, positions, logits_indices, record(compute))

    def fits(self, num_tokens: int, num_rows: int) -> bool:
        """True if a step of so many tokens, and rows of logits, can be replayed."""
        at = bisect_left(self.sizes, num_tokens)
        return at < len(self.sizes) and num_rows <= min(self.sizes[at], self._max_num_samples)

    @torch.inference_mode()
    def run(self, inputs: StepInputs, metadata: AttentionMetadata) -> torch.Tensor:
        """The logits of `inputs.logits_indices`, valid until the next call.

        `metadata` is of this step. Padding keeps the ids, positions and rows of an earlier step,
        which are valid in this one.
        """
        if isinstance(inputs.input_ids, np.ndarray):
            inputs = inputs.tensors()
        num_tokens, num_rows = len(inputs.input_ids), len(inputs.logits_indices)
        captured = self._passes[self.sizes[bisect_left(self.sizes, num_tokens)]]
        captured.input_ids[:num_tokens].copy_(inputs.input_ids)
        captured.positions[:num_tokens].copy_(inputs.positions)
        captured.logits_indices[:num_rows].copy_(inputs.logits_indices)
        self._step.num_tokens, self._step.metadata = num_tokens, metadata
        try:
            return captured.replay()[:num_rows]
        finally:
            self._step.metadata = None


@dataclass(frozen=True, slots=True)
class _Interrupting:
    """The attention of a pass that is captured: it interrupts the capture in each layer."""

    interrupt: Interrupt
    step: _Step

    def forward(self, layer: int, qkv: QKV, options: AttentionOptions) -> torch.Tensor:
        """See `AttentionMetadata.forward`: of the replayed step's rows."""
        query, _, value = qkv
        rotation, step = options.rotation, self.step
        angles = () if rotation is None else (rotation.cos, rotation.sin)
        turned_by = None if rotation is None else (rotation.layout, rotation.norm)
        options = replace(options, rotation=None)  # which would keep its memory

        def attend(sources: Sequence[torch.Tensor], result: torch.Tensor) -> None:
            query, key, value, *angles = (source[: step.num_tokens] for source in sources)
            turned = options
            if turned_by is not None:
                turned = replace(options, rotation=Rotation(angles[0], angles[1], *turned_by))
            step.attend(layer, (query, key, value), turned, result)

        return self.interrupt(attend, (*qkv, *angles), (*query.shape[:2], value.shape[-1]))
