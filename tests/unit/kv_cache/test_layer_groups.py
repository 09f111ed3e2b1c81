"""From a model's configuration to groups of layers that share a block table."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyengine.kv_cache.layer_groups import (
    LayerGroups,
    Location,
    Size,
    Table,
    Window,
    choose_layer_groups,
)
from pyengine.kv_cache.part_tables import PartTables


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


GEMMA_4 = {  # windows, sizes of sliding and of full layers in bfloat16, longest sequence
    "E2B": (every(5, 512, 15), 512, 1024, 131_072),
    "E4B": (every(6, 512, 24), 1024, 2048, 131_072),
    "26B-A4B": (every(6, 1024, 30), 4096, 2048, 262_144),
    "31B": (every(6, 1024, 60), 8192, 4096, 262_144),
}


@pytest.mark.parametrize(
    ("name", "said", "num_tables", "waste"),
    [
        ("E2B", "3 groups of 3 tensors: 3 full, 12 of window 512", 5, 0),
        ("E4B", "4 groups of 4 tensors: 4 full, 20 of window 512", 7, 0.003),
        ("26B-A4B", "14 groups of 3 tensors: 5 full, 25 of window 1024", 16, 0.012),
        ("31B", "11 groups of 5 tensors: 10 full, 50 of window 1024", 12, 0),
    ],
)
def test_layers_of_unequal_sizes_share_tensors(
    name: str, said: str, num_tables: int, waste: float
) -> None:
    windows, sliding, full, longest = GEMMA_4[name]
    sizes = sizes_of(windows, sliding, full)
    groups = choose_layer_groups(windows, sizes, longest)
    assert (str(groups), len(groups.tables)) == (said, num_tables)
    needed = sum(
        sum(size) * (window or longest) for size, window in zip(sizes, windows, strict=True)
    )
    assert needed <= held(groups, sizes, longest) <= (1 + waste) * needed


def sizes_of(windows: list[Window], sliding: int, full: int) -> list[Size]:
    return [(full,) * 2 if window is None else (sliding,) * 2 for window in windows]


def held(groups: LayerGroups, sizes: list[Size], max_model_len: int) -> int:
    """Bytes of a sequence of that length."""
    block = sum(groups.locations[owner].parts * sum(sizes[owner]) for owner in groups.owners)
    return block * sum(window or max_model_len for window in groups.windows)


def test_parts_of_a_tensor_are_read_by_tables_of_their_own() -> None:
    windows: list[Window] = [8, 8, None, 8, 8, None, 8]
    groups = choose_layer_groups(windows, sizes_of(windows, 4, 8), 1024)
    assert groups == LayerGroups(
        (None, 8, 8),
        2,
        (
            *(Location(1, 0, 2, 0), Location(1, 0, 2, 1), Location(0, 0)),
            *(Location(1, 1, 2, 0), Location(1, 1, 2, 1), Location(0, 1)),
            Location(2, 0, 2, 0),
        ),
    )
    assert groups.tables == (Table(0), Table(1, 2, 0), Table(1, 2, 1), Table(2, 2, 0))
    assert groups.layer_tables == (1, 2, 0, 1, 2, 0, 3)
    assert groups.owners == [0, 3]


def test_a_smaller_tensor_for_a_kind_that_would_fill_a_part_of_the_last_one() -> None:
    windows: list[Window] = [None] * 3 + [8] * 4
    groups = choose_layer_groups(windows, sizes_of(windows, 8, 4), 1024)
    assert groups.locations[:3] == (Location(0, 0, 2, 0), Location(0, 0, 2, 1), Location(0, 1))
    assert groups.windows == (None, 8, 8, 8, 8)
    assert groups.tables[:3] == (Table(0, 1, 0), Table(0, 2, 0), Table(0, 2, 1))


def test_sizes_of_which_none_is_a_multiple_of_the_other() -> None:
    windows: list[Window] = [None] * 4 + [8] * 6
    groups = choose_layer_groups(windows, sizes_of(windows, 8, 12), 1024)
    assert str(groups) == "2 groups of 2 tensors: 4 full, 6 of window 8"
    assert {location.parts for location in groups.locations} == {2, 3}


def test_equal_sizes_of_other_shapes_need_no_parts() -> None:
    groups = choose_layer_groups([8, None, 8, None], [(4, 4)] * 4, 1024)
    assert not groups.has_parts
    assert groups.tables == (Table(0), Table(1))
    assert groups.layer_tables == tuple(location.group for location in groups.locations)


@pytest.mark.parametrize(
    ("sliding", "full"),
    [
        ((260, 260), (516, 516)),  # gemma 4 in int8, with scales: 65 layers would share a tensor
        ((8, 8), (8, 16)),  # values alone are larger
    ],
)
def test_layers_of_sizes_without_a_small_multiple_stay_in_one_group(
    sliding: Size, full: Size
) -> None:
    windows = every(5, 512, 15)
    sizes = [full if window is None else sliding for window in windows]
    assert choose_layer_groups(windows, sizes, 131_072) == LayerGroups.single(15)
    assert choose_layer_groups([8, 8], [sliding, full], 1024) == LayerGroups.single(2, 8)
    assert choose_layer_groups([8, 4], [sliding, full], 1024) == LayerGroups.single(2, 8)


@given(
    layers=st.lists(
        st.tuples(st.sampled_from([None, 4, 16, 100]), st.sampled_from([2, 4, 6, 7])),
        min_size=1,
        max_size=40,
    ),
    max_model_len=st.integers(2, 5000),
    num_sizes=st.integers(1, 4),
)
def test_every_layer_has_a_place_of_its_own_that_keeps_enough(
    layers: list[tuple[Window, int]], max_model_len: int, num_sizes: int
) -> None:
    windows = [window for window, _ in layers]
    sizes = [(size % num_sizes + 1, 2 * (size % num_sizes + 1)) for _, size in layers]
    groups = choose_layer_groups(windows, sizes, max_model_len)
    assert len(groups.locations) == len(windows)
    assert len(set(groups.locations)) == len(windows)
    assert {location.group for location in groups.locations} == set(range(len(groups.windows)))
    assert {location.index for location in groups.locations} == set(range(groups.num_tensors))
    for window, kept in zip(windows, groups.layer_windows, strict=True):
        assert kept is None or (window is not None and window <= kept < max_model_len)
    tensors: dict[int, Size] = {}
    places: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for location, (keys, values) in zip(groups.locations, sizes, strict=True):
        assert 0 <= location.part < location.parts
        size = keys * location.parts, values * location.parts
        assert tensors.setdefault(location.index, size) == size
        place = location.parts, location.part
        of_group = places.setdefault((location.group, location.index), set())
        assert place not in of_group
        of_group.add(place)
    assert all(len({parts for parts, _ in of_group}) == 1 for of_group in places.values())
    for table, location in zip(groups.layer_tables, groups.locations, strict=True):
        assert groups.tables[table] == Table(location.group, location.parts, location.part)
    widest = max(window or max_model_len for window in windows)
    assert held(groups, sizes, max_model_len) <= sum(map(sum, sizes)) * widest


@given(
    tables=st.lists(
        st.integers(1, 4).flatmap(
            lambda parts: st.builds(
                Table, st.integers(0, 2), st.just(parts), st.integers(0, parts - 1)
            )
        ),
        min_size=1,
        max_size=6,
    ),
    block_size=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_tables_of_parts_are_those_of_a_loop(
    tables: list[Table], block_size: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 50, (3, 2, 4), dtype=np.int32)
    slots = random.integers(-1, 50 * block_size, (3, 9))
    slots[:, 0] = -1
    before = blocks.copy(), slots.copy()
    parts = PartTables(tables, block_size)
    found = parts.block_tables(blocks), parts.slots(slots)
    assert found[0].dtype == np.int32 and found[1].dtype == np.int64
    for at, (group, count, part) in enumerate((t.group, t.parts, t.part) for t in tables):
        rows = [[block * count + part for block in row] for row in blocks[group].tolist()]
        assert found[0][at].tolist() == rows
        assert found[1][at].tolist() == [
            -1 if slot < 0 else (slot // block_size * count + part) * block_size + slot % block_size
            for slot in slots[group].tolist()
        ]
        assert parts.blocks(7)[at].tolist() == [7 * count + part]
    assert np.array_equal(blocks, before[0]) and np.array_equal(slots, before[1])
