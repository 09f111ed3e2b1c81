"""Frames agree with the pool, block by block, and reveal no namespaces."""

import base64
import json
import zlib
from typing import Any

import numpy as np
import pytest

from pyengine.engine.stats import EngineView
from pyengine.kv_cache import BlockManager
from pyengine.request.prompts import Prompt
from pyengine.sampling_params import SamplingParams
from pyengine.server.dashboard.frames import MAX_NAMESPACES, FrameMaker, Tree
from tests.support.engines import Bench, add_request, make_bench

STATES = ["free", "evictable", "active", "pinned", "loading"]
LONG = SamplingParams(temperature=0, ignore_eos=True, max_tokens=30)


class Shown:
    """A frame as the page unpacks it."""

    def __init__(self, view: EngineView, **settings: Any) -> None:
        self.text = FrameMaker({"model": "tiny"}, **settings).frame(view)
        self.message = json.loads(self.text)
        flat = zlib.decompress(base64.b64decode(self.message["blocks"]))
        n = sum(self.message["usage"].values())
        assert len(flat) == 11 * n
        wide = np.frombuffer(flat, "<u2", 4 * n).reshape(4, n)
        narrow = np.frombuffer(flat, np.uint8, 3 * n, 8 * n).reshape(3, n)
        self.refs, self.sequences, self.ages, self.depths = wide.tolist()
        self.states, self.spaces, self.nodes = narrow.tolist()

    @property
    def tree(self) -> list[list[int]]:
        return list(self.message["tree"])


def decoded(bench: Bench, steps: int = 2) -> EngineView:
    for _ in range(steps):
        bench.step()
    return bench.engine.view(1000)


def test_columns_are_those_of_the_manager() -> None:
    bench = make_bench(num_blocks=40)
    common = [*range(3, 15)]
    bench.submit({str(at): [*common, at, 50, 51, 52] for at in range(3)}, LONG)
    bench.submit({"gone": [60, 61, 62, 63, 64]}, SamplingParams(temperature=0, max_tokens=1))
    shown, manager = Shown(decoded(bench)), bench.manager
    assert shown.message["usage"] == {name: getattr(manager.usage(), name) for name in STATES}
    for block in range(40):
        assert STATES[shown.states[block]] == manager.state(block)
        assert shown.refs[block] == manager.refs(block)
        assert shown.sequences[block] == manager.seq_refs(block)
    table = bench.requests["0"].sequences[0].kv.block_table
    assert [shown.depths[block] for block in table[:4]] == [0, 1, 2, 3]
    assert len({shown.nodes[block] for block in table[:3]}) == 1


def test_the_tree_is_cut_where_prefixes_part() -> None:
    bench = make_bench(num_blocks=64)
    common, half = [*range(3, 15)], [*range(3, 11)]  # 3 blocks and 2 of them
    bench.submit({str(at): [*common, at, 50, 51, 52] for at in range(3)}, LONG)
    bench.submit({f"half {at}": [*half, 70 + at, 71, 72, 73] for at in range(2)}, LONG)
    shown = Shown(decoded(bench))
    tree = shown.tree
    [root] = [node for node in tree if node[0] == 0]
    assert root[2:6] == [0, 2, 2, 5]  # two blocks, and all five stand on them
    below = [node for node in tree if node[0] == tree.index(root) + 1]
    assert sorted(node[2:6] for node in below) == [[2, 1, 1, 1], [2, 1, 1, 1], [2, 1, 1, 3]]
    third = next(at for at, node in enumerate(tree, 1) if node[2:6] == [2, 1, 1, 3])
    assert sorted(node[2:6] for node in tree if node[0] == third) == [[3, 1, 1, 1]] * 3
    assert shown.message["hidden"] == [0, 0]


def naive_pieces(manager: BlockManager) -> dict[int, int]:
    """For each cached block the blocks before it, going up branch by branch."""
    pool = manager.snapshot()
    nodes, indices, parents, attached = (
        np.frombuffer(column, np.uint32).tolist()
        for column in (pool.nodes, pool.node_indices, pool.parents, pool.parent_indices)
    )
    pieces = {}
    for block, node in enumerate(nodes):
        depth, at = indices[block] - 1, node
        while at:
            depth += attached[at - 1]
            at = parents[at - 1]
        if node:
            pieces[block] = depth
    return pieces


@pytest.mark.parametrize("seed", range(20))
def test_any_tree_is_cut_right(seed: int) -> None:
    random = np.random.default_rng(seed)
    bench = make_bench(num_blocks=50, block_size=2, max_num_seqs=8)
    for at in range(30):
        tokens = [3 + int(value) for value in random.integers(0, 2, random.integers(2, 14))]
        namespace = bytes([int(random.integers(0, 3))])
        add_request(bench, str(at), Prompt(token_ids=tokens, namespace=namespace), LONG)
        bench.step()
        tree = Tree.of(bench.manager.snapshot())
        held = np.flatnonzero(tree.block_pieces >= 0).tolist()
        depths = naive_pieces(bench.manager)
        assert {block: int(tree.block_depths[block]) for block in held} == depths
        for block in held:
            piece = int(tree.block_pieces[block])
            inside = depths[block] - int(tree.depths[piece])
            assert 0 <= inside < int(tree.lengths[piece])
            parent = int(tree.parents[piece])
            before = 0 if parent < 0 else int(tree.depths[parent] + tree.lengths[parent])
            assert int(tree.depths[piece]) == before
        frame = Shown(bench.engine.view(10))
        for node in frame.tree:
            assert node[0] < frame.tree.index(node) + 1
        blocks = sum(node[4] for node in frame.tree) + sum(node[7] for node in frame.tree)
        assert blocks + frame.message["hidden"][1] == len(held)


def test_a_large_tree_is_shown_in_part_and_nothing_is_lost() -> None:
    bench = make_bench(num_blocks=4000, max_num_seqs=256, max_num_batched_tokens=4000)
    for at in range(600):
        tokens = [3, 4, 5, 6, at % 90, at // 90, 7, 8, 9, 10, 11, 12, at % 89]
        add_request(bench, str(at), Prompt(token_ids=tokens), LONG)
    frame = Shown(decoded(bench))
    assert len(frame.tree) <= 255
    held = len([space for space in frame.spaces if space])
    shown, hidden = sum(node[4] for node in frame.tree), sum(node[7] for node in frame.tree)
    assert shown + hidden + frame.message["hidden"][1] == held
    assert hidden > 0
    assert len(frame.message["requests"]) == 600


def test_an_empty_pool_has_a_frame() -> None:
    frame = Shown(make_bench(num_blocks=3).engine.view(10))
    assert frame.tree == frame.message["requests"] == frame.message["spaces"] == []
    assert frame.states == [0, 0, 0]


def test_namespaces_go_by_digests_and_the_many_share_one() -> None:
    bench = make_bench(num_blocks=200)
    for at in range(MAX_NAMESPACES + 3):
        prompt = Prompt(token_ids=[*range(3, 3 + 4 * (at + 1)), 90], namespace=b"secret%d" % at)
        add_request(bench, str(at), prompt, LONG)
    frame = Shown(decoded(bench))
    spaces = frame.message["spaces"]
    assert [space["blocks"] for space in spaces] == [11, 10, 9, 8, 7, 6, 5, 4, 6]
    assert spaces[-1]["name"] == "3 others"
    assert "secret" not in frame.text
    assert frame.spaces.count(1) == 11
    names = [space["name"] for space in spaces]
    assert len(set(names)) == len(names)


def test_prompts_are_shown_only_where_they_may_be() -> None:
    bench = make_bench()
    prompt = Prompt(token_ids=[3, 4, 5], text="between you and me")
    add_request(bench, "a", prompt, LONG)
    add_request(bench, "b", Prompt(token_ids=[95, 94, 93]), LONG)
    view = decoded(bench)
    frame = Shown(view)
    assert "between" not in frame.text and "95,94" not in frame.text.replace(" ", "")
    assert len(frame.message["requests"][0]) == 11
    rows = Shown(view, decode=str).message["requests"]
    assert [row[11] for row in rows] == ["between you and me", "[95, 94, 93]"]


def test_requests_show_where_they_left_the_cached_prefix() -> None:
    bench = make_bench(num_blocks=64, explain=True)
    common = [*range(3, 15)]
    bench.submit({"first": [*common, 40]}, LONG)
    decoded(bench, 2)
    bench.submit({"same": [*common, 40], "leaves": [*common[:9], 90, 91, 92, 93]}, LONG)
    bench.submit({"short": [50]}, LONG)
    shown = Shown(decoded(bench, 1))
    rows = {row[0]: row[10] for row in shown.message["requests"]}
    block = bench.requests["leaves"].sequences[0].kv.block_table[1]
    assert rows["first"] == ["new", 0, 0] and rows["same"] == [None, None, 0]
    assert rows["leaves"] == ["diverged", 8, shown.nodes[block]] and shown.nodes[block] > 0
    assert rows["short"] == ["below_one_block", 0, 0]


def test_requests_show_how_far_they_are() -> None:
    bench = make_bench(num_blocks=64, max_num_batched_tokens=16, max_num_seqs=2)
    bench.submit({"first": [*range(3, 11)]}, LONG)
    decoded(bench, 3)
    bench.submit({"second": [*range(3, 43)], "third": [50]}, LONG)
    rows = Shown(decoded(bench, 2)).message["requests"]
    assert [row[:8] for row in rows] == [
        ["first", 1, 8, 0, 8, 5, 30, 0],
        ["second", 1, 40, 8, 32, 0, 30, 0],
        ["third", 0, 1, 0, 0, 0, 30, 0],
    ]
