"""Contiguous memory for the Python frames of a step, at any depth of its caller."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_ROOM = 1 << 17
"""Bytes; a step of a transformers model takes some 10 kB."""
_POINTER = 8
"""Bytes of a local variable in a frame."""


def with_frame_room(function: Callable[P, T]) -> Callable[P, T]:
    """Run `function` with the frames of all its calls in one piece of memory.

    CPython keeps frames in chunks of 16 kB. A call whose frame does not fit maps a new chunk, and
    unmaps it when it returns. If a layer's calls are at such a border, that happens 150 times a
    token (https://github.com/python/cpython/issues/142183; late releases of 3.13 and 3.14 keep one
    chunk). A frame larger than a chunk gets one of twice its size, whose rest serves its calls;
    only touched pages take memory.
    """

    def roomy(*args: P.args, **kwargs: P.kwargs) -> T:
        return function(*args, **kwargs)

    roomy.__code__ = roomy.__code__.replace(co_stacksize=_ROOM // _POINTER)
    return wraps(function)(roomy)
