"""nano-vllm's real Scheduler over both managers, with a stub runner whose KV cache is simulated."""

import importlib.util
import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("nanovllm") is None:
    pytest.skip("nano-vllm is in the peers' environment: make vllm-tests", allow_module_level=True)

from benches.peers.adapters import nano_vllm as adapter
from pyengine.integrations.nano_vllm import BlockManager
from tests.peers.world import link

scheduler_module: Any = importlib.import_module("nanovllm.engine.scheduler")
STOCK = adapter.manager_module.BlockManager
VOCABULARY = 50


class World:
    """Its Scheduler, and a runner that writes a whole batch before it reads any of it."""

    def __init__(self, manager: Any, num_blocks: int, block_size: int = 4, **limits: int) -> None:
        self.size = block_size
        config = {
            "max_num_seqs": limits.get("max_num_seqs", 8),
            "max_num_batched_tokens": limits.get("budget", 512),
            "eos": -1,
            "num_kvcache_blocks": num_blocks,
            "kvcache_block_size": block_size,
        }
        scheduler_module.BlockManager = manager
        self.scheduler = scheduler_module.Scheduler(SimpleNamespace(**config))
        self.manager = self.scheduler.block_manager
        self.kv = np.full(num_blocks * block_size, -1, np.int64)
        self.sequence = type(
            "Sequence", (adapter.sequence_module.Sequence,), {"block_size": block_size}
        )
        self.hits: dict[int, int] = {}
        self.blocks: dict[int, int] = {}
        self.wrong: list[int] = []

    def add(self, tokens: list[int], max_tokens: int = 8) -> Any:
        params = SimpleNamespace(temperature=1.0, max_tokens=max_tokens, ignore_eos=True)
        seq = self.sequence(tokens, params)
        self.scheduler.add(seq)
        return seq

    def slots(self, seq: Any, start: int, end: int) -> np.ndarray:
        positions = np.arange(start, end)
        table = np.array(seq.block_table, np.int64)
        return table[positions // self.size] * self.size + positions % self.size

    def step(self) -> None:
        seqs, is_prefill = self.scheduler.schedule()
        chains = {}
        for seq in seqs:
            self.hits.setdefault(seq.seq_id, seq.num_cached_tokens)
            self.blocks[seq.seq_id] = len(seq.block_table)
            start, value = seq.num_cached_tokens, 0
            links: list[int] = []
            for token in seq.token_ids[: start + seq.num_scheduled_tokens]:
                value = link(value, token)
                links.append(value)
            chains[seq.seq_id] = np.array(links, np.int64)
            self.kv[self.slots(seq, start, len(links))] = links[start:]
        tokens = []
        for seq in seqs:
            chain = chains[seq.seq_id]
            if (self.kv[self.slots(seq, 0, len(chain))] != chain).any():
                self.wrong.append(seq.seq_id)
            tokens.append(int(chain[-1]) % VOCABULARY)
        self.scheduler.postprocess(seqs, tokens, is_prefill)

    def drain(self) -> None:
        while not self.scheduler.is_finished():
            self.step()
        assert self.wrong == []


def nothing_is_held(world: World) -> None:
    world.manager.kv.check()
    usage = world.manager.kv.usage()
    assert (usage.active, usage.pinned) == (0, 0)


def prompts(seed: int, count: int) -> list[list[int]]:
    chance = random.Random(seed)
    known: list[list[int]] = [[1]]
    for _ in range(count):
        base = chance.choice(known[-20:])
        base = base[: chance.randint(0, len(base))] if chance.random() < 0.5 else base
        known.append(
            (base + [chance.randrange(VOCABULARY) for _ in range(chance.choice((1, 3, 8)))])[:60]
        )
    return known


def test_one_after_the_other_both_find_the_same_and_take_the_same() -> None:
    found = []
    for manager in (STOCK, BlockManager):
        world = World(manager, 4000)
        rows = []
        for tokens in prompts(1, 300):
            seq = world.add(tokens)
            world.drain()
            rows.append(
                (world.hits[seq.seq_id], world.blocks[seq.seq_id], seq.completion_token_ids)
            )
        found.append(rows)
    assert found[0] == found[1]
    assert sum(hit for hit, _, _ in found[1]) > 1000


@pytest.mark.parametrize("limits", [{}, {"budget": 24}])
@pytest.mark.parametrize("settings", [{}, {"hash_bits": 1}])
def test_under_pressure_tokens_are_the_same_and_nothing_leaks(
    limits: dict[str, int], settings: dict[str, int]
) -> None:
    texts = []
    for manager in (STOCK, partial(BlockManager, **settings)):
        world, chance = World(manager, 40, **limits), random.Random(5)
        seqs = []
        for tokens in prompts(2, 600):
            seqs.append(world.add(tokens, chance.randint(1, 20)))
            while chance.random() < 0.5 and not world.scheduler.is_finished():
                world.step()
        world.drain()
        texts.append([seq.completion_token_ids for seq in seqs])
    assert texts[0] == texts[1]
    nothing_is_held(world)
    assert world.manager.kv.stats().evicted_blocks > 100


def test_two_identical_prompts_in_one_batch_share() -> None:
    """Its issue 219: both were computed, and took two sets of blocks."""
    prompt = list(range(10))
    taken = []
    for manager in (STOCK, BlockManager):
        world = World(manager, 40)
        first, second = world.add(prompt), world.add(prompt)
        world.step()
        taken.append(len({*first.block_table, *second.block_table}))
        assert world.hits[second.seq_id] == (8 if manager is BlockManager else 0)
        world.drain()
        assert first.completion_token_ids == second.completion_token_ids
    assert taken == [6, 4]
    nothing_is_held(world)


def test_a_hash_conflict_touches_no_live_block() -> None:
    """Of its pull request 243: every name collides with every second one."""
    world = World(partial(BlockManager, hash_bits=1), 60)
    seqs = [world.add([number] * 12, 12) for number in range(6)]
    world.drain()
    again = [world.add([number] * 12, 12) for number in range(6)]
    world.drain()
    assert [seq.completion_token_ids for seq in seqs] == [seq.completion_token_ids for seq in again]
    assert [world.hits[seq.seq_id] for seq in again] == [8] * 6
    nothing_is_held(world)


def test_a_dangling_mapping_is_taken_over() -> None:
    """nano-vllm's pull request 243: another block computes a cached block again."""
    world = World(BlockManager, 20)
    world.add(list(range(8)), 1)
    world.drain()
    world.add(list(range(8)), 1)  # the last block is whole, and computed again
    world.drain()
    stats = world.manager.kv.stats()
    assert (stats.taken_over_blocks, stats.merged_blocks) == (1, 0)
    nothing_is_held(world)
    assert world.manager.kv.usage().evictable == 2
