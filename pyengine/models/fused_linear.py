"""Linear layers that multiply the same rows, as one product.

A product has a cost of its own that does not depend on its size. The layers stay where
transformers looks for them. The one that is called first multiplies for all of them; the others,
called with the very same tensor, have their part of what it found.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

ATTENTION = ("q_proj", "k_proj", "v_proj")
GATED = ("gate_proj", "up_proj")
"""Names of layers of one parent that see the same input."""


class _Joint:
    """The product of several layers, and what of it has not been asked for yet.

    Not a module: setting an attribute of one takes microseconds.
    """

    def __init__(self, product: nn.Module, sizes: list[int]) -> None:
        self.product = product
        self._sizes = sizes
        self._rows: torch.Tensor | None = None
        self._parts: Sequence[torch.Tensor] = ()
        self._to_come = 0

    def part(self, rows: torch.Tensor, place: int) -> torch.Tensor:
        """Which nobody may write to before the last part is asked for: `[..., sizes[place]]`."""
        if rows is not self._rows:
            self._rows, self._parts = rows, self.product(rows).split(self._sizes, -1)
            self._to_come = len(self._sizes)
        part = self._parts[place]
        self._to_come -= 1
        if not self._to_come:
            self._rows, self._parts = None, ()
        return part


class JoinedLinear(nn.Module):
    """One of several linear layers that are computed together."""

    def __init__(self, linear: nn.Linear, joint: _Joint, place: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._joint, self._place = joint, place
        self.product = joint.product  # where those who walk over modules find it

    @property
    def weight(self) -> Any:
        """That of all of them: opaque, for its dtype."""
        return self._joint.product.weight

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features]`; not contiguous."""
        return self._joint.part(rows, self._place)


def join_linears(model: nn.Module) -> int:
    """Join what sees the same input, on a device where a product more is a launch more.

    Returns how many layers `model` has of those that can be joined.
    """
    return replace_linears(
        model, lambda module: type(module) is nn.Linear, lambda linear: linear, (ATTENTION, GATED)
    )


def replace_linears(
    model: nn.Module,
    takes: Callable[[nn.Module], bool],
    made: Callable[[nn.Linear], nn.Module],
    together: Sequence[tuple[str, ...]],
) -> int:
    """Replace every linear layer that `takes` takes by what is `made` of it; returns how many.

    Those of a parent whose names stand `together` are joined first. Weights are given back one
    by one, where nothing else holds them.
    """
    num_replaced = 0
    for parent in list(model.modules()):
        names = [name for name, child in parent.named_children() if takes(child)]
        num_replaced += len(names)
        for group in together:
            linears: list[Any] = [getattr(parent, name) for name in group if name in names]
            if len(linears) == len(group) and _go_together(linears):
                joint = _Joint(made(_joined(linears)), [one.out_features for one in linears])
                for place, name in enumerate(group):
                    setattr(parent, name, JoinedLinear(linears[place], joint, place))
                    names.remove(name)
        for name in names:
            setattr(parent, name, made(getattr(parent, name)))
    return num_replaced


def _go_together(linears: Sequence[nn.Linear]) -> bool:
    kinds = {(one.in_features, one.bias is None, one.weight.dtype) for one in linears}
    return len(kinds) == 1


@torch.no_grad()
def _joined(linears: Sequence[nn.Linear]) -> nn.Linear:
    """A layer with the outputs of all of them, one after the other."""
    first, num_outputs = linears[0], sum(one.out_features for one in linears)
    whole = nn.Linear(first.in_features, num_outputs, bias=first.bias is not None, device="meta")
    whole.weight = nn.Parameter(torch.cat([one.weight for one in linears]), requires_grad=False)
    if first.bias is not None:
        whole.bias = nn.Parameter(torch.cat([one.bias for one in linears]), requires_grad=False)
    return whole
