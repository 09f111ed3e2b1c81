"""Calls at the border of two of Python's chunks of frames: what they map and unmap."""

import resource
from collections.abc import Callable

from pyengine.utils.frame_memory import with_frame_room

CALLS = 1000
DEPTHS = range(200)
"""More than a chunk of 16 kB has room for: one of them stands at its end."""


def leaf(a: int = 1, b: int = 2) -> int:
    return a + b


# Larger than a frame of `faults_at`: else it could fit at one depth, and `loop` not at the next.
leaf.__code__ = leaf.__code__.replace(co_stacksize=100)


def loop() -> int:
    return sum(leaf() for _ in range(CALLS))


def faults_at(depth: int, do: Callable[[], object]) -> int:
    """Pages that the system gives this thread meanwhile."""
    if depth:
        return faults_at(depth - 1, do)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    do()
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def test_no_depth_maps_memory_for_each_call() -> None:
    assert max(faults_at(depth, with_frame_room(loop)) for depth in DEPTHS) < CALLS / 10


def test_it_is_the_function_to_its_callers() -> None:
    def divide(a: int, /, by: int = 2, *more: int, **named: int) -> tuple[object, ...]:
        """The doc."""
        return a // by, more, named

    roomy = with_frame_room(divide)
    assert roomy(7) == (3, (), {})
    assert roomy(7, 3, 4, name=5) == (2, (4,), {"name": 5})
    assert (roomy.__name__, roomy.__doc__) == ("divide", "The doc.")
    with_frame_room(lambda: roomy(4, 2))()  # within another
