"""Eight threads of random calls, hostile ones among them, while the collector is at its most eager.

`python -m tests.concurrency.storm SECONDS` prints how many calls were made. It fails if the manager
is not sound at the end, or if a call raises what it should not.
"""

import gc
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

from pyengine.kv_cache import BlockManager, KvError, StepBuffers
from tests.support.blocks import step_arrays

THREADS, NUM_BLOCKS, BLOCK = 8, 48, 4


class Mine(Exception):
    """What the hostile objects raise."""


class Storm:
    """A manager, handles that all threads share, and what came of the calls."""

    def __init__(self, seconds: float) -> None:
        self.manager = BlockManager(NUM_BLOCKS, BLOCK, groups=[None, 6], events=True)
        self.deadline = monotonic() + seconds
        self.handles: dict[str, list[Any]] = {"sequence": [], "plan": [], "pin": []}
        self.calls: Counter[str] = Counter()
        self.wrong: list[BaseException] = []

    def run(self) -> None:
        threads = [
            threading.Thread(target=self.loop, args=(seed,), daemon=True) for seed in range(THREADS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(self.deadline - monotonic() + 30)
        assert not any(thread.is_alive() for thread in threads), "a thread never came back"
        if self.wrong:
            raise self.wrong[0]

    def loop(self, seed: int) -> None:
        rng = random.Random(seed)
        buffers = StepBuffers(**self.arrays())
        while monotonic() < self.deadline and not self.wrong:
            Garbage(self, rng)
            name, call = rng.choice(list(self.choices(rng, buffers).items()))
            try:
                call()
                self.calls[name] += 1
            except (KvError, Mine, IndexError):
                self.calls[f"{name}, refused"] += 1
            except BaseException as error:
                self.wrong.append(error)

    def arrays(self) -> dict[str, Any]:
        wide = step_arrays(256, 16, 32)
        return wide | {
            name: wide[name][None].repeat(2, axis=0) for name in ("slot_mapping", "block_tables")
        }

    def tokens(self, rng: random.Random) -> Any:
        """Token ids, in all forms and none."""
        ids = [rng.randrange(2) for _ in range(rng.randrange(12))]
        forms: list[Callable[[], Any]] = [
            lambda: ids,
            lambda: bytes(ids),
            lambda: iter(ids),
            lambda: Hostile(self, rng, ids),
            lambda: [*ids, Hostile(self, rng, ids)],
        ]
        return rng.choice(forms)()

    def any(self, kind: str, rng: random.Random) -> Any:
        return rng.choice(self.handles[kind])

    def keep(self, kind: str, handle: Any) -> None:
        """Shared until there are more than a few; the first of them is dropped then."""
        handles = self.handles[kind]
        handles.append(handle)
        if len(handles) > 8:
            del handles[0]

    def choices(self, rng: random.Random, buffers: StepBuffers) -> dict[str, Callable[[], object]]:
        manager, handle = self.manager, self.any
        count = rng.randrange(20)
        return {
            "sequence": lambda: self.keep("sequence", manager.sequence(self.tokens(rng))),
            "match": lambda: self.keep("pin", manager.match_prefix(self.tokens(rng))),
            "begin": lambda: self.keep("plan", manager.begin_step(count)),
            "usage": manager.usage,
            "events": manager.take_events,
            "cached_hashes": manager.cached_hashes,
            "evict": manager.evict_all,
            "check": manager.check,
            "groups": lambda: manager.groups,
            "fork": lambda: self.keep("sequence", handle("sequence", rng).fork(count)),
            "append": lambda: handle("sequence", rng).append(self.tokens(rng)),
            "pin": lambda: self.keep("pin", handle("sequence", rng).pin()),
            "attach": lambda: handle("sequence", rng).attach(handle("pin", rng)),
            "release": lambda: handle("pin", rng).release(),
            "reset": lambda: handle("sequence", rng).reset(),
            "free": lambda: handle("sequence", rng).free(),
            "trim": lambda: handle("sequence", rng).trim(count),
            "tables": lambda: handle("sequence", rng).block_tables,
            "decode": lambda: handle("plan", rng).decode([handle("sequence", rng)]),
            "prefill": lambda: handle("plan", rng).prefill(handle("sequence", rng), count),
            "fill": lambda: handle("plan", rng).fill(buffers),
            "copies": lambda: handle("plan", rng).copies(),
            "commit": lambda: handle("plan", rng).commit([1] * handle("plan", rng).num_samples),
            "commit tokens": lambda: handle("plan", rng).commit(self.tokens(rng)),
            "rollback": lambda: handle("plan", rng).rollback(),
        }


class Hostile:
    """A list and an int that calls the manager while it is read, and may lie or raise."""

    def __init__(self, storm: Storm, rng: random.Random, ids: list[int]) -> None:
        self.storm, self.rng, self.ids = storm, rng, ids

    def disturb(self) -> None:
        if self.rng.random() < 0.2:
            raise Mine
        self.storm.manager.check()
        for handles in self.storm.handles.values():
            del handles[: self.rng.randrange(2)]

    def __len__(self) -> int:
        self.disturb()
        return self.rng.choice([0, 5, 2**40, 2**62])

    def __iter__(self) -> Iterator[int]:
        for token in self.ids:
            self.disturb()
            yield token

    def __index__(self) -> int:
        self.disturb()
        return 1


class Garbage:
    """A cycle whose end calls the manager."""

    def __init__(self, storm: Storm, rng: random.Random) -> None:
        self.cycle, self.storm = self, storm
        self.sequence = storm.manager.sequence([rng.randrange(2)])

    def __del__(self) -> None:
        self.storm.manager.take_events()
        self.sequence.free()
        self.storm.calls["finalizer"] += 1


def main(seconds: float) -> None:
    storm = Storm(seconds)
    sys.setswitchinterval(1e-5)
    gc.set_threshold(1)
    storm.run()
    gc.set_threshold(700)
    for handles in storm.handles.values():
        handles.clear()
    gc.collect()
    manager = storm.manager
    manager.check()
    usage = manager.usage()
    assert (usage.active, usage.pinned, usage.available) == (0, 0, NUM_BLOCKS), usage
    succeeded = {name for name in storm.calls if "refused" not in name}
    wanted = {"commit", "fill", "attach", "fork", "decode", "pin", "finalizer"}
    assert wanted <= succeeded, storm.calls
    print(f"{storm.calls.total()} calls of {len(succeeded)} kinds succeeded or were refused")


if __name__ == "__main__":
    main(float(sys.argv[1]))
