"""A model's forward pass, compiled by torch: one graph for prefills and decodes of every size.

The numbers of tokens and of rows that give logits are dynamic dimensions; a single token has a
separate graph. Attention stays outside: `attention.dispatch`.

On CPUs a step has the same bits with any number of threads: threads divide tokens, and the graph of
a single token is computed by one.
"""

import shutil
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from pyengine.attention.backend import QKV, AttentionOptions, StepInputs
from pyengine.attention.context import PagedContext
from pyengine.attention.dispatch import CompiledModel, running
from pyengine.errors import ConfigurationError
from pyengine.models.model import Model
from pyengine.utils.devices import Device, for_torch
from pyengine.utils.own_graphs import compile_apart
from pyengine.utils.tensors import array_of

_numbers = count()

TYPICAL_TOKENS = 32
"""The batch for which the compiler tunes its choices; the graph serves every other one too."""

_FEWEST = 2
"""The least size of a dynamic dimension: torch compiles a separate graph for a size of 1."""

_UNCHECKED: dict[str, Any] = {"size_asserts": False, "alignment_asserts": False}
"""A graph checks the result of each operator in Python; the shapes of ours are right."""

_ANY_THREADS: dict[str, Any] = {"cpp.dynamic_threads": True}
"""A graph computes with as many threads as torch has when it runs, not when it was compiled."""

_ONE_THREAD: dict[str, Any] = {"cpp.threads": 1}
"""Threads would divide the sums of a norm; and to wait for them takes longer than one row."""

_INPUTS = ("input_ids", "positions", "rows", "paged")
"""The inputs that change from step to step, and so select the graph."""


class CompiledForward:
    """Logits of `inputs.logits_indices`, by a compiled graph.

    `backend` is torch's name of the compiler. Compiling takes some tens of seconds and happens
    here. Raises `ConfigurationError` with the compiler's message if that fails.
    """

    def __init__(self, model: Model, num_layers: int, backend: str = "inductor") -> None:
        self._number = next(_numbers)
        paged = CompiledModel(self._number)

        def forward(
            input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
        ) -> torch.Tensor:
            logits: torch.Tensor = model(input_ids, positions, rows, paged)
            return logits

        def compiled(settings: dict[str, Any]) -> Callable[..., torch.Tensor]:
            own = {**_UNCHECKED, **settings} if backend == "inductor" else {}
            options = {"guard_filter_fn": _of_inputs, **own}
            return compile_apart(forward, fullgraph=True, backend=backend, options=options)

        self._several, self._single = compiled(_ANY_THREADS), compiled(_ONE_THREAD)
        try:
            for num_tokens in (TYPICAL_TOKENS, 1):
                context = PagedContext(_NoStep(), [None] * num_layers)
                self._warm_up(num_tokens, context, model.device)
                model.check_attended(context)
        except ConfigurationError:
            raise
        except Exception as error:  # the compiler's errors have many types
            raise ConfigurationError(_why_not(model, error)) from error

    @torch.inference_mode()
    def __call__(self, inputs: StepInputs, context: PagedContext) -> Any:
        """Logits `[N, vocab]` of `N` rows; there may be none. An array for the arrays of a CPU."""
        over_arrays = isinstance(inputs.input_ids, np.ndarray)
        if over_arrays:
            inputs = inputs.tensors()
        # Copies: torch would compile again for views, or for tensors made outside inference mode.
        ids, positions = inputs.input_ids.clone(), inputs.positions.clone()
        rows, wanted = inputs.logits_indices.clone(), len(inputs.logits_indices)
        if len(ids) == 1:  # the only row
            rows = rows.new_zeros(1)
        elif wanted < _FEWEST:
            rows = F.pad(rows, (0, _FEWEST - wanted))
        with running(self._number, context):
            compiled = self._single if len(ids) == 1 else self._several
            logits = compiled(ids, positions, rows)
        logits = logits.expand(wanted, -1) if len(ids) == 1 else logits[:wanted]
        return array_of(logits) if over_arrays else logits

    @torch.inference_mode()
    def _warm_up(self, num_tokens: int, context: PagedContext, device: Device) -> None:
        """Compile for at least `num_tokens` tokens, without a step."""
        sizes, own = (num_tokens, num_tokens, -(-num_tokens // 2)), for_torch(device)
        ids, positions, rows = (torch.zeros(size, dtype=torch.int64, device=own) for size in sizes)
        if num_tokens > 1:
            for tensor in (ids, positions, rows):
                # No range: torch refuses a graph that serves only part of a given range, and
                # kernels for CUDA index in 32 bits, up to a size that depends on the model. Beyond
                # that size torch compiles another graph.
                torch._dynamo.mark_dynamic(tensor, 0)
        with running(self._number, context):
            compiled = self._several if num_tokens > 1 else self._single
            compiled(ids, positions, rows)


def _of_inputs(guards: Sequence[Any]) -> list[bool]:
    """Keep the guards of the inputs, and of no name.

    torch would check every module of the model in every step; ours never change.
    """
    return [not guard.name or guard.name.startswith(_INPUTS) for guard in guards]


class _NoStep:
    """A step without attention."""

    def forward(self, _layer: int, qkv: QKV, _options: AttentionOptions) -> torch.Tensor:
        """Zeros."""
        query, _, value = qkv
        return query.new_zeros(*query.shape[:2], value.shape[-1])


def _why_not(model: Model, error: Exception) -> str:
    """The reason, in words for the caller."""
    cause = getattr(error, "inner_exception", error)  # torch wraps the error of a compiler
    said = str(cause).strip().splitlines() or ["no word"]
    where = f"torch cannot compile {model.name} here"
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        return f"{where}, and there is no C++ compiler: install g++, or set compile=False"
    return f"{where} ({type(cause).__name__}: {said[0]}); set compile=False"
