"""Objects that lie about their length, raise in unusual places, or call the manager.

Calls that once killed the process run in a separate process.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pyengine.kv_cache import (
    BlockManager,
    BufferError,
    ConfigError,
    HandleError,
    KVBlocks,
    PlanError,
    Sequence,
    StepBuffers,
    TokenError,
)
from tests.support.blocks import computed, step_arrays, unchanged
from tests.support.processes import run_python

LIMIT = 2**31
"""Tokens that 32-bit positions reach."""


class Liar:
    """Three items, and a length that is something else."""

    def __init__(self, length: Any, items: Any = (1, 2, 3)) -> None:
        self.length, self.items = length, items

    def __len__(self) -> int:
        if isinstance(self.length, BaseException):
            raise self.length
        return self.length  # type: ignore[no-any-return]

    def __getitem__(self, at: int) -> Any:
        return self.items[at]


class Raises:
    """An int, a list and a text in name only."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __index__(self) -> int:
        raise self.error


@pytest.fixture
def manager() -> BlockManager:
    return BlockManager(8, 4)


# ---- lengths

TOO_LONG = {
    "m.sequence(range(2**45))": (TokenError, 2**45, LIMIT),
    "m.sequence(range(2**62))": (TokenError, 2**62, LIMIT),
    "m.sequence(range(2**100))": (TokenError, "OverflowError", LIMIT),
    "m.sequence(Liar(2**62))": (TokenError, 2**62, LIMIT),
    "m.match_prefix(Liar(2**45))": (TokenError, 2**45, LIMIT),
    "s.append(range(2**45))": (TokenError, 2**45, LIMIT),
    "p.commit(range(2**45))": (TokenError, 2**45, LIMIT),
    "p.speculate(s, range(2**45))": (TokenError, 2**45, LIMIT),
    "m.sequence(np.broadcast_to(np.int64(1), 2**45))": (TokenError, 2**45, LIMIT),
    "m.sequence(np.broadcast_to(np.uint8(1), 2**31 + 1))": (TokenError, 2**31 + 1, LIMIT),
    "m.sequence(np.broadcast_to(np.int64(1), 2**31))": (MemoryError, "no memory"),
    "p.decode(Liar(2**45))": (PlanError, 2**45, 2**24),
    "p.decode(range(2**45))": (PlanError, 2**45, 2**24),
    "p.decode(itertools.repeat(s))": (PlanError, 2**24 + 1, 2**24),
    "p.commit([1, 2], Liar(2**62))": (PlanError, 2**62, 2),
    "p.commit([], range(2**45))": (PlanError, 2**45),
    "p.commit([], itertools.repeat(1))": (PlanError, 1),
    "BlockManager(8, 4, groups=Liar(2**62))": (ConfigError, 2**62, 64),
    "BlockManager(8, 4, groups=range(2**45))": (ConfigError, 2**45, 64),
    "BlockManager(8, 4, groups=itertools.repeat(None))": (ConfigError, 1025, 64),
}
SCENE = """
import itertools, resource, sys
import numpy as np
from pyengine.kv_cache import BlockManager
from tests.support.blocks import unchanged
from tests.unit.kv_cache.test_hostile import Liar
resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30, 4 * 2**30))
m = BlockManager(8, 4)
s = m.sequence([1, 2, 3])
p = m.begin_step(8)
with unchanged(m):
    try:
        eval(sys.argv[1])
    except Exception as error:
        print(type(error).__name__, error, repr(error.__cause__))
"""


@pytest.mark.parametrize("call", TOO_LONG)
def test_what_says_it_is_too_long_is_refused_by_its_length(call: str) -> None:
    done = run_python(SCENE, call, timeout=60)
    error, *names = TOO_LONG[call]
    kind, _, message = done.stdout.partition(" ")
    assert kind == error.__name__, done.stdout  # type: ignore[union-attr]
    assert all(str(name) in message for name in names), message


@pytest.mark.parametrize("length", [0, 1, 2, 3, 2**20, LIMIT, TypeError("no length")])
def test_a_length_is_a_hint(manager: BlockManager, length: Any) -> None:
    assert manager.sequence(Liar(length)).tokens() == [1, 2, 3]
    running = computed(manager, [5])
    plan = manager.begin_step(8)
    few = length if isinstance(length, Exception) else min(length, 64)
    assert plan.decode(Liar(few, [running])) == []
    length_of_ids = length if isinstance(length, Exception) else min(length, 1)
    plan.commit(Liar(length, [7]), Liar(length_of_ids, [1]))
    assert BlockManager(8, 4, groups=Liar(few, [None, 8])).groups == (None, 8)


def takers(manager: BlockManager) -> dict[str, Callable[[Any], object]]:
    """All that take a list."""
    sequence, plan = manager.sequence([1]), manager.begin_step(8)
    return {
        "sequence": manager.sequence,
        "match_prefix": manager.match_prefix,
        "append": sequence.append,
        "speculate": lambda value: plan.speculate(sequence, value),
        "commit": plan.commit,
        "counts": lambda value: plan.commit([1], value),
        "decode": plan.decode,
        "groups": lambda value: BlockManager(8, 4, groups=value),
    }


TAKERS = list(takers(BlockManager(8, 4)))


# ---- errors of the objects themselves


@pytest.mark.parametrize("taker", TAKERS)
@pytest.mark.parametrize("error", [KeyboardInterrupt("mine"), ZeroDivisionError("mine")])
def test_an_error_of_len_comes_through(
    manager: BlockManager, taker: str, error: BaseException
) -> None:
    take = takers(manager)[taker]
    with unchanged(manager), pytest.raises(type(error), match="mine"):
        take(Liar(error))


@pytest.mark.parametrize("taker", sorted(set(TAKERS) - {"decode"}))
@pytest.mark.parametrize("error", [KeyboardInterrupt("mine"), ZeroDivisionError("mine")])
def test_an_error_of_an_item_comes_through(
    manager: BlockManager, taker: str, error: BaseException
) -> None:
    take = takers(manager)[taker]
    item = Raises(error)
    for value in ([item], (item,), iter([item]), Liar(0, [item])):
        with unchanged(manager), pytest.raises(type(error), match="mine"):
            take(value)


def numbers(manager: BlockManager) -> dict[str, Callable[[Any], object]]:
    """All that take a number."""
    sequence, plan = manager.sequence([1, 2]), manager.begin_step(8)
    return {
        "num_blocks": lambda n: BlockManager(n, 4),
        "block_size": lambda n: BlockManager(8, n),
        "hash_seed": lambda n: BlockManager(8, 4, hash_seed=n),
        "hash_bits": lambda n: BlockManager(8, 4, hash_bits=n),
        "token_budget": manager.begin_step,
        "refs": manager.refs,
        "seq_refs": manager.seq_refs,
        "state": manager.state,
        "blocks_for": lambda n: manager.blocks_for(n, 1),
        "max_tokens of blocks_for": lambda n: manager.blocks_for(1, n),
        "fork": sequence.fork,
        "trim": sequence.trim,
        "max_tokens": lambda n: plan.prefill(sequence, n),
        "spare_blocks": lambda n: plan.prefill(sequence, 1, spare_blocks=n),
        "lookahead": lambda n: plan.decode([], lookahead=n),
    }


@pytest.mark.parametrize("name", numbers(BlockManager(8, 4)))
def test_an_error_of_index_comes_through(manager: BlockManager, name: str) -> None:
    take = numbers(manager)[name]
    with unchanged(manager):
        with pytest.raises(KeyboardInterrupt, match="mine"):
            take(Raises(KeyboardInterrupt("mine")))
        with pytest.raises(ZeroDivisionError, match="mine"):
            take(Raises(ZeroDivisionError("mine")))
        with pytest.raises(ConfigError) as caught:
            take(Raises(TypeError("mine")))
    assert str(caught.value.__cause__) == "mine"


def test_what_is_no_integer_says_why(manager: BlockManager) -> None:
    for error in (TypeError("mine"), OverflowError("mine")):
        with unchanged(manager), pytest.raises(TokenError, match="position 1") as caught:
            manager.sequence([1, Raises(error)])
        assert str(caught.value.__cause__) == "mine"


class Unprintable(Raises):
    def __str__(self) -> str:
        raise self.error


class Endless:
    def __str__(self) -> str:
        return "9" * 10_000_000


@pytest.mark.parametrize(
    "bad", [10**5000, Endless(), "x" * 10**6, "\ud800", [[1] * 10**5]], ids=type
)
def test_a_value_is_named_in_a_short_message(manager: BlockManager, bad: Any) -> None:
    for call in (lambda: manager.sequence([1, bad]), lambda: manager.refs(bad)):
        with unchanged(manager), pytest.raises((TokenError, ConfigError)) as caught:
            call()
        assert 20 < len(str(caught.value)) < 400


def test_an_error_of_str_is_not_printed(
    manager: BlockManager, capfd: pytest.CaptureFixture[str]
) -> None:
    with unchanged(manager), pytest.raises(TokenError, match="Unprintable"):
        manager.sequence([1, Unprintable(TypeError("mine"))])
    with unchanged(manager), pytest.raises(TokenError, match="int"):
        manager.sequence([1, 10**5000])
    assert capfd.readouterr() == ("", "")


def test_an_interrupt_while_a_value_is_named_comes_through(manager: BlockManager) -> None:
    class Slow:
        def __str__(self) -> str:
            raise KeyboardInterrupt

    with unchanged(manager), pytest.raises(KeyboardInterrupt):
        manager.sequence([Slow()])


# ---- objects that do something else while they are read


def test_a_list_that_changes_while_it_is_read(manager: BlockManager) -> None:
    class Clears:
        def __index__(self) -> int:
            tokens.clear()
            return 1

    class Grows:
        def __index__(self) -> int:
            tokens.append(self)
            return 1

    tokens: list[Any] = [Clears(), 2, 3]
    assert manager.sequence(tokens).tokens() == [1]
    tokens = [Grows(), Grows()]
    assert manager.sequence(tokens).tokens() == [1, 1]
    assert len(tokens) == 4
    manager.check()


def test_an_iterator_that_ends_what_it_is_for(manager: BlockManager) -> None:
    running = computed(manager, [5])
    plan = manager.begin_step(8)
    plan.decode([running])

    def committing() -> Iterator[int]:
        plan.commit([6])
        yield 6

    with pytest.raises(PlanError, match="committed or rolled back already"):
        plan.commit(committing())  # type: ignore[arg-type]
    assert running.tokens() == [5, 0, 6]

    def freeing() -> Iterator[Sequence]:
        yield running
        running.free()

    later = manager.begin_step(8)
    with pytest.raises(HandleError, match="was freed"):
        later.decode(freeing())  # type: ignore[arg-type]
    assert later.num_sequences == 0

    def rolling_back() -> Iterator[int]:
        later.rollback()
        yield 1

    with pytest.raises(PlanError, match="committed or rolled back already"):
        later.commit(rolling_back())  # type: ignore[arg-type]
    manager.check()
    assert manager.usage().active == 0


def test_an_iterator_that_drops_the_last_handle(manager: BlockManager) -> None:
    handles = [computed(manager, [5]), computed(manager, [6])]
    plan = manager.begin_step(8)

    def dropping() -> Iterator[Sequence]:
        while handles:
            yield handles.pop()

    with pytest.raises(HandleError, match="was freed"):
        plan.decode(dropping())  # type: ignore[arg-type]
    assert (plan.num_sequences, manager.usage().active) == (0, 0)
    manager.check()


def test_arrays_in_use_keep_their_size(manager: BlockManager) -> None:
    arrays = step_arrays()
    arrays["seq_lens"] = memoryview(held := bytearray(32)).cast("q")
    buffers = StepBuffers(**arrays)
    with pytest.raises(Exception, match="export"):
        held.extend(b"12345678")
    with pytest.raises(ValueError, match="resize"):
        arrays["positions"].resize(4096)
    sequence = manager.sequence([1, 2, 3])
    plan = manager.begin_step(8)
    plan.prefill(sequence, 8)
    plan.fill(buffers)
    assert held[:8] == (3).to_bytes(8, sys.byteorder)


@pytest.mark.parametrize("holder", ["StepBuffers", "KVBlocks"])
def test_tensors_in_use_keep_their_memory(holder: str) -> None:
    """torch would free it. A tensor that gets other memory leaves the old one where it is."""
    torch = pytest.importorskip("torch")

    def kept(tensor: Any) -> object:
        if holder == "KVBlocks":
            return KVBlocks([tensor], [[0]])
        return StepBuffers(**step_arrays() | {"positions": tensor})

    for resize in ("tensor.resize_(1 << 20)", "tensor.untyped_storage().resize_(0)"):
        tensor = torch.zeros(32, dtype=torch.int64)
        held = kept(tensor)
        with pytest.raises(RuntimeError, match="not resizable"):
            eval(resize)
        assert tensor.untyped_storage().nbytes() == 256
        del held
    tensor = torch.zeros(100_000, dtype=torch.int64)
    held, address = kept(tensor), tensor.data_ptr()
    tensor.data = torch.zeros(8, dtype=torch.int64)
    tensors = [torch.ones(100_000, dtype=torch.int64) for _ in range(10)]
    assert address not in [other.data_ptr() for other in tensors]
    del held


def test_a_buffer_that_raises(manager: BlockManager) -> None:
    released = memoryview(bytearray(8))
    released.release()
    with unchanged(manager), pytest.raises((ValueError, TokenError)):
        manager.sequence(released)
    with pytest.raises(BufferError, match="seq_lens"):
        StepBuffers(**(step_arrays() | {"seq_lens": released}))
