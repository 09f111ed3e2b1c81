"""The attention of a step, as a model gets it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyengine.attention.backend import QKV, AttentionMetadata, AttentionOptions
from pyengine.errors import ConfigurationError
from pyengine.kv_cache.states import StateInputs

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class PagedContext:
    """The value of `paged=` in a call of the model: the attention metadata of the step.

    `kept` has, for every layer, the window that its group keeps (None: everything). `attended`
    counts the layers that attended so far; the runner compares it with the layers of the pool,
    since a layer that keeps its state elsewhere would silently be wrong. `states` are those of a
    model with recurrent layers. `adapter_slots` are int32 `[T]`, as `StepInputs` has them.
    """

    metadata: AttentionMetadata
    kept: Sequence[int | None]
    attended: int = field(default=0)
    states: StateInputs | None = None
    adapter_slots: Any = None

    def attend(self, layer: int, qkv: QKV, options: AttentionOptions) -> "torch.Tensor":
        """See `AttentionMetadata.forward`, and `count`."""
        self.count(layer, options.sliding_window)
        return self.metadata.forward(layer, qkv, options)

    def count(self, layer: int, window: int | None) -> None:
        """Count that `layer` attends, to the last `window` positions or to all (None).

        Raises `ConfigurationError` for a layer that sees further back than its group keeps blocks.
        """
        self.attended += 1
        kept = self.kept[layer]
        if kept is not None and (window is None or window > kept):
            sight = "every position" if window is None else f"the last {window} positions"
            raise ConfigurationError(
                f"layer {layer} attends to {sight}, but only the last {kept} are kept, as the "
                "model's configuration says that it slides: this model is not supported"
            )
