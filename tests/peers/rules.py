"""What is found differs by rules: vLLM's manager with some of ours, and ours without the others.

Each arm has one rule more than the one before it. Two of them have the same rules, one over vLLM's
manager and one over ours: what they find must be the same, request by request. So whatever differs
from the first arm to the last is due to a rule, by name.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pyengine.integrations.vllm_tables import Lookup
from tests.peers.world import Settings, World, managers

SAME = "the same"
FULL_HIT = "a full hit: one token is computed, not a block"
ONE_COPY = "vLLM caches duplicates, so fewer prefixes stay"
DELAYED = "a full block is registered when its step is final, not at once"
MERGED = "duplicates of running requests are released"
SHORTER = "other requests had full hits and took fewer blocks and steps"


def one_copy() -> type:
    """vLLM's manager, that caches a content once: what is cached and in use stays, and whoever has
    a copy holds it too; an evictable one is free as soon as there is a newer one."""
    own: Any = managers()[0]

    class OneCopy(own):  # type: ignore[misc]
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            self._pool = self.block_pool
            self._first: dict[int, Any] = {}
            self._insert, self._pool._insert_block_hash = self._pool._insert_block_hash, self.insert
            self._free, self._pool.free_blocks = self._pool.free_blocks, self.free_blocks

        def insert(self, key: Any, block: Any, num_tokens: int | None) -> None:
            first = self._pool.cached_block_hash_to_block.get_one_block(key)
            if first is None or first is block:
                self._insert(key, block, num_tokens)
            elif first.ref_cnt:
                self._pool.touch([first])
                self._first[block.block_id] = first
            else:
                self._pool._remove_cached_block_hashes(first)
                self._pool.free_block_queue.remove(first)
                self._pool.free_block_queue.prepend_n([first])
                self._insert(key, block, num_tokens)

        def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
            self._free(self._with_first(ordered_blocks))

        def _with_first(self, blocks: Iterable[Any]) -> Iterator[Any]:
            for block in blocks:
                yield block
                if block.ref_cnt == 0 and block.block_id in self._first:
                    yield self._first.pop(block.block_id)

    return OneCopy


def one_copy_settled() -> type:
    """The same, and what running requests fill is cached at the next look-up or the step's end."""
    once: Any = one_copy()

    class Settled(once):  # type: ignore[misc]
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            self._due: list[dict[str, Any]] = []
            self._is_running = False
            self._cache, self._pool.cache_full_blocks = self._pool.cache_full_blocks, self.cache

        def cache(self, **what: Any) -> None:
            if self._is_running:
                self._due.append(what)
            else:
                self._cache(**what)

        def finish_step(self) -> None:
            for what in self._due:
                self._cache(**what)
            self._due.clear()

        def allocate_slots(self, request: Any, *args: Any, **more: Any) -> Any:
            [layers] = self.coordinator.single_type_managers
            self._is_running = request.request_id in layers.req_to_blocks
            try:
                return super().allocate_slots(request, *args, **more)
            finally:
                self._is_running = False

        def get_computed_blocks(self, request: Any) -> Any:
            self.finish_step()
            return super().get_computed_blocks(request)

        def take_new_block_ids(self) -> Any:
            self.finish_step()
            return super().take_new_block_ids()

    return Settled


def without_merges(world: World) -> World:
    """The workers do not learn of copies, so these stay until their requests end."""
    world.manager.merged_tables = lambda running: {}
    return world


def without_full_hits(world: World) -> World:
    """The last block of a prompt is computed, as vLLM does it."""
    tables = world.manager.tables

    def search(request: Any) -> Lookup:
        tokens = request.num_tokens - (request.num_tokens % tables.block_size == 0)
        sequence, shares = tables._sequence(request, tokens)
        hit = sequence.reuse_cached()
        blocks = sequence.block_table if hit else []
        return Lookup(request.request_id, sequence, tokens, hit, blocks, shares)

    tables._search = search
    return world


@dataclass(frozen=True)
class Arm:
    """A world, and the rule that it adds; none: it finds what the one before it finds."""

    adds: str | None
    make: Callable[..., World]


def arms(folder: Any, **settings: Any) -> list[Arm]:
    """From vLLM's manager to ours, rule by rule."""

    def world(*, own: Any = None, ours: bool = False) -> World:
        return World(Settings(ours=ours, own=own, **settings), folder)

    return [
        Arm(None, world),
        Arm(ONE_COPY, lambda: world(own=one_copy())),
        Arm(DELAYED, lambda: world(own=one_copy_settled())),
        Arm(None, lambda: without_full_hits(without_merges(world(ours=True)))),
        Arm(MERGED, lambda: without_full_hits(world(ours=True))),
        Arm(SHORTER, lambda: world(ours=True)),
    ]


def explain(found: list[list[int]], rules: list[str | None], length: int, block_size: int) -> str:
    """Why a prompt of `length` tokens found something else in the last arm than in the first."""
    stock, ours = found[0], found[-1]
    if stock == ours:
        return SAME
    if length % block_size == 0 and (stock, ours) == ([length - block_size], [length - 1]):
        return FULL_HIT
    changed = [rule for at, rule in enumerate(rules) if rule and found[at] != found[at - 1]]
    return "; ".join(changed)


def kinds(
    found: list[dict[str, list[int]]],
    rules: list[str | None],
    lengths: dict[str, int],
    block_size: int,
) -> Counter[str]:
    """How many requests there are of each kind; what each arm found when they were admitted."""
    return Counter(
        explain([hits[name][:1] for hits in found], rules, length, block_size)
        for name, length in lengths.items()
    )
