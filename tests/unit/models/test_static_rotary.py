"""Models whose rotary embedding looks at a step's positions are captured, or refused by name."""

from typing import Any

import pytest
import torch

from pyengine.errors import ConfigurationError
from pyengine.models.rotary import make_rotary_static
from tests.support.static_attention import StaticBackend
from tests.unit.executor.hand_made import PagedRun, random_model
from tests.unit.executor.test_cuda_graphs import StubRecorder

DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}


class Branching(torch.nn.Module):
    """As transformers had longrope until 5.17: a question to the device in each step."""

    def __init__(self, rotary: Any) -> None:
        super().__init__()
        self.config, self.rope_type = rotary.config, "longrope"
        self.config.rope_parameters["original_max_position_embeddings"] = 64
        self.inv_freq = torch.nn.Buffer(rotary.inv_freq.clone())

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[Any, Any]:
        factor = 2.0 if int(position_ids.max()) + 1 > 64 else 1.0
        freqs = position_ids[..., None].float() * self.inv_freq * factor
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos().to(x.dtype), emb.sin().to(x.dtype)


def test_plain_ones_are_left_as_they_are() -> None:
    model = random_model("llama")
    assert make_rotary_static(model, 10**6) is None
    assert "forward" not in vars(model.model.rotary_emb)


@pytest.mark.parametrize("longest", [64, 256])
def test_what_cannot_become_long_is_captured_and_computes_the_same(longest: int) -> None:
    model = random_model("llama", rope_parameters=DYNAMIC)
    x, positions = torch.zeros(1, 5, 16), torch.tensor([[0, 3, 7, 255, 1]])
    before = model.model.rotary_emb(x, positions)
    assert make_rotary_static(model, longest) is None
    for got, expected in zip(model.model.rotary_emb(x, positions), before, strict=True):
        assert torch.equal(got, expected)


def test_what_may_become_long_is_refused_by_name() -> None:
    model = random_model("llama", rope_parameters=DYNAMIC)
    said = make_rotary_static(model, 257)
    assert said is not None
    for part in ("LlamaForCausalLM", "dynamic", "max_model_len=256 at most"):
        assert part in said


def test_one_that_branches_within_its_own_forward_is_refused_whatever_the_length() -> None:
    model = random_model("llama")
    model.model.rotary_emb = Branching(model.model.rotary_emb)
    for longest in (64, 65):
        said = make_rotary_static(model, longest)
        assert said is not None
        assert "longrope" in said
    assert "forward" not in vars(model.model.rotary_emb)


def test_the_runner_says_so_before_it_captures_and_runs_eagerly_if_asked() -> None:
    model = random_model("llama", rope_parameters=DYNAMIC, max_position_embeddings=32)
    with pytest.raises(
        ConfigurationError, match=r"dynamic.*=32 at most; or set enforce_eager=True"
    ):
        PagedRun(model, backend=StaticBackend, record=StubRecorder())
    PagedRun(model, backend=StaticBackend)
