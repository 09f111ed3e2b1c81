"""Models of torch's operations as the runner calls every model: on the CPU over arrays."""

from typing import Any, cast

import numpy as np
import torch

from pyengine.attention.backend import AttentionMetadata
from pyengine.attention.context import PagedContext
from pyengine.attention.dispatch import CompiledModel
from pyengine.models.model import Model, MTPModel
from pyengine.utils.tensors import array_of, tensor_of


class TensorModel:
    """See `MTPModel`. Arrays give arrays, which are tensors over the same memory inside."""

    takes_arrays = True

    def __init__(self, model: Model) -> None:
        self._model = cast("MTPModel", model)
        self.name, self.origin, self.settings = model.name, model.origin, model.settings
        self.device = model.device

    @torch.inference_mode()
    def __call__(
        self, ids: Any, positions: Any, rows: Any, paged: PagedContext | CompiledModel
    ) -> Any:
        """See `Model`."""
        inputs = tensor_of(ids), tensor_of(positions), tensor_of(rows)
        return _like(self._model(*inputs, paged), ids)

    @torch.inference_mode()
    def with_hidden(
        self, ids: Any, positions: Any, rows: Any, hidden_rows: Any, paged: PagedContext
    ) -> tuple[Any, Any]:
        """See `Model`."""
        inputs = tensor_of(ids), tensor_of(positions), tensor_of(rows), tensor_of(hidden_rows)
        logits, hidden = self._model.with_hidden(*inputs, paged)
        return _like(logits, ids), _like(hidden, ids)

    @torch.inference_mode()
    def hidden_states(self, ids: Any, positions: Any, metadata: AttentionMetadata) -> Any:
        """See `MTPModel`."""
        states = self._model.hidden_states(tensor_of(ids), tensor_of(positions), metadata)
        return _like(states, ids)

    @torch.inference_mode()
    def logits(self, states: Any) -> Any:
        """See `MTPModel`."""
        return _like(self._model.logits(tensor_of(states)), states)

    @torch.inference_mode()
    def mtp_states(
        self, layer: int, ids: Any, previous: Any, positions: Any, metadata: AttentionMetadata
    ) -> Any:
        """See `MTPModel`."""
        inputs = tensor_of(ids), tensor_of(previous), tensor_of(positions)
        return _like(self._model.mtp_states(layer, *inputs, metadata), ids)

    @torch.inference_mode()
    def mtp_logits(self, layer: int, states: Any) -> Any:
        """See `MTPModel`."""
        return _like(self._model.mtp_logits(layer, tensor_of(states)), states)

    def check_attended(self, context: PagedContext) -> None:
        """See `Model`."""
        self._model.check_attended(context)


def _like(result: torch.Tensor, example: Any) -> Any:
    return array_of(result) if isinstance(example, np.ndarray) else result
