"""How a checkpoint has the quantised weights of its linear layers."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

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
