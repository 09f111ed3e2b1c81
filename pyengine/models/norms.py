"""RMSNorm in one pass, on CPUs.

transformers computes it by eight operators, each of which writes all rows to memory: in a prefill
that costs half as much as all products. The Rust kernel does it in one pass. Compiled graphs keep
their own fused norm.
"""

from typing import Any

import torch
from torch import nn

from pyengine.kv_cache import CpuAttention
from pyengine.utils.host_copy import cpu_array
from pyengine.utils.openmp import openmp_runtime

_FORMATS = (torch.float32, torch.bfloat16)


class FusedRMSNorm(nn.Module):
    """Computes `norm`, a `LlamaRMSNorm` or its equal, up to the rounding of a sum."""

    def __init__(self, norm: Any, threads: CpuAttention) -> None:
        super().__init__()
        self.plain = norm
        self._weight = cpu_array(norm.weight.detach())
        self._epsilon = float(norm.variance_epsilon)
        self._threads = threads

    @property
    def weight(self) -> Any:
        """The weight of the replaced norm, for other code that computes it."""
        return self.plain.weight

    @property
    def variance_epsilon(self) -> float:
        """The epsilon of the replaced norm."""
        return self._epsilon

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalise `[..., size]`."""
        if torch.compiler.is_compiling() or hidden_states.dtype != self.plain.weight.dtype:
            plain: torch.Tensor = self.plain(hidden_states)
            return plain
        rows = hidden_states.detach().reshape(-1, hidden_states.shape[-1]).contiguous()
        out = torch.empty_like(rows)
        self._threads.rms_norm(cpu_array(rows), self._weight, cpu_array(out), self._epsilon)
        return out.view(hidden_states.shape)


def fuse_norms(model: nn.Module) -> int:
    """Replace every standard RMSNorm of `model`; returns their number.

    That is 0 if the processor lacks the instructions, and on other devices.
    """
    if not CpuAttention.is_fast():
        return 0
    threads = CpuAttention(torch.get_num_threads(), openmp_runtime())
    num_fused = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if not isinstance(parent, FusedRMSNorm) and _is_standard(child):
                setattr(parent, name, FusedRMSNorm(child, threads))
                num_fused += 1
    return num_fused


def _is_standard(module: Any) -> bool:
    """True for `LlamaRMSNorm` or, as in most families, a copy of it."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    if not isinstance(getattr(module, "weight", None), torch.Tensor):
        return False
    weight = module.weight
    fits = weight.dim() == 1 and weight.dtype in _FORMATS and weight.device.type == "cpu"
    return fits and hasattr(module, "variance_epsilon") and _code(module) == _code(LlamaRMSNorm)


def _code(kind: Any) -> tuple[object, ...]:
    code: Any = getattr(getattr(kind, "forward", None), "__code__", None)
    return (code.co_code, code.co_names, code.co_consts) if code else (kind,)
