"""Experts of a mixture as two grouped products, on CUDA.

transformers lets a function compute the experts of a family (`experts_implementation`). Its own
(`grouped_mm`) permutes the rows to and fro in memory, and calls torch's grouped product. Except in
bfloat16 on compute capabilities 9.0 and 10.0 that reads the sizes of groups on the host, which no
CUDA graph can record. The kernel here (`kernels/grouped_linear.py`) does neither.
"""

import importlib.util
from typing import Any

import torch
from torch import nn

from pyengine.models.decoder.grouped import group_pairs, grouped_linear

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
NAME = "pyengine"
"""The experts' implementation, as transformers knows it."""


def use_grouped_experts(model: Any) -> bool:
    """Let the experts of `model` be computed by grouped products; true if it has such experts.

    Without triton transformers computes them.
    """
    experts = experts_of(model)
    if not experts or importlib.util.find_spec("triton") is None:
        return False
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, compute_experts)
    for module in experts:
        module.config._experts_implementation = NAME
    return True


def experts_of(model: nn.Module) -> list[Any]:
    """The modules of `model` that hold the weights of several experts as one tensor.

    Those of floats, or of 8-bit floats with scales that the kernel knows. None if a norm follows
    each expert.
    """
    found: list[Any] = [module for module in model.modules() if hasattr(module, "has_gate")]
    if any(getattr(module, "has_post_expert_norm", False) for module in found):
        return []
    return [
        module
        for module in found
        if module.down_proj.dtype in _FLOATS or hasattr(module, "down_proj_scales")
    ]


def compute_experts(
    module: Any, rows: torch.Tensor, chosen: torch.Tensor, factors: torch.Tensor
) -> torch.Tensor:
    """The results of the chosen experts `[T, k]` for rows `[T, hidden]`, summed by `factors`."""
    order, ends = group_pairs(chosen, module.num_experts)
    weight, more = _weights(module, "gate_up_proj" if module.has_gate else "up_proj")
    inner = grouped_linear(rows, weight, order, ends, chosen.shape[1], *more)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    weight, more = _weights(module, "down_proj")
    pairs = grouped_linear(inner, weight, order, ends, 1, *more, factors.reshape(-1))
    return pairs.view(*chosen.shape, -1).sum(1)


def _weights(module: Any, name: str) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
    """Weights `[experts, N, K]`; biases and scales, if there are any."""
    weight: torch.Tensor = getattr(module, name)
    bias = getattr(module, f"{name}_bias") if module.has_bias else None
    more = bias, getattr(module, f"{name}_scales", None)
    return weight.transpose(1, 2) if module.is_transposed else weight, more
