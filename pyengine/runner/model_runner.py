"""One forward pass of a step. Knows tokens and blocks, nothing of requests."""

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
from pyengine.runner.buffers import InputBuffers, RunnerLimits
from pyengine.runner.interface import Forward, Plan, StepLogits


class ModelRunner:
    """Runs a model over its KV pool. See `Runner`.

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
        self.buffers = InputBuffers(limits, pool.device)
        """Those that the next step is written into."""
        self._other_buffers = InputBuffers(limits, pool.device, beside=self.buffers)
        _switch_to_paged_attention(self._model)

    def prepare(self, plan: Plan, *, extra_rows: npt.NDArray[np.int64] | None = None) -> Forward:
        """See `Runner.prepare`."""
        copies = plan.copies()
        inputs = self.buffers.fill(plan)
        self.buffers, self._other_buffers = self._other_buffers, self.buffers
        rows = inputs.logits_indices
        num_samples = len(rows)
        if extra_rows is not None and len(extra_rows):
            rows = torch.cat([rows, torch.from_numpy(extra_rows).to(rows.device)])

        def forward(sampled: torch.Tensor | None) -> StepLogits:
            self._pool.copy_blocks(copies)
            logits = self._forward(inputs, rows, sampled)
            return StepLogits(logits[:num_samples], logits[num_samples:])

        return forward

    @torch.inference_mode()
    def _forward(
        self, inputs: StepInputs, rows: torch.Tensor, sampled: torch.Tensor | None
    ) -> torch.Tensor:
        context = PagedContext(self._backend.plan(inputs), self._pool.groups.layer_windows)
        output = self._model(
            input_ids=_known(inputs.input_ids, sampled)[None],
            position_ids=inputs.positions[None],
            use_cache=False,
            logits_to_keep=rows,
            paged=context,
        )
        if context.attended != self._pool.num_layers:
            raise ConfigurationError(
                f"{type(self._model).__name__} attended in {context.attended} of "
                f"{self._pool.num_layers} layers: the others keep a state that paged attention "
                "does not hold; this model is not supported"
            )
        logits: torch.Tensor = output.logits[0]
        return logits


def _known(input_ids: torch.Tensor, sampled: torch.Tensor | None) -> torch.Tensor:
    """The token ids, a pending one (`-1 - row`) replaced by what the step before has sampled."""
    if sampled is None:
        return input_ids
    return torch.where(input_ids < 0, sampled[(-1 - input_ids).clamp_(min=0)], input_ids)


def _switch_to_paged_attention(model: Any) -> None:
    """Route every layer of `model` to paged attention, or say why that cannot be."""
    name = register_paged_attention()
    if not getattr(model, "_supports_attention_backend", False):
        raise ConfigurationError(
            f"{type(model).__name__} does not dispatch its attention through transformers' "
            "AttentionInterface: it cannot run on a paged KV cache"
        )
    model.set_attn_implementation(name)
