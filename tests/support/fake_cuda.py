"""A CUDA device without one: tensors on "cuda" have shapes, types and places, and no numbers.

Tensors of the host are real. It is an error if the host reads a number of the device, if an
operator mixes devices, or if the host waits. Copies that make the host wait are listed.
"""

import importlib
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pkgutil import iter_modules
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

import pyengine.kernels
from tests.support.cuda_lowering import pretend_cuda

_READS = ("cpu", "item", "numpy", "tolist", "__bool__", "__float__", "__index__", "__int__")
_LIKE = ("empty_like", "full_like", "ones_like", "rand_like", "randn_like", "zeros_like")


class HostRead(AssertionError):
    """The host reads a number of the device: it waits until the device has computed it."""


class FakeCuda(TorchFunctionMode):
    """Inside, "cuda" is a device. Construct it once in a process, which it changes for good."""

    def __init__(self, capability: tuple[int, int] = (9, 0)) -> None:
        super().__init__()
        pretend_cuda(capability)
        _pretend_streams(self)
        self.tensors = FakeTensorMode(allow_non_fake_inputs=True)
        self.waits: list[str] = []
        """The places where the host waited for the device, or for a copy of pageable memory."""
        self._pinned: dict[int, torch.Tensor] = {}  # as long as this lives, for no address twice

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run `func` on fake tensors if it has any, or makes one on the device."""
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        leaves = tree_leaves((args, kwargs))
        is_fake = any(isinstance(leaf, FakeTensor) for leaf in leaves)
        if name == "is_pinned" and not is_fake:
            return self._is_pinned(args[0])
        if name == "pin_memory" and not is_fake:
            return self._pin(args[0].clone())
        pins = kwargs.pop("pin_memory", False)
        if pins:
            assert not _is_cuda(kwargs.get("device")), "memory of the device cannot be pinned"
            with torch._C.DisableTorchFunction():
                kwargs["device"] = "cpu"
                args = tuple(_on_host(arg) for arg in args) if name in _LIKE else args
                return self._pin(func(*args, **kwargs))
        makes = _is_cuda(kwargs.get("device")) or (
            name in ("to", "cuda") and any(_is_cuda(leaf) for leaf in args[1:])
        )
        if not (is_fake or makes):
            return func(*args, **kwargs)
        if name == "__deepcopy__":  # torch 2.11's own frees memory of fake tensors that are in use
            return self._copied(*args)
        self._check(name, args, kwargs)
        if name == "copy_" and not isinstance(args[0], FakeTensor):
            return args[0]  # to pinned memory, unread so far
        if makes:
            args = tuple(self._faked(arg) for arg in args)
        with self.tensors:
            return func(*args, **kwargs)

    def _copied(self, tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        with self.tensors:
            copy = tensor.detach().clone()
        is_weight = isinstance(tensor, torch.nn.Parameter)
        memo[id(tensor)] = torch.nn.Parameter(copy, False) if is_weight else copy
        return memo[id(tensor)]

    def _faked(self, leaf: Any) -> Any:
        is_real = isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor)
        return self.tensors.from_tensor(leaf) if is_real else leaf

    def _check(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise an error for a read, list a copy that makes the host wait."""
        source = args[1] if name == "copy_" else args[0] if args else None
        if not isinstance(source, torch.Tensor):
            return
        from_device = source.device.type == "cuda"
        if name in _READS or (name == "to" and any(_is_cpu(leaf) for leaf in args[1:])):
            if from_device:
                raise HostRead(f"{name} of {tuple(source.shape)} at {_place()}")
            return
        if name == "to":
            is_upload, host = not from_device, source
        elif name == "copy_":
            target = args[0]
            is_upload = target.device.type == "cuda" and not from_device
            if not is_upload and not (from_device and target.device.type == "cpu"):
                return
            host = source if is_upload else target
        else:
            return
        if from_device and name == "to":
            return
        is_async = bool(kwargs.get("non_blocking")) or (name == "copy_" and args[2:3] == (True,))
        is_scalar = name == "copy_" and source.dim() == 0 and is_upload
        if not (is_async and self._is_pinned(host)) and host.numel() and not is_scalar:
            kind = "pinned" if self._is_pinned(host) else "pageable"
            self.waits.append(f"{name} of {kind} {tuple(host.shape)} at {_place()}")

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel():
            self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        if isinstance(tensor, FakeTensor):
            return False
        return not tensor.numel() or tensor.untyped_storage().data_ptr() in self._pinned

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the mode, for compiled code; tensors stay fake, those of the host become so."""
        self.__exit__(None, None, None)
        try:
            with self.tensors:
                yield
        finally:
            self.__enter__()

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Inside `paused`: tensors of the host are real again."""
        with unset_fake_temporarily(), self:
            yield

    def move(self, model: Any) -> Any:
        """Put every tensor that a module of `model` holds on the device, and return `model`."""
        moved: dict[int, Any] = {}

        def on_device(tensor: Any) -> Any:
            if id(tensor) not in moved:
                made = self.tensors.from_tensor(tensor.detach()).to("cuda")
                is_weight = isinstance(tensor, torch.nn.Parameter)
                moved[id(tensor)] = torch.nn.Parameter(made, False) if is_weight else made, tensor
            return moved[id(tensor)][0]

        for module in model.modules():
            for tensors in (module._parameters, module._buffers, vars(module)):
                for name, tensor in list(tensors.items()):
                    if isinstance(tensor, torch.Tensor) and not isinstance(tensor, FakeTensor):
                        tensors[name] = on_device(tensor)
        return model


def _is_cuda(leaf: Any) -> bool:
    return _kind(leaf) == "cuda"


def _is_cpu(leaf: Any) -> bool:
    return _kind(leaf) == "cpu"


def _kind(leaf: Any) -> str | None:
    if isinstance(leaf, torch.device):
        return leaf.type
    return leaf.partition(":")[0] if isinstance(leaf, str) else None


def _on_host(leaf: Any) -> Any:
    """A tensor of the host with the shape and type of `leaf`."""
    if isinstance(leaf, FakeTensor):
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")
    return leaf


def _place() -> str:
    """The last line of code outside of torch and this file."""
    for frame in reversed(traceback.extract_stack()):
        if frame.filename != __file__ and "/torch/" not in frame.filename:
            return f"{frame.filename}:{frame.lineno} ({frame.line})"
    return "?"


def _pretend_streams(device: FakeCuda) -> None:
    class Event:
        """Reached as soon as it is recorded."""

        def __init__(self, *_arguments: Any, **_named: Any) -> None:
            pass

        def record(self, *_stream: Any) -> None:
            pass

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            pass

    cuda: Any = torch.cuda
    cuda.Event = Event
    cuda.synchronize = lambda _device=None: device.waits.append(f"synchronize at {_place()}")
    cuda.empty_cache = lambda: None
    cuda.device = lambda _device=None: nullcontext()
    stream = torch.Stream(stream_id=0, device_index=0, device_type=1)
    cuda.current_stream = lambda _device=None: stream
    cuda.get_device_name = lambda _device=None: "NVIDIA H100"


class WarmedUp:
    """A Triton kernel that is compiled for its arguments, and not launched."""

    def __init__(self, kernel: Any, on_compiled: Callable[[Any], None] = lambda _compiled: None):
        self._kernel = kernel
        self._on_compiled = on_compiled

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **named: Any) -> None:
            for arg in (*args, *named.values()):
                assert not isinstance(arg, torch.Tensor) or arg.device.type == "cuda", arg
            with torch._C.DisableTorchFunction():
                args = tuple(
                    torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device="cpu")
                    if isinstance(arg, torch.Tensor)
                    else arg
                    for arg in args
                )
                self._on_compiled(self._kernel.warmup(*args, grid=grid, **named))

        return launch


@contextmanager
def kernels_warmed_up() -> Iterator[list[Any]]:
    """Compile our Triton kernels instead of launching them; yields what was compiled.

    Sizes are those of the calls, so specialisations are, too.
    """
    compiled: list[Any] = []
    modules = [
        importlib.import_module(f"pyengine.kernels.{module.name}")
        for module in iter_modules(pyengine.kernels.__path__)
    ]
    kernels = [(each, name) for each in modules for name in vars(each) if _is_launched(name)]
    with ExitStack() as stack:
        for module, name in kernels:
            warmed_up = WarmedUp(getattr(module, name), compiled.append)
            stack.enter_context(patch.object(module, name, warmed_up))
        yield compiled


def _is_launched(name: str) -> bool:
    """True for a module's kernels, false for functions that kernels call."""
    return name.endswith("_kernel")
