"""The inputs of a step: allocated once, filled in place by the block manager."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from pyengine.attention.backend import StepInputs
from pyengine.cache import StepBuffers
from pyengine.core.errors import ConfigurationError
from pyengine.runner.interface import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerLimits:
    """The largest step: tokens, sequences, blocks of one table; and tables of one sequence."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_blocks_per_seq: int
    num_groups: int = 1

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name}={getattr(self, name)}: it must be at least 1")


@dataclass(frozen=True, slots=True)
class HostArrays:
    """NumPy views of the host buffers, at full capacity (shapes as in `StepInputs`)."""

    input_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    slot_mapping: npt.NDArray[np.int64]
    query_start_loc: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    block_tables: npt.NDArray[np.int32]
    logits_indices: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class FilledStep:
    """A step in the host buffers, and what has to go from there to the device."""

    inputs: StepInputs
    copies: list[tuple[torch.Tensor, torch.Tensor]]

    def upload(self) -> StepInputs:
        """Bring the step to the device, in the order of its queue."""
        for source, target in self.copies:
            target.copy_(source, non_blocking=True)
        return self.inputs


class InputBuffers:
    """Host buffers of fixed capacity, pinned for CUDA, and their twins on the device.

    On the CPU the twins are the host buffers themselves, and nothing is copied; with `apart` they
    are memory of their own there too, as a graph's inputs must be.
    """

    def __init__(
        self,
        limits: RunnerLimits,
        device: torch.device,
        *,
        beside: "InputBuffers | None" = None,
        apart: bool = False,
    ) -> None:
        """With `beside`, the device's side is shared with those buffers.

        So the next step can be filled in while the one before may still be read from its host
        buffers; on the device they come one after the other.
        """
        tokens, sequences = limits.max_num_batched_tokens, limits.max_num_seqs
        groups, width = limits.num_groups, limits.max_blocks_per_seq
        shapes = {
            "input_ids": ((tokens,), torch.int64),
            "positions": ((tokens,), torch.int64),
            "slot_mapping": ((groups, tokens), torch.int64),
            "query_start_loc": ((sequences + 1,), torch.int32),
            "seq_lens": ((sequences,), torch.int32),
            "block_tables": ((groups, sequences, width), torch.int32),
            "logits_indices": ((sequences,), torch.int64),
        }
        self._host = {
            name: torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
            for name, (shape, dtype) in shapes.items()
        }
        self._device = self._host
        if device.type != "cpu" or apart:
            self._device = beside._device if beside else _like(self._host, device)
        self.arrays = HostArrays(**{name: host.numpy() for name, host in self._host.items()})
        self._sizes = (0, 0, 0)
        self._filled = self._views(*self._sizes)

    @cached_property
    def step_buffers(self) -> StepBuffers:
        """The same arrays as the block manager writes them."""
        return StepBuffers(
            **{name: getattr(self.arrays, name) for name in HostArrays.__dataclass_fields__}
        )

    def fill(self, plan: Plan) -> FilledStep:
        """Let `plan` write its step. Only the rows of this step will be copied.

        A pending token is written as `-1 - row` (see `ModelRunner`). The result refers to the
        buffers: it is valid until the next call.
        """
        plan.fill(self.step_buffers)
        sizes = (plan.num_tokens, plan.num_sequences, plan.num_samples)
        if sizes != self._sizes:
            self._filled = self._views(*sizes)
            self._sizes = sizes
        return self._filled

    def device_inputs(self, tokens: int, sequences: int, samples: int) -> StepInputs:
        """The device's side of a step of this size; what is in it, a later step may overwrite."""
        return self._views(tokens, sequences, samples).inputs

    def _views(self, tokens: int, sequences: int, samples: int) -> FilledStep:
        """The buffers of a step of this size, and what to copy from the host to the device.

        Decoding has the same size step after step, and then they are used again.
        """
        rows = {
            "input_ids": tokens,
            "positions": tokens,
            "slot_mapping": tokens,
            "query_start_loc": sequences + 1,
            "seq_lens": sequences,
            "block_tables": sequences,
            "logits_indices": samples,
        }
        views: dict[str, torch.Tensor] = {}
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, count in rows.items():
            by_group = name in ("slot_mapping", "block_tables")
            part = (slice(None), slice(count)) if by_group else slice(count)
            source, views[name] = self._host[name][part], self._device[name][part]
            if self._device is not self._host:  # each group is a copy, as they lie apart
                pairs = (
                    zip(source, views[name], strict=True) if by_group else [(source, views[name])]
                )
                copies += pairs
        inputs = StepInputs(
            **views,
            host_query_start_loc=self.arrays.query_start_loc[: sequences + 1],
            host_seq_lens=self.arrays.seq_lens[:sequences],
            host_block_tables=self.arrays.block_tables[:, :sequences],
        )
        return FilledStep(inputs, copies)


def _like(host: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor, device=device) for name, tensor in host.items()}
