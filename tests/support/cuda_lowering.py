"""torch's compiler for a GPU that is not there: down to machine code, which is not run.

Tensors are fake, on the device "cuda". The compiler's questions to the device and to triton's
driver are answered for a GPU of some capability. That changes torch for the whole process:
`tests.support.kernels.run_apart` starts one for it.
"""

import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch._C._dynamo import guards
from torch._meta_registrations import meta_scaled_mm
from torch._subclasses import fake_tensor

_SHARED_MEMORY = {(8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}
"""KiB of shared memory that a block can have, by compute capability."""
_PROPERTIES = SimpleNamespace(
    name="NVIDIA H100",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=80 << 30,
    warp_size=32,
    max_threads_per_block=1024,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=227 << 10,
    shared_memory_per_multiprocessor=228 << 10,
    L2_cache_size=50 << 20,
    gcnArchName="",
)

_SETTINGS = {
    "use_joint_graph_passes": False,  # these passes, and the patterns, make tensors on the device
    "pattern_matcher": False,
    "use_static_cuda_launcher": False,
}
"""Settings of the compiler."""


def pretend_cuda(capability: tuple[int, int] = (9, 0)) -> None:
    """Make torch and triton believe in a GPU at `cuda:0`. Nothing can be computed on it.

    It has 132 multiprocessors and 80 GiB, whatever its capability.
    """
    _PROPERTIES.major, _PROPERTIES.minor = capability
    _PROPERTIES.shared_memory_per_block_optin = _SHARED_MEMORY[capability] << 10
    _PROPERTIES.shared_memory_per_multiprocessor = (_SHARED_MEMORY[capability] + 1) << 10
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import config

    config.compile_threads = 1  # worker processes would look for a GPU
    os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"  # triton 3.9 warns otherwise
    torch._C._ensureCUDADeviceGuardSet()
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.is_initialized = lambda: True
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    cuda.get_device_properties = lambda _device=None: _PROPERTIES
    cuda.get_device_capability = lambda _device=None: capability
    cuda.is_current_stream_capturing = lambda: False
    cuda.get_rng_state = lambda _device=None: torch.zeros(16, dtype=torch.uint8)
    cuda.set_rng_state = lambda _state, _device=None: None
    cuda.set_device = lambda _device: None
    cuda._lazy_init = lambda: None
    cuda._exchange_device = lambda _device: 0
    cuda._maybe_exchange_device = lambda _device: 0
    fake_tensor.init_gpu_context = lambda _device: None  # before torch 2.15 it makes a real tensor
    native: Any = torch._C
    native._cuda_getCurrentRawStream = lambda _device: 0
    interface: Any = CudaInterface
    interface.get_device_properties = staticmethod(lambda _device=None: _PROPERTIES)
    interface.Worker.get_device_properties = staticmethod(lambda _device=None: _PROPERTIES)
    _pretend_driver(capability)
    _check_scaled_mm()


@cache
def _check_scaled_mm() -> Any:
    """Let the form of torch's scaled product that compiled code calls check its arguments, too.

    torch lacks that for fake tensors. The result keeps the check registered.
    """
    library = torch.library.Library("aten", "IMPL", "Meta")

    def into(*arguments: Any, out: torch.Tensor, **named: Any) -> torch.Tensor:
        promised = meta_scaled_mm(*arguments, **named)
        assert (promised.shape, promised.dtype) == (out.shape, out.dtype)
        return out

    library.impl("_scaled_mm.out", into)
    return library


def _pretend_driver(capability: tuple[int, int]) -> None:
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    major, minor = capability
    active = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 10 * major + minor, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda _device=None: 0,
        get_active_torch_device=lambda: torch.device("cuda:0"),
    )
    driver.set_active(active)
    helpers: Any = triton_helpers
    helpers.set_driver_to_gpu = lambda: None


class Lowering:
    """A compiler for `torch.compile`: lowers each graph for the GPU, and runs it over fake tensors.

    Its kernels become machine code and are not launched; everything else runs, and the sizes and
    strides of what operators give are checked.
    """

    def __init__(self) -> None:
        self.kernels: dict[tuple[int, str], bytes] = {}
        """Machine code by the number of the graph and the name of the kernel."""
        self.num_graphs = 0
        """The graphs that were lowered."""

    def __call__(self, graph: Any, inputs: Any, **_options: Any) -> Callable[..., Any]:
        """Lower `graph`."""
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx
        from torch._inductor.runtime.triton_heuristics import CachingAutotuner

        precompile = CachingAutotuner.precompile

        def lower(kernel: Any, *_arguments: Any, **_named: Any) -> None:
            precompile(kernel, warm_cache_only=True)  # without a launcher, which needs a device
            for made in kernel.compile_results:
                key = self.num_graphs, kernel.inductor_meta["kernel_name"]
                self.kernels[key] = made.kernel.asm["cubin"]

        self.num_graphs += 1

        patches = (
            patch.object(CachingAutotuner, "precompile", lower),
            patch.object(CachingAutotuner, "run", lambda *_arguments, **_named: None),
            patch.object(guards, "_empty_strided_cuda", _empty_strided),
            patch.object(guards, "_reinterpret_tensor", _reinterpreted),
        )
        with ExitStack() as stack:
            for each in patches:
                stack.enter_context(each)
            stack.enter_context(config.patch(**_SETTINGS))
            compiled: Callable[..., Any] = compile_fx(graph, inputs)

        def run(*tensors: Any) -> Any:
            with ExitStack() as stack:
                for each in patches:
                    stack.enter_context(each)
                return compiled(*tensors)

        return run


def _empty_strided(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


def _reinterpreted(tensor: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)
