"""Triton kernels without a GPU: in a separate process, interpreted or made into machine code.

The choice is made when triton is imported.
"""

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.support.processes import run_python

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is for Linux"
)


def run_apart(module: str, function: str, *arguments: Any, **environment: str) -> None:
    """Call `function` of `module` in a process with this in its environment."""
    run_python(
        f"import {module}; {module}.{function}(*{arguments})",
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def in_interpreter(test: Callable[..., None]) -> Callable[..., None]:
    """A test in a process of its own, where Triton's interpreter runs the kernels."""

    @needs_triton
    @wraps(test)
    def run(**arguments: Any) -> None:
        function = f"{test.__name__}.__wrapped__"
        run_apart(test.__module__, function, *arguments.values(), TRITON_INTERPRET="1")

    return run


def in_compiler(test: Callable[[], None]) -> Callable[[], None]:
    """A test in a process of its own, where Triton compiles kernels and no cache has them."""

    @needs_triton
    @wraps(test)
    def run() -> None:
        with TemporaryDirectory() as cache:
            function = f"{test.__name__}.__wrapped__"
            run_apart(test.__module__, function, TRITON_CACHE_DIR=cache)

    return run


@contextmanager
def interpreted() -> Iterator[None]:
    """Let the kernel set of CUDA launch its kernels for the CPU: they run in the interpreter."""
    assert os.environ.get("TRITON_INTERPRET") == "1"
    with ExitStack() as stack:
        for module in ("pyengine.kernels", "pyengine.attention.paged"):
            stack.enter_context(patch(f"{module}.has_kernels", lambda _device: True))
        yield


def machine_code(
    kernel: Any, kinds: dict[str, Any], constants: dict[str, Any], capability: int, warps: int
) -> bytes:
    """`kernel` as a GPU of that compute capability (90 for 9.0) would run it.

    `kinds` are triton's names of the arguments' types; what is named in `constants` is one.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {**kinds, **dict.fromkeys(constants, "constexpr")}
    made = triton.compile(
        ASTSource(kernel, signature, constexprs=constants),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps},
    )
    code: bytes = made.asm["cubin"]
    return code


class LoadedBytes:
    """Counts the bytes that kernels in the interpreter load from a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._first = tensor.data_ptr()
        self._end = self._first + tensor.untyped_storage().nbytes()
        self._size = tensor.element_size()
        self.count = 0

    def __enter__(self) -> "LoadedBytes":
        from triton.runtime.interpreter import interpreter_builder

        load = type(interpreter_builder).create_masked_load

        def counted(builder: Any, pointers: Any, mask: Any, *others: Any) -> Any:
            at = pointers.data[mask.data]
            self.count += self._size * int(((at >= self._first) & (at < self._end)).sum())
            return load(builder, pointers, mask, *others)

        self._patch = patch.object(type(interpreter_builder), "create_masked_load", counted)
        self._patch.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._patch.stop()
