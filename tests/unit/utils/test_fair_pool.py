"""Calls of several tenants on the same threads."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from pyengine.errors import QueueFullError
from pyengine.utils.fair_pool import FairPool

A, B = b"a", b"b"


@pytest.fixture
def pool() -> Iterator[FairPool]:
    pool = FairPool(2, "test", at_once=1, max_waiting=50)
    yield pool
    pool.close()


def test_a_tenant_leaves_a_thread_to_others(pool: FairPool) -> None:
    gate = threading.Event()
    flood = [pool.submit(gate.wait, B) for _ in range(20)]
    assert pool.submit(lambda: "mine", A).result(10) == "mine"
    assert not any(call.done() for call in flood)
    gate.set()
    assert [call.result(10) for call in flood] == [True] * 20


def test_who_has_used_less_goes_first() -> None:
    """One thread: a second call of A goes before all those that B had sent before."""
    pool = FairPool(1, "test", at_once=1, max_waiting=50)
    gate, order = threading.Event(), []
    first = pool.submit(gate.wait, B)
    calls = [pool.submit(lambda at=at: order.append((B, at)), B) for at in range(10)]  # type: ignore[misc]
    calls += [pool.submit(lambda at=at: order.append((A, at)), A) for at in range(2)]  # type: ignore[misc]
    gate.set()
    first.result(10)
    for call in calls:
        call.result(10)
    assert order[0] == (A, 0)
    assert [at for tenant, at in order if tenant == B] == list(range(10))
    pool.close()


def test_a_tenant_queues_only_so_much_and_others_do_not_notice(pool: FairPool) -> None:
    gate = threading.Event()
    with pytest.raises(QueueFullError, match="50 other calls of this caller wait for the test"):
        for _ in range(100):
            pool.submit(gate.wait, B)
    assert pool.submit(lambda: 1, A).result(10) == 1
    gate.set()


def test_what_was_cancelled_takes_no_place_and_does_not_run(pool: FairPool) -> None:
    gate, ran = threading.Event(), []
    first = pool.submit(gate.wait, B)
    while not first.running():
        pass
    for _ in range(200):
        call = pool.submit(lambda: ran.append(1), B)
        assert call.cancel()
    last = pool.submit(lambda: "last", B)
    gate.set()
    assert last.result(10) == "last" and not ran
    assert not pool._turns.tenants or pool._turns.tenants == [B]


def test_work_that_was_left_behind_counts_as_its_tenants(pool: FairPool) -> None:
    unfinished: Future[None] = Future()
    pool.submit(lambda: pool.hold(B, unfinished), B).result(10)
    later = pool.submit(lambda: "later", B)
    for _ in range(20):
        assert pool.submit(lambda: 1, A).result(10) == 1
    assert not later.done()
    unfinished.set_result(None)
    assert later.result(10) == "later"


def test_a_call_that_fails_ends_no_thread(pool: FairPool) -> None:
    for _ in range(10):
        with pytest.raises(ZeroDivisionError):
            pool.submit(lambda: 1 // 0, A).result(10)
    assert pool.submit(lambda: 1, A).result(10) == 1


def test_calls_that_wait_end_with_the_pool() -> None:
    pool = FairPool(1, "test", at_once=1, max_waiting=50)
    gate = threading.Event()
    first, second = pool.submit(gate.wait, A), pool.submit(gate.wait, A)
    while not first.running():
        pass
    pool.close()
    assert second.cancelled()
    gate.set()
    assert first.result(10)
