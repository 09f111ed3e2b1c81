"""Work is run in order, and what it raises is kept for whoever asks."""

import threading
from typing import Any

import pytest
import torch

from pyengine.executor.executor import InlineQueue, ThreadQueue


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
        assert isinstance(work.exception(), error)
        with pytest.raises(error):
            work.result()


def test_a_thread_runs_beside_its_caller() -> None:
    queue, may_go_on = ThreadQueue(), threading.Event()
    first = queue.submit(lambda: may_go_on.wait(60))
    second = queue.submit(threading.get_ident)
    may_go_on.set()  # an inline queue would never have come here
    assert first.result() is True
    assert second.result() != threading.get_ident()


class CurrentDevice:
    """Stands for `torch.cuda.device`: which device is the current one of the thread."""

    current = threading.local()

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __enter__(self) -> None:
        self.before = getattr(self.current, "device", None)
        self.current.device = self.device

    def __exit__(self, *_: object) -> None:
        self.current.device = self.before


def test_work_for_a_cuda_device_finds_it_current_in_whatever_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device", CurrentDevice)
    queue, seen = InlineQueue(torch.device("cuda", 1)), []

    def submit() -> None:
        queue.submit(lambda: seen.append(CurrentDevice.current.device)).result()
        with pytest.raises(ZeroDivisionError):
            queue.submit(lambda: 1 // 0).result()
        seen.append(CurrentDevice.current.device)

    thread = threading.Thread(target=submit)
    thread.start()
    thread.join()
    submit()
    assert seen == [torch.device("cuda", 1), None] * 2
