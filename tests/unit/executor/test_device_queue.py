"""Work is run in order, and what it raises is kept for whoever asks."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pyengine.executor.executor import Executor
from tests.support.fake_runner import FakeRunner


@pytest.mark.parametrize("has_thread", [False, True])
def test_results_and_errors_come_when_they_are_asked_for(has_thread: bool) -> None:
    executor = Executor(FakeRunner(8, 4), ThreadPoolExecutor(1) if has_thread else None)
    enqueue, done = executor._enqueue, []
    works = [enqueue(lambda at=at: done.append(at) or at * at) for at in range(5)]
    failing = enqueue(lambda: 1 // 0)
    interrupted = enqueue(lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    after = enqueue(lambda: "fine")
    assert after.result() == "fine"
    assert [work.result() for work in works] == [0, 1, 4, 9, 16]
    assert done == [0, 1, 2, 3, 4]
    for work, error in ((failing, ZeroDivisionError), (interrupted, KeyboardInterrupt)):
        assert isinstance(work.exception(), error)
        with pytest.raises(error):
            work.result()


def test_a_thread_runs_beside_its_caller() -> None:
    executor, may_go_on = Executor(FakeRunner(8, 4), ThreadPoolExecutor(1)), threading.Event()
    first = executor._enqueue(lambda: may_go_on.wait(60))
    second = executor._enqueue(threading.get_ident)
    may_go_on.set()  # without a thread it would never have come here
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
    executor, seen = Executor(FakeRunner(8, 4), device=torch.device("cuda", 1)), []

    def submit() -> None:
        executor.run(lambda: seen.append(CurrentDevice.current.device))
        with pytest.raises(ZeroDivisionError):
            executor.run(lambda: 1 // 0)
        seen.append(CurrentDevice.current.device)

    thread = threading.Thread(target=submit)
    thread.start()
    thread.join()
    submit()
    assert seen == [torch.device("cuda", 1), None] * 2
