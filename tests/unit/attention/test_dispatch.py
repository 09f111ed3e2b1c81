"""Arguments of transformers reach the metadata of the step; unsupported ones are refused."""

from types import SimpleNamespace

import pytest
import torch

from pyengine.attention.backend import AttentionOptions
from pyengine.attention.dispatch import (
    ATTENTION_NAME,
    PagedContext,
    paged_attention,
    register_paged_attention,
    running,
)
from pyengine.errors import ConfigurationError
from pyengine.kernels.rope import RotaryLayout


class RecordingMetadata:
    def forward(self, layer, rows, options):
        query, key, value = rows
        self.call = (layer, query.shape, key.shape, value.shape, options)
        return query.new_ones(*query.shape[:2], value.shape[-1])


def call(metadata, mask=None, kept=None, **keywords):
    query, key = torch.zeros(1, 4, 3, 16), torch.zeros(1, 2, 3, 16)
    module = SimpleNamespace(layer_idx=7)
    context = PagedContext(metadata, [None] * 7 + [kept])
    return paged_attention(module, query, key, key, mask, paged=context, **keywords)


def test_the_registered_name_has_no_special_meaning_to_transformers():
    from transformers import AttentionInterface

    name = register_paged_attention()
    assert name == ATTENTION_NAME
    assert AttentionInterface()[name] is paged_attention
    assert not any(word in name for word in ("flash", "paged|", "/"))


def test_the_layer_arrives_flattened_with_its_options():
    metadata, sinks = RecordingMetadata(), torch.ones(4)
    out, weights = call(metadata, scaling=0.3, sliding_window=6, softcap=2.0, s_aux=sinks)
    layer, query, key, value, options = metadata.call
    assert (layer, query, key, value) == (7, (3, 4, 16), (3, 2, 16), (3, 2, 16))
    assert (options.scaling, options.sliding_window, options.softcap) == (0.3, 6, 2.0)
    assert options.sinks is sinks
    assert out.shape == (1, 3, 4, 16)
    assert weights is None


def test_the_default_scaling_is_that_of_the_head():
    metadata = RecordingMetadata()
    call(metadata)
    assert metadata.call[-1].scaling == 0.25


def test_a_mask_or_bias_is_refused_rather_than_ignored():
    with pytest.raises(ConfigurationError, match="mask"):
        call(RecordingMetadata(), mask=torch.ones(1))
    with pytest.raises(ConfigurationError, match="bias"):
        call(RecordingMetadata(), position_bias=torch.ones(1))


@pytest.mark.parametrize("window", [None, 7])
def test_a_layer_that_sees_further_than_is_kept_is_refused(window):
    metadata = RecordingMetadata()
    sight = "every position" if window is None else "the last 7 positions"
    with pytest.raises(ConfigurationError, match=f"layer 7 .*{sight}.* only the last 6 are kept"):
        call(metadata, kept=6, sliding_window=window)
    assert not hasattr(metadata, "call")


@pytest.mark.parametrize(("window", "kept"), [(6, 6), (5, 6), (6, None), (None, None)])
def test_a_layer_may_see_what_is_kept_or_less(window, kept):
    metadata = RecordingMetadata()
    call(metadata, kept=kept, sliding_window=window)
    assert metadata.call[-1].sliding_window == window


def test_a_model_runs_one_step_at_a_time_and_forgets_it():
    context = PagedContext(RecordingMetadata(), [None])
    with (
        running(-1, context),
        pytest.raises(ConfigurationError, match="from one thread"),
        running(-1, PagedContext(RecordingMetadata(), [None])),
    ):
        pass
    query, value = torch.ones(2, 4, 8), torch.ones(2, 2, 6)
    arguments = (query, query[:, :2], value, None, -1, 0, 1.0, None, None, [], "", [], [])
    with pytest.raises(KeyError):
        torch.ops.pyengine.paged_attention(*arguments)
    with running(-1, context):
        assert torch.ops.pyengine.paged_attention(*arguments).shape == (2, 4, 6)
    assert context.attended == 1


def test_options_reach_the_metadata():
    class Metadata:
        def forward(self, layer, rows, options):
            self.call = (layer, options)
            return torch.zeros(2, 4, 6)

    metadata, sinks = Metadata(), torch.ones(4)
    query, value = torch.ones(2, 4, 8), torch.ones(2, 2, 6)
    with running(-1, PagedContext(metadata, [None, None])):
        torch.ops.pyengine.paged_attention(
            *(query, query[:, :2], value, sinks, -1, 1, 0.5, 7, 2.0),
            *([query[:, 0], query[:, 1]], "8 pairs 1", [value, sinks], [0.5, 1.0]),
        )
    layer, options = metadata.call
    assert layer == 1
    assert torch.equal(options.sinks, sinks)
    assert (options.scaling, options.sliding_window, options.softcap) == (0.5, 7, 2.0)
    assert options.rotation.layout == RotaryLayout(8, "pairs", 1)
    assert torch.equal(options.rotation.sin, query[:, 1])
    assert (options.rotation.norm.eps, options.rotation.norm.offset) == (0.5, 1.0)
    assert torch.equal(options.rotation.norm.key_weight, sinks)
    assert isinstance(options, AttentionOptions)
