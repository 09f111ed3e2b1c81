"""Memory in which flashinfer plans, and in which the pages of a graph's sequences lie."""

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from pyengine.attention.paged import PageTable
from pyengine.kv_cache.memory import upload

_PLAN_BUFFER = "_pin_memory_int_workspace_buffer"
"""The attribute in which a wrapper keeps the pinned memory that it plans in."""

Mark = Callable[[], Callable[[], bool]]
"""Marks a place in the device's queue; what it returns says whether the device has come there."""


def mark_in_stream() -> Callable[[], bool]:
    """Mark the current CUDA stream by an event. See `Mark`."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event.query


def mark_at_once() -> Callable[[], bool]:
    """The device is the host, which is always there. See `Mark`."""
    return lambda: True


class PlanMemory:
    """Pinned memory that wrappers plan in.

    `plan` writes into such memory and queues its copy to the device, without a word of when that is
    done; the wrapper would write into the same memory for the next step, which may be planned while
    the copy still waits. So each plan gets memory whose last copy has been made. There are as many
    pieces as there are plans under way.
    """

    def __init__(self, mark: Mark) -> None:
        self._mark = mark
        self._lent: deque[tuple[torch.Tensor, Callable[[], bool]]] = deque()

    def plan(self, wrapper: Any, plan: Callable[[], object]) -> None:
        """Call `plan`, which plans `wrapper`, in memory that no earlier plan needs any more."""
        memory = self._free(getattr(wrapper, _PLAN_BUFFER))
        setattr(wrapper, _PLAN_BUFFER, memory)
        plan()
        self._lent.append((memory, self._mark()))

    def _free(self, own: torch.Tensor) -> torch.Tensor:
        if self._lent and self._lent[0][1]():
            memory, _ = self._lent.popleft()
            return memory
        return torch.empty_like(own, pin_memory=own.is_pinned())


class GraphPages:
    """The pages of a group's sequences on the device, in memory that stays in place.

    `indptr`, `last_page_len` and `indices` lie one behind the other, as `packed` has them: a step
    brings them in one copy.
    """

    def __init__(self, memory: torch.Tensor, batch: int) -> None:
        self.batch = batch
        self._memory = memory
        self.indptr = memory[: batch + 1]
        self.last_page_len = memory[batch + 1 : 2 * batch + 1]
        self.indices = memory[2 * batch + 1 :]

    @staticmethod
    def size(batch: int, width: int) -> int:
        """Numbers for so many sequences of up to `width` pages."""
        return 2 * batch + 1 + batch * width

    def fill(self, pages: PageTable) -> None:
        """Bring a step's pages there."""
        packed = np.concatenate((pages.indptr, pages.last_page_len, pages.indices))
        self._memory[: len(packed)].copy_(upload(packed, self._memory.device))
