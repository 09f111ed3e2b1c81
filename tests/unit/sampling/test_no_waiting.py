"""The sampler never waits for the device: seen on one that has no numbers to wait for.

Nothing can be read from torch's device "meta": an operator whose result's shape depends on numbers
fails there. What is copied to it has to be pinned, and the copy must not block.
"""

from typing import Any

import pytest

from pyengine.sampling.sampler import SamplingBatch, sample
from pyengine.sampling.state import SamplingState
from pyengine.sampling.token_masks import MaskFiller, TokenMasks
from pyengine.sampling_params import SamplingParams

torch = pytest.importorskip("torch", reason="a device without numbers")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

META = torch.device("meta")
VOCAB = 50


class Uploads(TorchDispatchMode):
    """Checks every copy to the device, and counts them."""

    def __init__(self, pinned: set[int]) -> None:
        super().__init__()
        self.pinned, self.count = pinned, 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default:
            source, target = args[0], kwargs.get("device", args[0].device)
            if source.device.type == "cpu" and torch.device(target) == META:
                self.count += 1
                assert kwargs.get("non_blocking"), "the host waits for this copy"
                assert source.data_ptr() in self.pinned, "a copy from pageable memory blocks"
        else:
            devices = {arg.device.type for arg in args if isinstance(arg, torch.Tensor)}
            assert len(devices) < 2, f"{func} mixes {devices}"
        return func(*args, **kwargs)


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> Uploads:
    pinned: set[int] = set()
    kept = []  # so that no other tensor gets the same address

    def pin_memory(tensor: Any) -> Any:
        copy = tensor.clone()
        kept.append(copy)
        pinned.add(copy.data_ptr())
        return copy

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    return Uploads(pinned)


def states(*params: SamplingParams) -> list[SamplingState]:
    states = [
        SamplingState(param, [3, 4, 5], seed=row, vocab_size=VOCAB, stop_ids={2})
        for row, param in enumerate(params)
    ]
    for item in states:
        item.append(7)
    return states


GREEDY = SamplingParams(temperature=0)
PARAMS = {
    "greedy": [GREEDY],
    "temperature": [SamplingParams(temperature=1)],
    "greedy beside drawn": [GREEDY, SamplingParams(temperature=1), GREEDY],
    "top-k": [SamplingParams(temperature=1, top_k=5)],
    "top-p": [SamplingParams(temperature=1, top_p=0.9), SamplingParams(temperature=0.5, top_k=3)],
    "top-k and top-p": [SamplingParams(temperature=1, top_k=20, top_p=0.95)] * 2,
    "everything": [SamplingParams(temperature=0.6, top_k=20, top_p=0.95, min_p=0.1), GREEDY],
    "min-p": [SamplingParams(temperature=1, min_p=0.1)],
    "logprobs": [SamplingParams(temperature=0, logprobs=3), GREEDY],
    "bias": [SamplingParams(temperature=0, logit_bias={3: 1.0}), GREEDY],
    "allowed": [SamplingParams(temperature=0, allowed_token_ids=[3, 9]), GREEDY],
    "min_tokens": [SamplingParams(temperature=0, min_tokens=5), GREEDY],
    "min_tokens of some": [
        SamplingParams(temperature=0, min_tokens=5),
        SamplingParams(temperature=0, min_tokens=1),
    ],
    "penalties": [
        SamplingParams(temperature=0, frequency_penalty=0.5, repetition_penalty=1.5),
        GREEDY,
    ],
}


@pytest.mark.parametrize("name", PARAMS)
def test_nothing_in_a_launch_waits_for_the_device(name: str, uploads: Uploads) -> None:
    batch = SamplingBatch(states(*PARAMS[name]))
    logits = torch.empty(len(batch.states), VOCAB, dtype=torch.bfloat16, device=META)
    with uploads:
        pending = sample(logits, batch, [1] * len(batch.states))
    assert pending.token_ids.shape == (len(batch.states),)
    assert pending.token_ids.device == META
    assert (uploads.count == 0) == (name == "greedy")


@pytest.mark.parametrize(
    ("name", "count"),
    [("penalties", 1), ("bias", 0), ("allowed", 0), ("logprobs", 0), ("min_tokens", 0)],
)
def test_a_further_step_uploads_only_what_changed(name: str, count: int, uploads: Uploads) -> None:
    batch = SamplingBatch(states(*PARAMS[name]))
    logits = torch.empty(len(batch.states), VOCAB, dtype=torch.bfloat16, device=META)
    sample(logits, batch, [1] * len(batch.states))
    for state in batch.states:
        state.append(9)
    with uploads:
        sample(logits, batch, [2] * len(batch.states))
    assert uploads.count == count


class Anything:
    """A matcher that allows every token."""

    def fill(self, masks: Any, row: int, begin: float) -> float:
        masks[row] = -1
        return begin


def test_masks_of_some_rows_do_not_wait_either(uploads: Uploads) -> None:
    batch = SamplingBatch(states(GREEDY, GREEDY))
    logits = torch.empty(2, VOCAB, device=META)
    masks = TokenMasks({1: Anything()}, VOCAB, MaskFiller())  # type: ignore[dict-item]
    with uploads:
        sample(logits, batch, [1, 1], masks)
    assert uploads.count == 2
