"""Work is run in order, and what it raises is kept for whoever asks."""

import threading
from typing import Any

import pytest

from pyengine.runner import InlineQueue, ThreadQueue


@pytest.mark.parametrize("make", [InlineQueue, ThreadQueue])
def test_results_and_errors_come_when_they_are_asked_for(make: Any) -> None:
    queue, done = make(), []
    works = [queue.submit(lambda at=at: done.append(at) or at * at) for at in range(5)]
    failing = queue.submit(lambda: 1 // 0)
    interrupted = queue.submit(lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    after = queue.submit(lambda: "fine")
    assert after.result() == "fine"
    assert [work.result() for work in works] == [0, 1, 4, 9, 16]
    assert done == [0, 1, 2, 3, 4]
    for work, error in ((failing, ZeroDivisionError), (interrupted, KeyboardInterrupt)):
        work.wait()  # says nothing
        with pytest.raises(error):
            work.result()


def test_a_thread_runs_beside_its_caller() -> None:
    queue, may_go_on = ThreadQueue(), threading.Event()
    first = queue.submit(lambda: may_go_on.wait(60))
    second = queue.submit(threading.get_ident)
    may_go_on.set()  # an inline queue would never have come here
    assert first.result() is True
    assert second.result() != threading.get_ident()
