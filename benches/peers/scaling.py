"""Cost against the size of the pool: the same prompt of 8,192 tokens, pools of 10^3 to 10^7 blocks.

Every block of a pool is used before the clock starts, so no page of memory is touched for the first
time. `hot` is one prompt again and again; `hot-any` is any prompt of the pool, so the processor's
caches hold less of it the larger the pool is; `cold` evicts the least recently used one.
"""

from time import perf_counter_ns as clock

from benches.peers.adapters.base import Manager
from benches.peers.sampling import Stream
from benches.peers.works import LONG, World, cold, hot

SIZES = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
MOST = {
    "pyengine": 10_000_000,
    "vLLM sha256": 1_000_000,
    "SGLang Rust core": 1_000_000,
    "nano-vllm": 100_000,
}
"""Larger ones take minutes to fill, or to search through with nano-vllm's `deque.remove`."""


def hot_any(world: World) -> Stream:
    """A prompt of the pool, chosen at random."""
    manager = world.manager
    resident = max(world.num_blocks * world.block_size // LONG, 1)
    newest = -(-world.num_blocks * world.block_size // LONG)
    while True:
        tokens = world.nth(newest - 1 - int(world.rng.integers(resident)))
        prompt = manager.prompt(tokens)
        start = clock()
        manager.hot(prompt)
        yield (clock() - start,)


WORKS = {"scale-hot-any": hot_any, "scale-hot": hot(LONG), "scale-cold": cold(LONG)}
"""In this order: while only what is there is asked for, all of it stays."""


def column(kind: type[Manager], size: int) -> str:
    """The name of a stream."""
    return f"{kind.name} @ {size}"


def worlds(kinds: list[type[Manager]], quick: bool) -> dict[str, World]:
    """Full pools of every size."""
    sizes = SIZES[:3] if quick else SIZES
    return {
        column(kind, size): World(kind, size, 16)
        for kind in kinds
        for size in sizes
        if size <= MOST.get(kind.name, 0)
    }


def streams(work: str, pools: dict[str, World]) -> dict[str, Stream]:
    """One work on all pools."""
    for world in pools.values():
        world.seed(work)
    return {name: WORKS[work](world) for name, world in pools.items()}
