"""One forward pass of a step. Knows tokens and blocks, nothing of requests."""

import sys
from dataclasses import dataclass
from time import monotonic
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pyengine.attention.interface import AttentionBackend
from pyengine.attention.metadata import PagedContext, StepInputs
from pyengine.attention.registry import register_paged_attention
from pyengine.cache.kv_pool import KVPool
from pyengine.core.errors import ConfigurationError
from pyengine.models import LoadedModel
from pyengine.runner.buffers import InputBuffers, Plan, RunnerLimits
from pyengine.runner.compiled import CompiledForward


@dataclass(frozen=True, slots=True)
class StepLogits:
    """Logits in the model's dtype, on its device.

    `sampling` is `[S, vocab]`, one row per sample of the plan, in its order. `extra` is
    `[E, vocab]`, the further rows that were asked for, in the order asked.
    """

    sampling: torch.Tensor
    extra: torch.Tensor


class ModelRunner:
    """Runs a model over its KV pool.

    The model is switched to paged attention for good: it attends over `pool` from then on,
    and plain calls of it are refused.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        pool: KVPool,
        backend: AttentionBackend,
        limits: RunnerLimits,
    ) -> None:
        self._model: Any = loaded.model
        self._pool = pool
        self._backend = backend
        self._compiled: CompiledForward | None = None
        self.buffers = InputBuffers(limits, pool.device)
        _switch_to_paged_attention(self._model)

    def compile(self, backend: str = "inductor") -> None:
        """Compile the forward pass of decodes, and say so on standard error: it takes a while.

        Steps in which every token gives logits run compiled from then on, others as before.
        `backend` is torch's name of the compiler. Raises `ConfigurationError` if it cannot.
        """
        name, start = type(self._model).__name__, monotonic()
        print(f"pyengine: compiling {name}, up to a minute or two ...", file=sys.stderr)
        self._compiled = CompiledForward(self._model, self._pool.num_layers, backend)
        print(f"pyengine: {name} is compiled ({monotonic() - start:.0f} s)", file=sys.stderr)

    def execute(self, plan: Plan, *, extra_rows: npt.NDArray[np.int64] | None = None) -> StepLogits:
        """Compute the tokens of `plan`, write their keys and values, return logits.

        `extra_rows` are further rows among the plan's tokens, in `0 .. num_tokens`, whose
        logits are wanted (for the log-probabilities of a prompt).
        """
        self._pool.copy_blocks(plan.copies())
        inputs = self.buffers.fill(plan)
        rows = inputs.logits_indices
        if extra_rows is not None and len(extra_rows):
            rows = torch.cat([rows, torch.from_numpy(extra_rows).to(rows.device)])
        logits = self._forward(inputs, rows)
        return StepLogits(logits[: plan.num_samples], logits[plan.num_samples :])

    @torch.inference_mode()
    def _forward(self, inputs: StepInputs, rows: torch.Tensor) -> torch.Tensor:
        context = PagedContext(self._backend.plan(inputs), self._pool.groups.layer_windows)
        logits: torch.Tensor
        all_sample = rows is inputs.logits_indices and len(rows) == len(inputs.input_ids)
        if self._compiled is not None and all_sample:
            logits = self._compiled(inputs, context)
        else:
            logits = self._model(
                input_ids=inputs.input_ids[None],
                position_ids=inputs.positions[None],
                use_cache=False,
                logits_to_keep=rows,
                paged=context,
            ).logits[0]
        if context.attended != self._pool.num_layers:
            raise ConfigurationError(
                f"{type(self._model).__name__} attended in {context.attended} of "
                f"{self._pool.num_layers} layers: the others keep a state that paged attention "
                "does not hold; this model is not supported"
            )
        return logits


def _switch_to_paged_attention(model: Any) -> None:
    """Route every layer of `model` to paged attention, or say why that cannot be."""
    name = register_paged_attention()
    if not getattr(model, "_supports_attention_backend", False):
        raise ConfigurationError(
            f"{type(model).__name__} does not dispatch its attention through transformers' "
            "AttentionInterface: it cannot run on a paged KV cache"
        )
    model.set_attn_implementation(name)
