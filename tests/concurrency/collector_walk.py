"""Calls every getter and method of the block manager while the collector runs at its most eager.

Garbage with finalizers that call the manager lies at hand before each call, so a call that makes a
Python object under the manager's lock waits for itself for ever: run this in a process of its own.
`python -m tests.concurrency.collector_walk FOLDER`
"""

import gc
import sys
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from pyengine._kv import BlockManager, KvError, Pin, Sequence, StepBuffers, StepPlan, Transfer
from tests.support.blocks import computed, step_arrays

PROMPT = list(range(9))
GROUPS: list[int | None] = [None, *range(8, 32)]
"""More than 20: shorter tuples come from a free list, and the collector sleeps."""
BLOCKS = 64 * len(GROUPS)
WALKED = (BlockManager, Sequence, Pin, StepPlan, Transfer)


class Walk:
    """Calls, with garbage at hand; knows which were made and in which a finalizer ran."""

    def __init__(self, manager: BlockManager) -> None:
        self.manager = manager
        self.running = ""
        self.called: set[str] = set()
        self.interrupted: set[str] = set()

    def __call__(self, owner: Any, name: str, *arguments: Any, **settings: Any) -> Any:
        """The answer to the last of a few calls; None if it was refused."""
        called, answer = f"{type(owner).__name__}.{name}", None
        call = partial(getattr, owner, name)
        if callable(getattr(type(owner), name)):
            call = partial(call(), *arguments, **settings)
        for _ in range(4):
            gc.disable()
            for _ in range(4):
                Finalizer(self)
            with suppress(KvError, OSError):
                self.running = called
                gc.enable()
                # Nothing is made here, so the collector starts inside the call.
                answer = call()
            gc.disable()
            self.running = ""
            gc.collect()
        self.called.add(called)
        return answer


class Finalizer:
    """Garbage in a cycle. Its end calls the manager and lets go of handles."""

    def __init__(self, walk: Walk) -> None:
        self.cycle, self.walk = self, walk
        self.sequence = walk.manager.sequence([1, 2, 3, 4, 5])
        self.pin = walk.manager.match_prefix(PROMPT)

    def __del__(self) -> None:
        self.walk.interrupted.add(self.walk.running)
        manager = self.walk.manager
        manager.check()
        manager.usage()
        manager.sequence([1, 2, 3])
        self.sequence.free()
        self.pin.release()


def walk_manager(walk: Walk, keep: Sequence, folder: str) -> None:
    manager = walk.manager
    for getter in ("num_blocks", "block_size", "groups", "null_block", "weights_version"):
        walk(manager, getter)
    for method in (
        "usage",
        "state_usage",
        "stats",
        "snapshot",
        "evict_all",
        "cached_hashes",
        "check",
    ):
        walk(manager, method)
    walk(manager, "sequence", PROMPT)
    walk(manager, "sequence", [-1])
    walk(manager, "match_prefix", PROMPT)
    walk(manager, "snapshot_positions", PROMPT)
    walk(manager, "explain", PROMPT)
    for method in ("refs", "seq_refs", "state"):
        walk(manager, method, 0)
        walk(manager, method, BLOCKS)
    walk(manager, "preview", keep)
    walk(manager, "blocks_for", 9, 4)
    computed(manager, range(50, 70)).free()
    walk(manager, "take_events")
    computed(manager, range(50, 70)).free()
    walk(manager, "take_packed_events")
    computed(manager, range(50, 70)).free()
    walk(manager, "take_evicted")
    walk(manager, "evict", 2)
    walk(manager, "begin_step", 64)
    walk(manager, "record", f"{folder}/no/such/folder")
    fresh = BlockManager(8, 4)
    walk(fresh, "advance_weights_version")
    walk(fresh, "record", f"{folder}/recording")
    walk(fresh, "stop_recording")


def walk_sequence(walk: Walk, keep: Sequence) -> None:
    getters = ("id", "is_live", "num_tokens", "num_computed_tokens", "num_cached_tokens")
    getters += ("num_restored_tokens", "weights_version", "is_private")
    for name in (*getters, "block_table", "block_tables", "tokens", "explain", "pin", "__repr__"):
        walk(keep, name)
    walk(keep, "want_snapshots", [4, 8])
    walk(keep, "keep_snapshot")
    walk(keep, "fork", 5)
    walk(keep, "fork", 5000)
    other, pin = walk.manager.sequence(PROMPT), walk.manager.match_prefix(PROMPT)
    walk_transfer(walk)
    walk(other, "attach", pin)
    walk(other, "append", [1])
    walk(other, "reset")
    walk(other, "reuse_cached")
    walk(other, "extend", len(PROMPT))
    walk(other, "publish", len(PROMPT))
    walk(other, "trim", 100)
    walk(other, "free")
    walk(other, "tokens")
    of_states = ("num_state_tokens", "state_blocks", "indexed_blocks")
    for name in ("num_tokens", "blocks", *of_states, "is_released", "__repr__", "__enter__"):
        walk(pin, name)
    walk(pin, "__exit__", None, None, None)
    walk(pin, "release")
    walk(keep, "attach", pin)


def walk_transfer(walk: Walk) -> None:
    manager = walk.manager
    for end in (("complete",), ("fail",), ("abandon",)):
        walk(manager.sequence(range(200, 210)), "reserve", 9)  # a dropped answer is a failure
        transfer = manager.sequence(range(300, 310)).reserve(9)
        assert isinstance(transfer, Transfer)
        for name in ("id", "first_index", "num_blocks", "blocks", "__repr__"):
            walk(transfer, name)
        walk(transfer, "restored_tokens", transfer.blocks)
        walk(transfer, *end)
        manager.evict_all()


def walk_plan(walk: Walk, keep: Sequence) -> None:
    manager = walk.manager
    fork, single = keep.fork(10), manager.sequence([1])
    plan = manager.begin_step(64)
    walk(plan, "decode", [keep])
    walk(plan, "decode", (keep,))
    walk(plan, "prefill", fork, 64)
    walk(plan, "prefill", manager.sequence(range(9000)), 64, spare_blocks=0)
    walk(plan, "draft", [keep], [2, 3], [2])
    walk(plan, "speculate", single, [2, 3])
    for name in ("num_tokens", "num_sequences", "num_samples", "budget_left", "is_open"):
        walk(plan, name)
    for name in ("copies", "state_loads", "state_saves"):
        walk(plan, name)
    walk(plan, "__repr__")
    arrays = step_arrays(64, 8, 16)
    grouped = {
        name: np.stack([arrays[name]] * len(GROUPS)) for name in ("slot_mapping", "block_tables")
    }
    walk(plan, "fill", StepBuffers(**(arrays | grouped)))
    walk(plan, "cancel", fork)
    walk(plan, "commit", [1])
    walk(plan, "commit", [1] * plan.num_samples if plan.is_open else [])
    walk(plan, "rollback")


def main(folder: str) -> None:
    manager = BlockManager(BLOCKS, 4, groups=GROUPS, events=True, keep_evicted=True)
    keep, walk = computed(manager, PROMPT), Walk(manager)
    gc.set_threshold(1)
    walk_manager(walk, keep, folder)
    walk_sequence(walk, keep)
    walk_plan(walk, keep)
    gc.disable()
    members = {f"{kind.__name__}.{name}" for kind in WALKED for name in vars(kind)}
    missed = {name for name in members - walk.called if "__" not in name}
    assert not missed, f"never called: {missed}"
    # The collector was there: finalizers ran inside calls that make tuples and lists.
    looked = {"BlockManager.groups", "BlockManager.take_events", "Sequence.block_tables"}
    assert looked <= walk.interrupted, walk.interrupted
    manager.check()
    print(f"{len(walk.called)} members, finalizers in {len(walk.interrupted)}")


if __name__ == "__main__":
    main(sys.argv[1])
