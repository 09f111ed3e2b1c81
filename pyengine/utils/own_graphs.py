"""torch.compile for functions of which a process compiles many."""

import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any


def compile_apart(function: Any, **settings: Any) -> Callable[..., Any]:
    """Compile a Python function; `settings` are those of `torch.compile`.

    torch keeps graphs, and limits their number, per code object, which all closures of a function
    share. Here the graphs belong to the result alone, and are deleted with it.
    """
    import torch
    from torch._dynamo.eval_frame import remove_from_cache

    copy = FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__annotations__ = function.__annotations__
    compiled: Any = torch.compile(copy, **settings)
    # A code object and its graphs refer to each other where Python's collector does not look.
    weakref.finalize(compiled, remove_from_cache, copy.__code__).atexit = False
    return compiled  # type: ignore[no-any-return]
