"""The OpenMP threads of torch: a thread that has loaded a model does not keep them."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic, sleep

import pytest
import torch

from pyengine import LLM
from pyengine.utils import openmp
from pyengine.utils.openmp import torch_threads
from tests.support.checkpoints import save_tiny

pytestmark = pytest.mark.skipif(openmp.openmp_runtime() is None, reason="torch brings no libgomp")


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    with torch_threads(2):
        yield


def compute() -> None:
    """Something that two threads share."""
    torch.randn(1 << 20).exp_()


def num_threads() -> int:
    """Those that Python has not started."""
    started = {str(thread.native_id) for thread in threading.enumerate()}
    return len(set(os.listdir("/proc/self/task")) - started)


def stable_number() -> int:
    """Their number once the OpenMP threads of ended threads have exited."""
    before, count, since = -1, num_threads(), monotonic()
    while count != before or monotonic() - since < 0.1:
        if count != before:
            before, since = count, monotonic()
        sleep(0.01)
        count = num_threads()
    return count


def test_a_number_of_threads_is_set_for_one_thread_alone() -> None:
    """And computes in OpenMP and MKL: one thread makes no team, in an operation of either."""

    def in_a_new_thread(work: Callable[[], int]) -> int:
        return ThreadPoolExecutor(1).submit(work).result()

    def team(count: int) -> int:
        openmp.set_own_torch_threads(count)
        assert torch.get_num_threads() == count
        assert in_a_new_thread(torch.get_num_threads) == 2
        alone = stable_number()
        compute()
        torch.randn(256, 256) @ torch.randn(256, 256)
        return num_threads() - alone

    assert [in_a_new_thread(lambda n=n: team(n)) for n in (1, 2, 3)] == [0, 1, 2]
    assert torch.get_num_threads() == 2


def test_released_threads_are_gone_and_come_back() -> None:
    def check() -> None:
        alone = stable_number()
        compute()
        assert num_threads() == alone + 1
        openmp.release_threads()
        assert num_threads() == alone
        compute()
        assert num_threads() == alone + 1

    ThreadPoolExecutor(1).submit(check).result()  # a new thread has no OpenMP threads yet


def test_who_has_made_an_engine_keeps_no_threads(tmp_path: Path) -> None:
    """Else the thread that runs the steps would share the cores with them, and never spin."""
    save_tiny(tmp_path)

    def check() -> None:
        compute()
        llm = LLM(tmp_path, dtype="float32", num_blocks=16, max_model_len=64)
        num_set = stable_number()
        compute()
        assert num_threads() == num_set + 1
        llm.close()

    ThreadPoolExecutor(1).submit(check).result()


def test_threads_of_another_runtime_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp, "openmp_runtime", lambda: None)

    def check() -> None:
        compute()
        team = stable_number()
        openmp.release_threads()
        assert num_threads() == team
        monkeypatch.undo()
        openmp.release_threads()
        assert num_threads() == team - 1

    ThreadPoolExecutor(1).submit(check).result()
