"""From a model's configuration to groups of layers that share a block table."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyengine.errors import ConfigurationError
from pyengine.kv_cache.layer_groups import (
    LayerGroups,
    Location,
    Window,
    choose_layer_groups,
)


def every(period: int, window: int, num_layers: int) -> list[Window]:
    """Layers that slide, but for the last one of each `period`."""
    return [None if layer % period == period - 1 else window for layer in range(num_layers)]


def grouped(windows: list[Window], max_model_len: int) -> LayerGroups:
    return choose_layer_groups(windows, [(8, 8)] * len(windows), max_model_len)


@pytest.mark.parametrize(
    ("windows", "max_model_len", "said"),
    [
        (every(6, 512, 26), 32_768, "7 groups of 4 layers: 4 full, 22 of window 512"),  # gemma 3 1b
        (every(6, 1024, 34), 131_072, "7 groups of 5 layers: 5 full, 29 of window 1024"),  # 4b
        (every(6, 1024, 48), 131_072, "6 groups of 8 layers: 8 full, 40 of window 1024"),  # 12b
        (every(6, 1024, 62), 131_072, "7 groups of 10 layers: 10 full, 52 of window 1024"),  # 27b
        (every(2, 128, 24), 131_072, "2 groups of 12 layers: 12 full, 12 of window 128"),  # gpt-oss
        (every(2, 128, 36), 131_072, "2 groups of 18 layers: 18 full, 18 of window 128"),
        (every(2, 4096, 26), 8192, "2 groups of 13 layers: 13 full, 13 of window 4096"),  # gemma 2
        (every(4, 4096, 32), 65_536, "4 groups of 8 layers: 8 full, 24 of window 4096"),  # olmo 3
        ([4096] * 32, 32_768, "1 group of 32 layers: 32 of window 4096"),  # mistral 7b v0.1
        ([None] * 32, 4096, "1 group of 32 layers: 32 full"),
        # 28 layers, the last 8 slide: two full groups and one in which two tensors are unused
        ([None] * 20 + [4096] * 8, 32_768, "3 groups of 10 layers: 20 full, 8 of window 4096"),
        # one full layer more than sliding ones: one unused place is cheaper than many groups
        ([None, *every(2, 512, 24)], 8192, "2 groups of 13 layers: 13 full, 12 of window 512"),
        # the widest window would do for all, and saves next to nothing over full attention
        ([1000, 1000, None, None], 1010, "1 group of 4 layers: 4 full"),
        ([8, 16, 8, 16], 1024, "2 groups of 2 layers: 2 of window 16, 2 of window 8"),
        ([None, 8, 16], 1024, "3 groups of 1 layer: 1 full, 1 of window 16, 1 of window 8"),
    ],
)
def test_the_choice(windows: list[Window], max_model_len: int, said: str) -> None:
    assert str(grouped(windows, max_model_len)) == said


def test_layers_keep_their_order_within_a_kind() -> None:
    groups = grouped(every(3, 8, 6), 1024)
    assert groups.windows == (None, 8, 8)
    assert [(location.group, location.index) for location in groups.locations] == [
        *((1, 0), (1, 1), (0, 0)),
        *((2, 0), (2, 1), (0, 1)),
    ]
    assert groups.layer_windows == (8, 8, None, 8, 8, None)


@pytest.mark.parametrize("window", [100, 101, 4096])
def test_a_window_of_the_whole_length_is_no_window(window: int) -> None:
    assert grouped([window, None], 100) == LayerGroups.single(2)
    assert grouped([window] * 2, 100) == LayerGroups.single(2)


def test_layers_of_different_shapes_stay_in_one_group() -> None:
    assert choose_layer_groups([8, None], ["small", "large"], 1024) == LayerGroups.single(2)
    assert choose_layer_groups([8, 8], ["small", "large"], 1024) == LayerGroups.single(2, 8)
    assert choose_layer_groups([8, 4], ["small", "large"], 1024) == LayerGroups.single(2, 8)


@given(
    windows=st.lists(st.sampled_from([None, 4, 16, 100]), min_size=1, max_size=40),
    max_model_len=st.integers(2, 5000),
)
def test_every_layer_has_a_place_of_its_own_that_keeps_enough(
    windows: list[Window], max_model_len: int
) -> None:
    groups = grouped(windows, max_model_len)
    assert len(groups.locations) == len(windows)
    assert len(set(groups.locations)) == len(windows)
    assert {location.group for location in groups.locations} == set(range(len(groups.windows)))
    assert {location.index for location in groups.locations} == set(range(groups.layers_per_group))
    for window, kept in zip(windows, groups.layer_windows, strict=True):
        assert kept is None or (window is not None and window <= kept < max_model_len)
    held = groups.layers_per_group * sum(window or max_model_len for window in groups.windows)
    widest = max(window or max_model_len for window in windows)
    assert held <= len(windows) * widest  # never more than one group for all of them


def test_a_tensor_has_the_shape_of_the_layers_that_share_it() -> None:
    groups = LayerGroups((None, 8), 2, (Location(0, 0), Location(1, 1), Location(1, 0)))
    assert groups.tensor_shapes(["a", "b", "a"]) == ["a", "b"]
    with pytest.raises(ConfigurationError, match=r"layers 0 and 2 .* a is not c"):
        groups.tensor_shapes(["a", "b", "c"])
