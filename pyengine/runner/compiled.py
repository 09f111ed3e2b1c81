"""A model's forward pass over decodes, compiled by torch: one graph for every batch size.

The number of tokens is a dynamic dimension, but for a single token, which torch compiles by
itself. Attention stays outside: `attention.opaque`.
"""

import shutil
from collections.abc import Callable
from itertools import count
from typing import Any

import torch

from pyengine.attention.backend import AttentionOptions, StepInputs
from pyengine.attention.dispatch import CompiledModel, PagedContext, running
from pyengine.core.errors import ConfigurationError

_numbers = count()

TYPICAL_TOKENS = 32
"""The batch for which the compiler weighs its choices; the graph serves every other one too."""


class CompiledForward:
    """Logits of every row of a step, by a compiled graph.

    `backend` is torch's name of the compiler. Compiling takes some tens of seconds and happens
    here. Raises `ConfigurationError` where it fails, with what the compiler said.
    """

    def __init__(self, model: Any, num_layers: int, backend: str = "inductor") -> None:
        self._number = next(_numbers)
        paged = CompiledModel(self._number)

        def forward(input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            output = model(
                input_ids=input_ids[None],
                position_ids=positions[None],
                use_cache=False,
                paged=paged,
            )
            logits: torch.Tensor = output.logits[0]
            return logits

        self._compiled: Callable[..., torch.Tensor] = torch.compile(
            forward, fullgraph=True, backend=backend
        )
        try:
            device = next(model.parameters()).device
            for num_tokens in (TYPICAL_TOKENS, 1):
                self._warm_up(num_tokens, num_layers, device)
        except ConfigurationError:
            raise
        except Exception as error:  # the compiler's errors have many types
            raise ConfigurationError(_why_not(model, error)) from error

    @torch.inference_mode()
    def __call__(self, inputs: StepInputs, context: PagedContext) -> torch.Tensor:
        """Logits `[T, vocab]`."""
        # Copies: torch would compile once more for views, or for what was made outside inference.
        ids, positions = inputs.input_ids.clone(), inputs.positions.clone()
        with running(self._number, context):
            return self._compiled(ids, positions)

    @torch.inference_mode()
    def _warm_up(self, num_tokens: int, num_layers: int, device: torch.device) -> None:
        """Compile for so many tokens, and for more of them, without a step."""
        ids, positions = (
            torch.zeros(num_tokens, dtype=torch.int64, device=device) for _ in range(2)
        )
        if num_tokens > 1:
            for tensor in (ids, positions):
                torch._dynamo.mark_dynamic(tensor, 0, min=2)
        with running(self._number, PagedContext(_NoStep(), [None] * num_layers)):
            self._compiled(ids, positions)


class _NoStep:
    """A step in which nobody attends to anything."""

    def forward(
        self,
        _layer: int,
        query: torch.Tensor,
        _key: torch.Tensor,
        value: torch.Tensor,
        _options: AttentionOptions,
    ) -> torch.Tensor:
        """Zeros."""
        return query.new_zeros(*query.shape[:2], value.shape[-1])


def _why_not(model: Any, error: Exception) -> str:
    """In words for the caller."""
    cause = getattr(error, "inner_exception", error)  # what a compiler raised, torch wraps
    said = str(cause).strip().splitlines() or ["no word"]
    where = f"compile=True: torch cannot compile {type(model).__name__} here"
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        return f"{where}, and there is no C++ compiler: install g++, or leave compile out"
    return f"{where} ({type(cause).__name__}: {said[0]}); leave compile out"
