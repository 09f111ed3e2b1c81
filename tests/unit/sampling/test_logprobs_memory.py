"""The memory of log-probabilities on a device."""

import gc
import weakref
from typing import Any

import pytest

from pyengine.sampling.logprobs import PendingLogprobs

torch = pytest.importorskip("torch", reason="the memory of tensors")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402


class Sizes(TorchDispatchMode):
    """Records the tensors that are made, without views of `logits`."""

    def __init__(self, logits: Any) -> None:
        super().__init__()
        self.address = logits.data_ptr()
        self.largest = 0
        self.tensors: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        tensors = func(*args, **(kwargs or {}))
        for item in tensors if isinstance(tensors, tuple | list) else [tensors]:
            if isinstance(item, torch.Tensor) and not self.is_view(item):
                self.largest = max(self.largest, item.untyped_storage().nbytes())
                if not any(item is known for known in self.tensors):  # changed in place
                    self.tensors.add(item)
        return tensors

    def is_view(self, tensor: Any) -> bool:
        return bool(tensor.untyped_storage().data_ptr() == self.address)


@pytest.mark.parametrize("top", [0, 5])
def test_memory_of_a_device_does_not_follow_the_length_of_the_prompt(top: int) -> None:
    vocab_size = 4000
    logits = torch.randn(1000, vocab_size).to(torch.bfloat16)
    whole = weakref.ref(logits)
    with Sizes(logits) as sizes:
        pending = PendingLogprobs(logits, torch.ones(1000, dtype=torch.int64), [top] * 1000)
    assert sizes.largest <= 64 * vocab_size * (8 if top else 4)
    gc.collect()
    storages = {
        (own.untyped_storage().data_ptr(), own.untyped_storage().nbytes()) for own in sizes.tensors
    }
    assert sum(size for _, size in storages) <= 1000 * (8 + 4 + 8 + top * 12) + 4096
    del logits
    assert whole() is None
    assert len(pending.result()) == 1000
