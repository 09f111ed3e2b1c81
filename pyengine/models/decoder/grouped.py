"""Mixtures of experts as two grouped products.

Pairs of a token and one of its experts are sorted by expert. On CUDA one kernel multiplies them all
(`kernels/grouped_linear.py`): the host reads no number, so that CUDA graphs record it. Elsewhere
the experts are multiplied one after the other.
"""

from typing import Any

import torch
import torch.nn.functional as F

from pyengine import kernels
from pyengine.kernels.operators import define_operator


def group_pairs(chosen: torch.Tensor, num_groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers of the pairs of `chosen` `[rows, choices]` by group, and the end of each group.

    No number is read on the host.
    """
    groups, order = torch.sort(chosen.reshape(-1), stable=True)
    every = torch.arange(num_groups, device=chosen.device, dtype=groups.dtype)
    return order, torch.searchsorted(groups, every, right=True)


def grouped_linear(*arguments: Any) -> torch.Tensor:
    """`kernels.grouped_linear.grouped_linear` on any device.

    It is an operator in compiled graphs, and where the host reads numbers.
    """
    result: torch.Tensor
    if torch.compiler.is_compiling() or not kernels.has_kernels(arguments[0].device):
        result = torch.ops.pyengine.grouped_linear(*arguments)
    else:
        result = _grouped_linear(*arguments)
    return result


def _grouped_linear(rows: torch.Tensor, *arguments: Any) -> torch.Tensor:
    if not kernels.has_kernels(rows.device):
        return _by_group(rows, *arguments)
    from pyengine.kernels import grouped_linear as kernel  # only where triton is

    return kernel.grouped_linear(rows, *arguments)


def _by_group(  # noqa: PLR0913, PLR0917
    rows: torch.Tensor,
    weight: torch.Tensor,
    order: torch.Tensor | None = None,
    ends: torch.Tensor | None = None,
    choices: int = 1,
    bias: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same by torch's products; the host reads the sizes of groups. There are no `scales`."""
    assert order is not None and ends is not None and scales is None
    results = rows.new_empty(len(order), weight.shape[1])
    start = 0
    for group, end in enumerate(ends.tolist()):
        if start < end:
            pairs = order[start:end]
            own = None if bias is None else bias[group]
            result = F.linear(rows[pairs // choices], weight[group], own)
            if factors is not None:
                result = result * factors[pairs, None]
            results[pairs] = result.to(rows.dtype)
        start = end
    return results


def _shape(
    rows: torch.Tensor, weight: torch.Tensor, order: torch.Tensor | None = None, *_: Any
) -> torch.Tensor:
    return rows.new_empty(rows.shape[0] if order is None else order.shape[0], weight.shape[1])


define_operator(
    "grouped_linear(Tensor rows, Tensor weight, Tensor? order=None, Tensor? ends=None, "
    "int choices=1, Tensor? bias=None, Tensor? scales=None, Tensor? factors=None) -> Tensor",
    _grouped_linear,
    _shape,
)
