"""Room for the Python frames of steps, however deep their caller stands."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_ROOM = 1 << 17
"""Bytes; a step of a transformers model takes some 10 kB."""
_SLOT = 8
"""Bytes of one place in a frame."""


def with_frame_room(function: Callable[P, T]) -> Callable[P, T]:
    """Have the frames of all that `function` calls in one piece of memory.

    CPython keeps frames in chunks of 16 kB, and a call whose frame does not fit has a new chunk
    mapped, and unmapped when it returns. Where a layer's calls happen to stand at such a border,
    that is 150 times a token (https://github.com/python/cpython/issues/142183; late releases of
    3.13 and 3.14 keep one chunk). A frame larger than a chunk has one of twice its size, the rest
    of which is for what it calls; memory is taken for what is touched.
    """

    def roomy(*args: P.args, **kwargs: P.kwargs) -> T:
        return function(*args, **kwargs)

    roomy.__code__ = roomy.__code__.replace(co_stacksize=_ROOM // _SLOT)
    return wraps(function)(roomy)
