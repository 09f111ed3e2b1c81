"""Mixtures of experts whose weights stay in few bits, multiplied by the Rust kernels."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pyengine.models.cpu_kernels import instructions_of
from pyengine.models.linear import define_operator, layer_of, numbered
from pyengine.models.quantized_linear import QuantizedProduct


@dataclass(frozen=True, slots=True)
class Expert:
    """The products of one expert of a mixture."""

    gate: QuantizedProduct
    up: QuantizedProduct
    down: QuantizedProduct


@dataclass(frozen=True, slots=True)
class Mixture:
    """The sizes of a mixture of experts, and what its experts compute: `down(silu(gate) * up)`."""

    num_experts: int
    hidden: int
    intermediate: int

    @property
    def shapes(self) -> dict[str, tuple[int, int, int]]:
        """The shapes of the weights of all experts, each `[outputs, inputs]`."""
        inner = self.num_experts, self.intermediate, self.hidden
        return {
            "gate": inner,
            "up": inner,
            "down": (self.num_experts, self.hidden, self.intermediate),
        }

    @property
    def has_biases(self) -> bool:
        """True if all three products of an expert have a bias."""
        return False

    def compute(self, expert: Expert, rows: torch.Tensor) -> torch.Tensor:
        """The output of an expert for `[T, hidden]`."""
        return expert.down.multiply(expert.up.multiply_gated(rows, expert.gate))


@dataclass(frozen=True, slots=True)
class ClampedMixture(Mixture):
    """The same for GPT-OSS: gate and up are clamped, and all products have a bias."""

    alpha: float = 1.702
    limit: float = 7.0

    @property
    def has_biases(self) -> bool:
        """See `Mixture.has_biases`."""
        return True

    def compute(self, expert: Expert, rows: torch.Tensor) -> torch.Tensor:
        """See `Mixture.compute`."""
        gate = expert.gate.multiply(rows).clamp(max=self.limit)
        up = expert.up.multiply(rows).clamp(min=-self.limit, max=self.limit)
        return expert.down.multiply((up + 1) * gate * torch.sigmoid(gate * self.alpha))


def mixture_of(module: Any) -> Mixture | None:
    """The mixture that a module of transformers computes; None for other modules.

    That is `MixtralExperts`, or the same instruction by instruction, or `GptOssExperts`.
    """
    from transformers.activations import SiLUActivation
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    if type(module) is GptOssExperts:
        count, intermediate, hidden = module.down_proj.shape
        return ClampedMixture(count, hidden, intermediate, module.alpha, module.limit)
    if {name for name, _ in module.named_parameters()} != {"gate_up_proj", "down_proj"}:
        return None
    is_plain = type(getattr(module, "act_fn", None)) in (nn.SiLU, SiLUActivation)
    if not is_plain or instructions_of(type(module)) != instructions_of(MixtralExperts):
        return None
    count, hidden, intermediate = module.down_proj.shape
    return Mixture(count, hidden, intermediate)


class QuantizedExperts(nn.Module):
    """Computes what transformers' module of the experts does, expert by expert.

    A row has the same bits in every batch: its experts are added in the order of their numbers, in
    float32.
    """

    def __init__(self, mixture: Mixture, experts: Sequence[Expert]) -> None:
        super().__init__()
        self.experts = tuple(experts)
        self._mixture = mixture
        self._number = numbered(self)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """`[T, hidden]` to `[T, hidden]`; the others are `[T, k]`: experts and their weights."""
        if torch.compiler.is_compiling():
            found: torch.Tensor = torch.ops.pyengine.quantized_experts(
                hidden_states, top_k_index, top_k_weights, self._number
            )
            return found
        return self.compute(hidden_states, top_k_index, top_k_weights)

    def compute(
        self, rows: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """The weighted sums of each row's experts. A number that no expert has is left out."""
        numbers, order = indices.reshape(-1).sort(stable=True)
        tokens = order // indices.shape[1]
        factors = weights.reshape(-1)[order].float()
        sums = torch.zeros(rows.shape, dtype=torch.float32)
        found, counts = torch.unique_consecutive(numbers, return_counts=True)
        start = 0
        for number, count in zip(found.tolist(), counts.tolist(), strict=True):
            part = slice(start, start + count)
            start = part.stop
            if number < len(self.experts):
                chosen = tokens[part]
                products = self._mixture.compute(self.experts[number], rows[chosen])
                sums.index_add_(0, chosen, products.float() * factors[part, None])
        return sums.to(rows.dtype)


def _compute_experts(
    rows: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor, number: int
) -> torch.Tensor:
    found: torch.Tensor = layer_of(number).compute(rows, indices, weights)
    return found


def _experts_shape(rows: torch.Tensor, *_others: object) -> torch.Tensor:
    return torch.empty_like(rows)


define_operator(
    "quantized_experts(Tensor rows, Tensor indices, Tensor weights, int number) -> Tensor",
    _compute_experts,
    _experts_shape,
)
