"""The memory of log-probabilities on a device."""

import gc
import weakref
from typing import Any

import pytest

from pyengine.sampling.logprobs import PendingLogprobs

torch = pytest.importorskip("torch", reason="the memory of tensors")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402


class Sizes(TorchDispatchMode):
    """Takes note of the tensors that are made, views of `given` left out."""

    def __init__(self, given: Any) -> None:
        super().__init__()
        self.given = given.data_ptr()
        self.largest = 0
        self.made: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        made = func(*args, **(kwargs or {}))
        for item in made if isinstance(made, tuple | list) else [made]:
            if isinstance(item, torch.Tensor) and not self.is_view(item):
                self.largest = max(self.largest, item.untyped_storage().nbytes())
                if not any(item is known for known in self.made):  # changed in place
                    self.made.add(item)
        return made

    def is_view(self, tensor: Any) -> bool:
        return bool(tensor.untyped_storage().data_ptr() == self.given)


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
        (item.untyped_storage().data_ptr(), item.untyped_storage().nbytes()) for item in sizes.made
    }
    assert sum(size for _, size in storages) <= 1000 * (8 + 4 + 8 + top * 12) + 4096
    del logits
    assert whole() is None
    assert len(pending.result()) == 1000
