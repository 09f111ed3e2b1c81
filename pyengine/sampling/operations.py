"""The operations of the sampler on logits: NumPy arrays on the CPU, tensors on other devices.

The sampler is written once, over `Operations`. `array_operations` needs NumPy and the Rust kernels
only; `tensor_operations`, which imports torch, is imported for tensors. Tensors on the CPU have the
tensor operations, so that tests can compare both.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from pyengine.sampling.array_operations import ARRAYS
from pyengine.sampling.draws import DrawBatch
from pyengine.utils.devices import Device

if TYPE_CHECKING:
    import torch

Logits: TypeAlias = "npt.NDArray[Any] | torch.Tensor"
"""Logits [B, V] of any floating type; in arrays, uint16 has the bits of bfloat16."""
TokenIds: TypeAlias = "npt.NDArray[np.int64] | torch.Tensor"
"""Token ids, int64: of the kind of the logits, on their device."""
LogprobRow: TypeAlias = tuple[int, float, int, Sequence[int], Sequence[float]]
"""A token, its log-probability and rank; the most probable ids, and theirs."""


class Operations(Protocol):
    """Operations on arrays of one kind, on one device. None waits for the device."""

    @property
    def device(self) -> "Device | torch.device":
        """The device of the tensors; `CPU` for arrays."""

    def float32_copy(self, logits: Any) -> Any:
        """A contiguous copy."""

    def fill(self, values: Any, index: Any, value: float) -> None:
        """Set the elements, or rows, at `index` to `value`."""

    def where(self, condition: Any, chosen: Any, other: Any) -> Any:
        """`chosen` where the condition is true, else `other`."""

    def clamp_max(self, values: Any, limit: float) -> Any:
        """The values, or `limit` where they are larger."""

    def largest(self, logits: Any) -> Any:
        """The id of each row's largest logit, of equal ones the lowest: int64 [B]."""

    def logits_of(self, logits: Any, token_ids: Any) -> Any:
        """The logit of one token per row: [B]."""

    def draw(self, logits: Any, draws: DrawBatch, numbers: npt.NDArray[np.float64]) -> Any:
        """One token for each of the rows of `draws`, see `sampler.draw`: int64 [R]."""

    def forbid(
        self,
        logits: Any,
        rows: npt.NDArray[np.int64],
        bits: npt.NDArray[np.int32],
        *,
        to_copy: bool,
    ) -> Any:
        """Logits that are -inf where the bits of `rows` are 0: themselves, or a copy.

        `bits` are int32 [R, W]; tokens past their end are forbidden.
        """

    def logprobs(
        self, logits: Any, token_ids: Any, top: Sequence[int], rows: Any
    ) -> Callable[[], Iterable[LogprobRow]]:
        """Begin to compute what `PendingLogprobs` reports; the function waits for it."""


def operations_of(logits: Logits) -> Operations:
    """The operations on these logits."""
    if isinstance(logits, np.ndarray):
        return ARRAYS
    from pyengine.sampling.tensor_operations import tensor_operations

    return tensor_operations(logits.device)


def largest(logits: Logits) -> Any:
    """Return the id of each row's largest logit, of equal ones the lowest: int64 [B]."""
    return operations_of(logits).largest(logits)
