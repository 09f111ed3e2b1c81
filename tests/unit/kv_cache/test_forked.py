"""Forks of a process that uses the block manager: its objects are refused, and end quietly."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyengine.cpu import CpuAttention, CpuCache, CpuStep, PackedWeight
from pyengine.kv_cache import (
    BlockManager,
    ReplicaIndex,
    StepBuffers,
    SuffixIndex,
    TracePlayer,
    Transfer,
)
from tests.support.blocks import computed, step_arrays
from tests.support.processes import run_python

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there are no forks")

MINUTE = 60.0


def floats(*shape: int) -> Any:
    return np.ones(shape, np.float32)


def objects(trace: Path) -> dict[str, Any]:
    """One of each object that has a lock or threads, and what its calls need."""
    manager = BlockManager(100_000, 1, events=True)
    other = BlockManager(8, 4)
    other.record(trace)
    other.sequence([1, 2, 3])
    other.stop_recording()
    sequence = computed(manager, np.arange(50_000))
    transfer = manager.sequence([7, 8, 9]).reserve(2)
    assert isinstance(transfer, Transfer)
    plan = manager.begin_step(8)
    plan.prefill(manager.sequence([4, 5, 6]), 8)
    suffix, replicas = SuffixIndex(64), ReplicaIndex(4, hash_seed=1)
    cache = CpuCache(floats(1, 1, 1, 1), floats(1, 1, 1, 1))
    return {
        "manager": manager,
        "sequence": sequence,
        "plan": plan,
        "pin": manager.match_prefix(np.arange(50_000)),
        "transfer": transfer,
        "suffix": suffix,
        "number": suffix.start([1, 2, 3]),
        "replicas": replicas,
        "player": TracePlayer(trace),
        "buffers": StepBuffers(**step_arrays()),
        "threads": CpuAttention(2),
        "weight": PackedWeight(floats(2, 4)),
        "cache": cache,
        "step": CpuStep(
            cache,
            query_start_loc=np.array([0, 1], np.int32),
            seq_lens=np.array([1], np.int32),
            block_tables=np.array([[0]], np.int32),
            slots=np.array([0]),
        ),
    }


ARGUMENTS: dict[str, Callable[[dict[str, Any]], tuple[Any, ...]]] = {
    "manager.sequence": lambda own: ([1],),
    "manager.match_prefix": lambda own: ([1],),
    "manager.snapshot_positions": lambda own: ([1],),
    "manager.explain": lambda own: ([1],),
    "manager.begin_step": lambda own: (1,),
    "manager.preview": lambda own: (own["sequence"],),
    "manager.blocks_for": lambda own: (1, 1),
    "manager.refs": lambda own: (0,),
    "manager.seq_refs": lambda own: (0,),
    "manager.state": lambda own: (0,),
    "manager.evict": lambda own: (1,),
    "manager.record": lambda own: ("/dev/null",),
    "sequence.attach": lambda own: (own["pin"],),
    "sequence.fork": lambda own: (1,),
    "sequence.want_snapshots": lambda own: ([1],),
    "sequence.append": lambda own: ([1],),
    "sequence.trim": lambda own: (50_001,),
    "sequence.reserve": lambda own: (1,),
    "sequence.extend": lambda own: (1,),
    "sequence.publish": lambda own: (1,),
    "plan.decode": lambda own: ([own["sequence"]],),
    "plan.speculate": lambda own: (own["sequence"], [1]),
    "plan.draft": lambda own: ([own["sequence"]], [1], [1]),
    "plan.prefill": lambda own: (own["sequence"], 1),
    "plan.cancel": lambda own: (own["sequence"],),
    "plan.fill": lambda own: (own["buffers"],),
    "plan.commit": lambda own: ([1],),
    "transfer.restored_tokens": lambda own: ([],),
    "suffix.start": lambda own: ([1],),
    "suffix.extend": lambda own: (own["number"], [1]),
    "suffix.finish": lambda own: (own["number"],),
    "suffix.draft": lambda own: (own["number"], 1),
    "replicas.apply": lambda own: (0, b"\1", bytes(16)),
    "replicas.clear": lambda own: (0,),
    "replicas.add_request": lambda own: (0, bytes(16)),
    "replicas.remove_request": lambda own: (0, bytes(16)),
    "replicas.matched_blocks": lambda own: (bytes(16),),
    "replicas.cached_blocks": lambda own: (0,),
    "player.seek": lambda own: (0,),
    "player.follow": lambda own: (0,),
    "threads.rms_norm": lambda own: (floats(1, 4), floats(4), floats(1, 4), 1e-6),
    "threads.forward": lambda own: (
        *(own["step"], own["cache"]),
        *(floats(1, 1, 1) for _ in range(4)),
    ),
    "weight.multiply": lambda own: (own["threads"], floats(1, 4), floats(1, 2)),
    "weight.multiply_gated": lambda own: (
        *(own["threads"], floats(1, 4)),
        *(own["weight"], floats(1, 2)),
    ),
}
"""Arguments of the calls that have any."""

KEYWORDS = {"threads.forward": {"scaling": 1.0}}

FREE = {
    *(f"manager.{name}" for name in ("num_blocks", "block_size", "null_block")),
    *(f"transfer.{name}" for name in ("id", "first_index", "num_blocks", "blocks")),
    *("sequence.id", "pin.release", "replicas.block_hashes", "threads.is_fast", "threads.isa"),
    *(f"weight.{name}" for name in ("from_float8", "gather", "in_features", "out_features")),
}
"""Properties that never change, and calls that need neither a lock nor a thread."""

REFUSED = ("manager", "sequence", "plan", "pin", "transfer", "suffix", "replicas", "player")


def calls(own: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """Every public call and property of the objects, by name."""
    methods = dict[str, Callable[[], object]]()
    for name in (*REFUSED, "threads", "weight"):
        for attribute in dir(own[name]):
            call = f"{name}.{attribute}"
            if attribute.startswith("_") or call in FREE:
                continue
            arguments = ARGUMENTS.get(call, lambda own: ())(own)
            keywords = KEYWORDS.get(call, {})

            def run(
                name: str = name,
                attribute: str = attribute,
                arguments: tuple[Any, ...] = arguments,
                keywords: dict[str, Any] = keywords,
            ) -> object:
                value = getattr(own[name], attribute)
                return value(*arguments, **keywords) if callable(value) else value

            methods[call] = run
    return methods


def run(code: str, *arguments: str) -> None:
    """Run code whose children have ten seconds each."""
    begin = f"""if True:
        import gc, os, signal, sys, threading, time
        from pathlib import Path
        from tests.unit.kv_cache.test_forked import *
        from pyengine import cpu, kv_cache

        HandleErrors = (kv_cache.HandleError, cpu.HandleError)

        def child_of(work):
            sys.stdout.flush()
            if (child := os.fork()) == 0:
                signal.alarm(10)
                work()
                sys.exit(0)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert status == 0, f"the child ended with {{status}}"
        {code}
        print("done")"""
    assert run_python(begin, *arguments, timeout=MINUTE).stdout == "done\n"


def test_every_call_is_refused_in_a_fork(tmp_path: Path) -> None:
    """While a thread of the parent has the lock of each object."""
    run(
        """
        own = objects(Path(sys.argv[1]))
        parent, all_calls = os.getpid(), calls(own)
        assert len(all_calls) > 80, sorted(all_calls)
        is_over = threading.Event()

        def hold(work):
            while not is_over.is_set():
                work()

        holders = [
            lambda: own["manager"].check(),
            lambda: own["suffix"].start(range(100_000)),
            lambda: own["replicas"].apply(0, bytes(100_000), bytes(1_600_000)),
        ]
        threads = [threading.Thread(target=hold, args=(work,), daemon=True) for work in holders]
        for thread in threads:
            thread.start()
        time.sleep(0.2)

        def refused():
            for name, call in all_calls.items():
                try:
                    call()
                except HandleErrors as error:
                    text = str(error)
                else:
                    raise SystemExit(f"{name} is not refused")
                wanted = f", this is process {os.getpid()}: make a new one after the fork"
                assert text.startswith(f"process {parent} made this ") and text.endswith(wanted), (
                    name, text
                )
            repr(own), own["pin"].release(), own["transfer"].blocks
            manager = BlockManager(8, 4)
            assert computed(manager, range(8)).num_computed_tokens == 8
            cache = CpuCache(floats(1, 1, 1, 1), floats(1, 1, 1, 1))
            out = 0 * floats(64, 4096)  # by threads of the child
            CpuAttention(2).rms_norm(floats(64, 4096), floats(4096), out, 0.0)
            assert (out == 1).all()
            own.clear(), all_calls.clear(), gc.collect()

        for _ in range(3):
            child_of(refused)
        is_over.set()
        for thread in threads:
            thread.join()
        own["manager"].check()
        assert not own["pin"].is_released and own["plan"].is_open
        """,
        str(tmp_path / "trace"),
    )


def test_handles_end_in_a_fork_while_threads_make_and_drop_them() -> None:
    """Those of the parent, and those that the child has made; a `with` block ends, too."""
    run("""
        manager = BlockManager(64, 4)
        kept, plan = computed(manager, range(32)), None
        is_over = threading.Event()

        def use():
            while not is_over.is_set():
                handles = [manager.sequence([1, 2, 3]) for _ in range(50)]
                handles += [manager.match_prefix(range(32)) for _ in range(50)]

        threads = [threading.Thread(target=use, daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()

        def leave():
            global kept, pin, plan, sequence
            own = BlockManager(8, 4)
            handles = [own.sequence([1]), own.match_prefix([1]), own.begin_step(1)]
            del kept, pin, plan, sequence, handles, own
            gc.collect()

        for _ in range(8):
            sequence = manager.sequence([1, 2, 3])
            with manager.match_prefix(range(32)) as pin:
                child_of(leave)
            assert pin.is_released
            plan = manager.begin_step(4)
            child_of(leave)
            plan.rollback()
        is_over.set()
        for thread in threads:
            thread.join()
        gc.collect()
        manager.check()
        """)


def test_a_recording_goes_on_beside_a_fork_that_ends(tmp_path: Path) -> None:
    """Its file is written by a thread that the child does not have."""
    run(
        """
        from pyengine.kv_cache import replay
        manager = BlockManager(64, 4)
        manager.record(sys.argv[1])
        kept = computed(manager, range(32))

        def leave():
            global manager, kept
            del manager, kept
            gc.collect()

        child_of(leave)
        kept.free()
        manager.stop_recording()
        report = replay(sys.argv[1])
        assert report.is_complete and report.operations["free"] == 1, report.operations
        """,
        str(tmp_path / "trace"),
    )


def test_a_fork_of_a_fork_has_its_own() -> None:
    run("""
        manager = BlockManager(8, 4)

        def again():
            own = BlockManager(8, 4)
            cache = CpuCache(floats(1, 1, 1, 1), floats(1, 1, 1, 1))
            own.sequence([1])

            def refused():
                for other in (manager, own):
                    try:
                        other.usage()
                    except HandleErrors:
                        continue
                    raise SystemExit("not refused")
                CpuCache(floats(1, 1, 1, 1), floats(1, 1, 1, 1))

            child_of(refused)
            own.check()

        child_of(again)
        manager.check()
        """)
