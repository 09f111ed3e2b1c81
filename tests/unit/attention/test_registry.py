"""The choice of a backend says why; the registered function says what it cannot do."""

from types import SimpleNamespace

import pytest
import torch

from pyengine.attention import (
    ATTENTION_NAME,
    AttentionNeeds,
    PagedContext,
    choose_backend,
    register_paged_attention,
)
from pyengine.attention.registry import backend_names, paged_attention
from pyengine.core.errors import ConfigurationError

CPU_NEEDS = AttentionNeeds(device=torch.device("cpu"), block_size=16)


class RecordingPlan:
    def forward(self, layer, query, key, value, options):
        self.call = (layer, query.shape, key.shape, value.shape, options)
        return query + 1


def call(plan, mask=None, kept=None, **keywords):
    query, key = torch.zeros(1, 4, 3, 16), torch.zeros(1, 2, 3, 16)
    module = SimpleNamespace(layer_idx=7)
    context = PagedContext(plan, [None] * 7 + [kept])
    return paged_attention(module, query, key, key, mask, paged=context, **keywords)


def test_auto_chooses_and_says_why():
    choice = choose_backend("auto", CPU_NEEDS)
    assert choice.backend == "gather"
    assert "every model" in choice.reason


def test_a_forced_choice_is_followed():
    assert choose_backend("gather", CPU_NEEDS).reason == "asked for"


def test_an_unknown_backend_is_named_with_the_known_ones():
    with pytest.raises(ConfigurationError, match="'warp' is not known: use one of auto, gather"):
        choose_backend("warp", CPU_NEEDS)


@pytest.mark.parametrize("requested", ["auto", "gather"])
def test_a_backend_that_cannot_serve_says_why(requested):
    needs = AttentionNeeds(device=torch.device("meta"), block_size=16)
    with pytest.raises(ConfigurationError, match="the device is meta"):
        choose_backend(requested, needs)


def test_the_registered_name_has_no_special_meaning_to_transformers():
    from transformers import AttentionInterface

    name = register_paged_attention()
    assert name == ATTENTION_NAME
    assert AttentionInterface()[name] is paged_attention
    assert not any(word in name for word in ("flash", "paged|", "/"))


def test_the_layer_arrives_flattened_with_its_options():
    plan, sinks = RecordingPlan(), torch.ones(4)
    out, weights = call(plan, scaling=0.3, sliding_window=6, softcap=2.0, s_aux=sinks)
    layer, query, key, value, options = plan.call
    assert (layer, query, key, value) == (7, (3, 4, 16), (3, 2, 16), (3, 2, 16))
    assert (options.scaling, options.sliding_window, options.softcap) == (0.3, 6, 2.0)
    assert options.sinks is sinks
    assert out.shape == (1, 3, 4, 16)
    assert weights is None


def test_the_default_scaling_is_that_of_the_head():
    plan = RecordingPlan()
    call(plan)
    assert plan.call[-1].scaling == 0.25


def test_a_mask_or_bias_is_refused_rather_than_ignored():
    with pytest.raises(ConfigurationError, match="mask"):
        call(RecordingPlan(), mask=torch.ones(1))
    with pytest.raises(ConfigurationError, match="bias"):
        call(RecordingPlan(), position_bias=torch.ones(1))


@pytest.mark.parametrize("asked", [None, 7])
def test_a_layer_that_sees_further_than_is_kept_is_refused(asked):
    plan = RecordingPlan()
    sight = "every position" if asked is None else "the last 7 positions"
    with pytest.raises(ConfigurationError, match=f"layer 7 .*{sight}.* only the last 6 are kept"):
        call(plan, kept=6, sliding_window=asked)
    assert not hasattr(plan, "call")


@pytest.mark.parametrize(("asked", "kept"), [(6, 6), (5, 6), (6, None), (None, None)])
def test_a_layer_may_see_what_is_kept_or_less(asked, kept):
    plan = RecordingPlan()
    call(plan, kept=kept, sliding_window=asked)
    assert plan.call[-1].sliding_window == asked


def test_every_name_is_one_that_can_be_asked_for():
    assert "gather" in backend_names()
    for name in backend_names():
        try:
            assert choose_backend(name, CPU_NEEDS).backend == name
        except ConfigurationError as error:
            assert "cannot serve" in str(error)
