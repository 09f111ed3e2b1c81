"""Linear layers and experts with weights in 8-bit floats (e4m3) on CUDA devices.

Every output has a scale. The rows become 8-bit floats too, each with its scale, and torch
multiplies both (`torch._scaled_mm`). Micikevicius et al. (2022), FP8 formats for deep learning,
arXiv:2209.05433. The head and routers stay as they are, and so do layers whose sizes torch's
product does not have.

Sums stay in the tensor cores (`use_fast_accum`), as in vLLM's kernels for Hopper and by default in
torchao's inference. Hopper keeps about 14 bits of such a sum; the other mode adds in float32 every
128 inputs, and is slower (pytorch#147971). Of 4,096 inputs, sums came out up to 2 % wrong
(DeepSeek-V3, arXiv:2412.19437, section 3.3.2); rounding a number to e4m3 is up to 6 % wrong.

Weights of checkpoints whose scales are those of squares of 128 inputs and outputs, and experts, are
multiplied by the grouped product (`models/grouped_experts.py`), which every such GPU has; torch's
own product by squares is for compute capability 9.0.
"""

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from pyengine.errors import ConfigurationError
from pyengine.models.grouped_experts import NAME, compute_experts, experts_of, grouped_linear
from pyengine.models.linear import ATTENTION, GATED, concatenated, replace_linears

DTYPE = torch.float8_e4m3fn
LARGEST = torch.finfo(DTYPE).max
OLDEST = (8, 9)
"""The compute capability from which on GPUs multiply 8-bit floats."""

SQUARE = 128
"""Inputs and outputs of a weight with one scale."""

_MULTIPLE = 16
"""The product takes inputs and outputs in multiples of this."""
_TINY = 1e-12  # the least scale: rows of zeros stay zeros


def quantise_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `[..., K]` in 8-bit floats, and their scales, float32 `[..., 1]`."""
    floats = rows.float()
    scales = floats.abs().amax(-1, keepdim=True).clamp_min(_TINY) / LARGEST
    return (floats / scales).to(DTYPE), scales


class Float8Linear(nn.Module):
    """A linear layer with weights `[N, K]` in 8-bit floats and their scales, float32 `[N]`.

    A scale of the whole weight is one of every output. Both sizes are multiples of 16.
    """

    def __init__(
        self, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = codes.shape
        self.codes = nn.Parameter(codes, requires_grad=False)
        row = scales.float().expand(self.out_features)[None].contiguous()
        self.scales = nn.Parameter(row, requires_grad=False)
        # The only type of results that every supported torch has on every such GPU.
        bias = None if bias is None else bias.detach().to(torch.bfloat16)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @property
    def weight(self) -> torch.Tensor:
        """Opaque, for its shape and dtype."""
        return torch.empty(self.codes.shape, dtype=torch.bfloat16, device="meta")

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features]`, of the same type."""
        digits, units = quantise_rows(rows.flatten(0, -2))
        scaled_mm: Any = torch._scaled_mm
        found: torch.Tensor = scaled_mm(
            digits,
            self.codes.t(),
            units,
            self.scales,
            bias=self.bias,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
        return found.to(rows.dtype).view(*rows.shape[:-1], self.out_features)


class Float8SquareLinear(nn.Module):
    """A linear layer with weights `[N, K]` in 8-bit floats, and scales of squares of 128.

    The scales are float32 `[N / 128, K / 128]`, rounded up.
    """

    def __init__(
        self, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = codes.shape
        self.codes = nn.Parameter(codes[None], requires_grad=False)
        self.scales = nn.Parameter(scales.float()[None], requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach()[None], requires_grad=False)

    @property
    def weight(self) -> torch.Tensor:
        """Opaque, for its shape and dtype."""
        return torch.empty(self.codes.shape[1:], dtype=torch.bfloat16, device="meta")

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features]`, of the same type."""
        flat = rows.flatten(0, -2)
        found = grouped_linear(flat, self.codes, None, None, 1, self.bias, self.scales)
        return found.view(*rows.shape[:-1], self.out_features)


def _quantised(linears: Sequence[nn.Linear]) -> Float8Linear:
    linear = concatenated(linears)
    codes, scales = quantise_rows(linear.weight.detach())
    bias: Any = linear.bias
    return Float8Linear(codes, scales.flatten(), bias)


def _quantise_experts(module: Any) -> None:
    """Let the weights of experts be 8-bit floats `[experts, N, K]`, with scales beside them."""
    for name in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj"):
        weight = getattr(module, name).detach()
        if module.is_transposed:
            weight = weight.transpose(1, 2)
        codes = torch.empty(weight.shape, dtype=DTYPE, device=weight.device)
        scales = weight.new_empty(*weight.shape[:2], 1, dtype=torch.float32)
        for expert, part in enumerate(weight):
            codes[expert], scales[expert] = quantise_rows(part)
        setattr(module, name, nn.Parameter(codes, requires_grad=False))
        setattr(module, f"{name}_scales", nn.Parameter(scales, requires_grad=False))
    module.is_transposed = False


def unquantised(model: nn.Module) -> set[nn.Module]:
    """The routers of experts, and what else is beside experts in their parent."""
    experts = set(experts_of(model))
    beside = [
        child
        for parent in model.modules()
        if not experts.isdisjoint(parent.children())
        for child in parent.children()
    ]
    return set(beside) - experts


@torch.no_grad()
def quantise_linears_to_fp8(model: Any) -> int:
    """Replace the linear layers of `model`, and the weights of its experts; returns how many.

    Weights are freed one by one. Raises `ConfigurationError`, without changes, if there are none.
    """
    left = {model.get_output_embeddings(), *unquantised(model)}

    def takes(module: nn.Module) -> bool:
        if type(module) is not nn.Linear or module in left:
            return False
        return not any(size % _MULTIPLE for size in module.weight.shape)

    experts = experts_of(model)
    if not experts and not any(map(takes, model.modules())):
        raise ConfigurationError(
            f"quantization='fp8': {type(model).__name__} has no linear layer whose inputs and "
            f"outputs are multiples of {_MULTIPLE}; leave quantization out"
        )
    for module in experts:
        _quantise_experts(module)
    return len(experts) + replace_linears(model, takes, _quantised, (ATTENTION, GATED))


@torch.no_grad()
def take_over_fp8(model: Any) -> int:
    """Replace transformers' layers and experts in 8-bit floats; returns how many.

    transformers multiplies them by kernels that it downloads. Layers of other kinds stay: 4-bit
    floats, and squares of another size than 128. Scales of rows that a checkpoint has are left
    out: each row gets its own. Without triton all stay.
    """
    if importlib.util.find_spec("triton") is None:
        return 0
    from transformers.integrations.finegrained_fp8 import (
        ALL_FP8_EXPERTS_FUNCTIONS,
        FP8Experts,
        FP8Linear,
    )

    def is_known(module: Any, weight: torch.Tensor) -> bool:
        squares = module.block_size
        return weight.dtype == DTYPE and (squares is None or tuple(squares) == (SQUARE, SQUARE))

    def takes(module: Any) -> bool:
        return type(module) is FP8Linear and is_known(module, module.weight)

    def kind(linear: Any) -> object:
        """Squares may not reach from one layer into the next."""
        has_squares = linear.block_size is not None
        return id(linear) if has_squares and linear.out_features % SQUARE else has_squares

    experts = [
        module
        for module in model.modules()
        if isinstance(module, FP8Experts) and is_known(module, module.down_proj)
    ]
    ALL_FP8_EXPERTS_FUNCTIONS.register(NAME, compute_experts)
    for module in experts:
        for name in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj"):
            scales = getattr(module, f"{name}_scale_inv").float()
            if module.block_size is None:  # gate and up may have one each
                outputs = getattr(module, name).shape[1]
                scales = scales.repeat_interleave(
                    outputs // scales.shape[1], 1, output_size=outputs
                )
            setattr(module, f"{name}_scales", nn.Parameter(scales, requires_grad=False))
            delattr(module, f"{name}_scale_inv")
    return len(experts) + replace_linears(model, takes, _taken_over, (ATTENTION, GATED), kind)


def _taken_over(linears: Sequence[Any]) -> nn.Module:
    """Layers of transformers whose outputs follow each other, as one."""
    codes = torch.cat([linear.weight for linear in linears])
    scales = [linear.weight_scale_inv.float() for linear in linears]
    bias = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])
    if linears[0].block_size is not None:
        return Float8SquareLinear(codes, torch.cat(scales), bias)
    each = [
        scale.expand(linear.out_features) for scale, linear in zip(scales, linears, strict=True)
    ]
    return Float8Linear(codes, torch.cat(each), bias)
