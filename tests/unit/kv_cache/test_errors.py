"""Misuse: the exact exception, a message that names the value, and a manager left as it was."""

import sys
from collections.abc import Callable
from typing import Any

import pytest

from pyengine.kv_cache import (
    BlockManager,
    BufferError,
    ConfigError,
    HandleError,
    InvariantError,
    KvError,
    PinError,
    PlanError,
    Sequence,
    StepBuffers,
    StepPlan,
    TokenError,
)
from tests.support.blocks import computed, retain, step_arrays, unchanged
from tests.support.processes import run_python

BLOCK = 4


class Scene:
    """A manager in use, blocks in every state and a step open; and handles of another manager."""

    def __init__(self) -> None:
        self.manager = manager = BlockManager(12, BLOCK)
        self.pin = retain(manager, [1, 2, 3, 4])
        computed(manager, [7] * 4).free()
        self.freed = computed(manager, [5, 6])
        self.freed.free()
        self.running = computed(manager, [20] * 6)  # one token to decode, not planned
        self.closed = manager.begin_step(1)
        self.closed.rollback()
        self.planned = manager.sequence([30] * 5)
        self.waiting = manager.sequence([1, 2, 3, 4, 5])  # nothing computed, not planned
        self.plan = manager.begin_step(100)
        self.plan.prefill(self.planned, 100)
        other = BlockManager(4, BLOCK)
        self.other = other.sequence([1, 2, 3, 4, 5])
        self.other_pin = retain(other, [1, 2, 3, 4])


@pytest.fixture
def scene() -> Scene:
    return Scene()


def refused(
    manager: BlockManager, call: Callable[[], object], error: type[KvError], *names: object
) -> None:
    """The call raises exactly `error`, its message holds each of `names`, nothing has changed."""
    with unchanged(manager), pytest.raises(error) as raised:
        call()
    assert type(raised.value) is error
    for name in names:
        assert str(name) in str(raised.value), raised.value


def test_every_exception_is_a_kv_error() -> None:
    errors = (
        *(ConfigError, TokenError, HandleError, PinError),
        *(PlanError, BufferError, InvariantError),
    )
    assert all(error.__base__ is KvError for error in errors)
    assert not issubclass(KvError, ValueError)
    assert KvError.__module__ == "pyengine._kv"


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"num_blocks": 0}, ("num_blocks", 0)),
        ({"num_blocks": 2**31 + 1}, ("num_blocks", 2**31 + 1)),
        ({"block_size": 0}, ("block_size", 0)),
        ({"block_size": 65537}, ("block_size", 65537)),
        ({"hash_bits": 129}, ("hash_bits", 129)),
    ],
)
def test_settings_out_of_range(settings: dict[str, int], names: tuple[object, ...]) -> None:
    with pytest.raises(ConfigError) as raised:
        BlockManager(**({"num_blocks": 4, "block_size": 4} | settings))
    assert all(str(name) in str(raised.value) for name in names)


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_blocks", -1), ("block_size", -1), ("block_size", 2**70), ("hash_seed", -1)],
)
def test_settings_that_are_no_machine_integers(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{name}.*{value}"):
        BlockManager(**({"num_blocks": 4, "block_size": 4} | {name: value}))


@pytest.mark.parametrize("block", [-1, 2**32])
def test_block_ids_that_are_no_machine_integers(scene: Scene, block: int) -> None:
    refused(scene.manager, lambda: scene.manager.refs(block), ConfigError, block)


def test_negative_budgets(scene: Scene) -> None:
    for call in (
        lambda: scene.plan.prefill(scene.waiting, -1),
        lambda: scene.plan.prefill(scene.waiting, 1, spare_blocks=-1),
    ):
        refused(scene.manager, call, ConfigError, -1)


@pytest.mark.skipif(sys.platform != "linux", reason="limits its address space")
def test_a_pool_whose_tables_do_not_fit_into_memory() -> None:
    code = (
        "import resource; from pyengine.kv_cache import BlockManager, ConfigError\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2**34, 2**34))\n"
        "try: BlockManager(2**20, 2**16)\n"
        "except ConfigError as error: print(error)\n"
    )
    done = run_python(code, timeout=60)
    assert f"{2**20} blocks do not fit into memory" in done.stdout


@pytest.mark.parametrize("method", ["refs", "seq_refs", "state"])
def test_blocks_outside_the_pool(scene: Scene, method: str) -> None:
    look = getattr(scene.manager, method)
    assert look(11) is not None
    for block in (12, 2**32 - 1):
        refused(scene.manager, lambda block=block: look(block), ConfigError, block, 12)


def test_no_tokens(scene: Scene) -> None:
    refused(scene.manager, lambda: scene.manager.sequence([]), TokenError, "at least one token")


SEQUENCE_CALLS: dict[str, Callable[[Scene, Sequence], Any]] = {
    "attach": lambda s, sequence: sequence.attach(s.pin),
    "pin": lambda s, sequence: sequence.pin(),
    "fork": lambda s, sequence: sequence.fork(1),
    "append": lambda s, sequence: sequence.append([1]),
    "trim": lambda s, sequence: sequence.trim(5),
    "reset": lambda s, sequence: sequence.reset(),
    "free": lambda s, sequence: sequence.free(),
    "tokens": lambda s, sequence: sequence.tokens(),
    "block_table": lambda s, sequence: sequence.block_table,
    "num_tokens": lambda s, sequence: sequence.num_tokens,
    "num_computed_tokens": lambda s, sequence: sequence.num_computed_tokens,
    "num_cached_tokens": lambda s, sequence: sequence.num_cached_tokens,
    "preview": lambda s, sequence: s.manager.preview(sequence),
    "prefill": lambda s, sequence: s.plan.prefill(sequence, 100),
    "decode": lambda s, sequence: s.plan.decode([sequence]),
    "decode, last": lambda s, sequence: s.plan.decode([s.running, sequence]),
    "speculate": lambda s, sequence: s.plan.speculate(sequence, [1]),
    "cancel": lambda s, sequence: s.plan.cancel(sequence),
}


@pytest.mark.parametrize("call", SEQUENCE_CALLS)
def test_freed_sequences(scene: Scene, call: str) -> None:
    refused(
        scene.manager, lambda: SEQUENCE_CALLS[call](scene, scene.freed), HandleError, "was freed"
    )
    assert scene.plan.decode([scene.running]) == []  # still unplanned after "decode, last"


@pytest.mark.parametrize(
    "call", ["preview", "prefill", "decode", "decode, last", "speculate", "cancel"]
)
def test_sequences_of_another_manager(scene: Scene, call: str) -> None:
    refused(
        scene.manager,
        lambda: SEQUENCE_CALLS[call](scene, scene.other),
        HandleError,
        "belongs to another BlockManager",
    )
    assert scene.plan.decode([scene.running]) == []


PLANNED = "attach", "fork", "append", "trim", "reset", "prefill", "decode", "decode, last"


@pytest.mark.parametrize("call", [*PLANNED, "speculate"])
def test_planned_sequences(scene: Scene, call: str) -> None:
    refused(
        scene.manager,
        lambda: SEQUENCE_CALLS[call](scene, scene.planned),
        PlanError,
        f"sequence {scene.planned.id} is in an open plan",
    )
    assert scene.plan.decode([scene.running]) == []


def test_sequences_out_of_turn(scene: Scene) -> None:
    manager, plan = scene.manager, scene.plan
    waiting, running = scene.waiting, scene.running
    refused(manager, lambda: plan.decode([waiting]), PlanError, f"sequence {waiting.id} has 5")
    refused(manager, lambda: plan.cancel(waiting), PlanError, f"sequence {waiting.id} is not in")
    assert (plan.num_sequences, running.num_tokens - running.num_computed_tokens) == (1, 1)


def test_pins_that_cannot_be_attached(scene: Scene) -> None:
    manager, pin = scene.manager, scene.pin
    refused(
        manager, lambda: scene.waiting.attach(scene.other_pin), HandleError, "belongs to another"
    )
    refused(manager, lambda: scene.running.attach(pin), PinError, "this one holds 2")
    for tokens, settings in (
        ([1, 2, 3, 5], {}),
        ([1, 2, 3], {}),
        ([1, 2, 3, 4], {"namespace": b"tenant"}),
    ):
        wrong = manager.sequence(tokens, **settings)
        refused(
            manager,
            lambda wrong=wrong: wrong.attach(pin),
            PinError,
            "pin's 4 tokens",
            f"sequence's {len(tokens)}",
        )
        assert wrong.block_table == []
    pin.release()
    refused(manager, lambda: scene.waiting.attach(pin), HandleError, "pin was released")


def test_a_third_step(scene: Scene) -> None:
    later = scene.manager.begin_step(5)
    refused(scene.manager, lambda: scene.manager.begin_step(5), PlanError, "step 6", "two steps")
    later.rollback()


def test_steps_out_of_turn(scene: Scene) -> None:
    later = scene.manager.begin_step(5)
    later.decode([scene.running])
    manager, earlier = scene.manager, scene.plan
    refused(manager, lambda: later.commit([1]), PlanError, "step 7", "step 6")
    refused(manager, earlier.rollback, PlanError, "step 6", "step 7")
    refused(manager, lambda: earlier.prefill(scene.waiting, 9), PlanError, "step 6", "step 7")
    refused(manager, lambda: earlier.cancel(scene.planned), PlanError, "step 6", "step 7")
    earlier.commit([1])
    later.commit([1])
    manager.check()


PLAN_CALLS: dict[str, Callable[[Scene, StepPlan], Any]] = {
    "num_tokens": lambda s, plan: plan.num_tokens,
    "num_sequences": lambda s, plan: plan.num_sequences,
    "num_samples": lambda s, plan: plan.num_samples,
    "budget_left": lambda s, plan: plan.budget_left,
    "decode": lambda s, plan: plan.decode([s.running]),
    "prefill": lambda s, plan: plan.prefill(s.waiting, 100),
    "speculate": lambda s, plan: plan.speculate(s.running, [1]),
    "cancel": lambda s, plan: plan.cancel(s.planned),
    "copies": lambda s, plan: plan.copies(),
    "fill": lambda s, plan: plan.fill(StepBuffers(**step_arrays())),
    "commit": lambda s, plan: plan.commit([1]),
    "rollback": lambda s, plan: plan.rollback(),
}


@pytest.mark.parametrize("call", PLAN_CALLS)
@pytest.mark.parametrize("end", ["commit", "rollback", "closed before"])
def test_closed_plans(scene: Scene, call: str, end: str) -> None:
    plan, serial = scene.plan, 6
    if end == "commit":
        plan.commit([1])
    elif end == "rollback":
        plan.rollback()
    else:
        plan, serial = scene.closed, 5
    refused(
        scene.manager,
        lambda: PLAN_CALLS[call](scene, plan),
        PlanError,
        f"step {serial} was committed or rolled back already",
    )
    assert not plan.is_open


@pytest.mark.parametrize("tokens", [[], [1, 2]])
def test_a_wrong_number_of_sampled_tokens(scene: Scene, tokens: list[int]) -> None:
    refused(
        scene.manager,
        lambda: scene.plan.commit(tokens),
        PlanError,
        "samples 1 tokens",
        f"given {len(tokens)}",
    )
    assert scene.planned.tokens() == [30] * 5
    scene.plan.commit([9])
    assert scene.planned.tokens() == [*[30] * 5, 9]


@pytest.mark.parametrize("argument", [None, 1, "a"])
def test_no_sequence_at_all(scene: Scene, argument: Any) -> None:
    manager, plan = scene.manager, scene.plan
    calls: list[Callable[[], object]] = [
        lambda: manager.preview(argument),
        lambda: plan.prefill(argument, 1),
        lambda: plan.decode([scene.running, argument]),
        lambda: plan.decode((scene.running, argument)),
        lambda: plan.decode(argument),
        lambda: scene.waiting.attach(argument),
        lambda: plan.fill(argument),
    ]
    for call in calls:
        with unchanged(manager), pytest.raises(TypeError):
            call()
    assert plan.decode((scene.running,)) == []
