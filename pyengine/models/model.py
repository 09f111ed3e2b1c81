"""A causal language model over a paged KV cache, as the runner calls it."""

from typing import TYPE_CHECKING, Any, Protocol

from pyengine.attention.backend import AttentionMetadata
from pyengine.attention.context import PagedContext
from pyengine.utils.devices import Device

if TYPE_CHECKING:
    from pyengine.attention.dispatch import CompiledModel


class Model(Protocol):
    """A causal language model over a paged KV cache."""

    name: str
    """Its family or class, for messages."""
    origin: str
    """The owner of its decoder, and the reason, for `describe()`."""
    settings: str
    """All settings that its results depend on, as text."""
    device: Device
    takes_arrays: bool
    """True if it computes over arrays of the host; else over tensors of torch on `device`."""

    def __call__(
        self, ids: Any, positions: Any, rows: Any, paged: "PagedContext | CompiledModel"
    ) -> Any:
        """The logits `[S, vocab]` of `rows` `[S]` among the tokens `ids` `[T]`.

        `positions` are `[T]`, and `paged` is the attention of the step. The first three are int64.
        """

    def with_hidden(
        self, ids: Any, positions: Any, rows: Any, hidden_rows: Any, paged: PagedContext
    ) -> tuple[Any, Any]:
        """The same logits, and hidden states `[R, hidden]` after the model's last norm.

        They are those of `hidden_rows`, int64 `[R]`, among the tokens. The next call may reuse
        their memory.
        """

    def check_attended(self, context: PagedContext) -> None:
        """Raise `ConfigurationError` if a layer did not attend in the step of `context`."""


class MTPModel(Model, Protocol):
    """A model with layers for multi-token prediction. Arrays or tensors are as `Model` has them."""

    def hidden_states(self, ids: Any, positions: Any, metadata: AttentionMetadata) -> Any:
        """The states `[T, hidden]` of tokens `[T]` after the model's last norm."""

    def logits(self, states: Any) -> Any:
        """The logits `[S, vocab]` of states `[S, hidden]`."""

    def mtp_states(
        self,
        layer: int,
        ids: Any,
        previous: Any,
        positions: Any,
        metadata: AttentionMetadata,
    ) -> Any:
        """The states `[T, hidden]` of an MTP layer.

        `previous` `[T, hidden]` are the states before each token: of the layer before, and for the
        first one of the model.
        """

    def mtp_logits(self, layer: int, states: Any) -> Any:
        """The logits `[S, vocab]` of states `[S, hidden]` of an MTP layer."""
