"""How a checkpoint has the quantised weights of its linear layers."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn

from pyengine.errors import ModelLoadError

Read = Callable[[nn.Module], Callable[[str], torch.Tensor]]
"""For a layer: reads a tensor of the checkpoint by the layer's own name for it."""

Shape = tuple[int, ...]


class PackedLayout(ABC):
    """How a checkpoint has the weights of its linear layers."""

    name = ""
    key_name = ""
    """A tensor that quantised layers have, and others have not."""
    dtypes: ClassVar[Mapping[str, str]] = {}
    """Formats of tensors, as safetensors has them, where one differs from those of floats."""

    @abstractmethod
    def shapes(self, outputs: int, inputs: int) -> dict[str, tuple[Shape, ...]]:
        """Names of the tensors of a layer, with the shapes that each may have."""

    @abstractmethod
    def unfit(self, outputs: int, inputs: int) -> str:
        """Why the kernels do not multiply by a layer of these sizes; empty if they do."""

    @abstractmethod
    def replace(
        self, model: Any, linears: Mapping[nn.Module, str], read: Read, dtype: torch.dtype
    ) -> None:
        """Replace the linear layers `linears`, of these names; rows are of `dtype`."""


@contextmanager
def damaged_weights(
    linears: Mapping[nn.Module, str], layers: Iterable[nn.Module]
) -> Iterator[None]:
    """Let a `ValueError` inside name the layers whose weights it is about."""
    try:
        yield
    except ValueError as error:
        names = ", ".join(linears[layer] for layer in layers)
        raise ModelLoadError(
            f"the weights of {names} are damaged: {error}; get it again"
        ) from error
