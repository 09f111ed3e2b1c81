"""The model of `speculation="draft"`: it is loaded and checked before the KV pool is sized."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from pyengine.attention.choice import Choice, select_backend
from pyengine.attention.needs import needs_of
from pyengine.config import EngineSettings
from pyengine.errors import ConfigurationError
from pyengine.executor.memory_profile import CachePlan, cache_specs, plan_cache
from pyengine.kv_cache.pool import PoolSettings, bytes_per_block, resolve_kv_cache_dtype
from pyengine.models.int8_linear import quantise_linears
from pyengine.models.loader import LoadedModel, load_model
from pyengine.speculation.draft_model import check_vocabularies


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft model and what its KV cache is made of. One table holds all of its layers."""

    loaded: LoadedModel
    choice: Choice
    kv_dtype: torch.dtype
    longest: int
    """Tokens of the longest text that both models take."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token in its KV cache."""
        return bytes_per_block(cache_specs(self.loaded, self.kv_dtype), 1)

    def plan_cache(self, settings: EngineSettings, plan: CachePlan) -> CachePlan:
        """A cache for as many tokens as the main model's, null blocks included."""
        size = self.choice.block_size
        num_blocks = (plan.size.num_blocks + 1) * plan.block_size // size - 1
        pool = PoolSettings(
            block_size=size,
            num_blocks=max(1, num_blocks),
            max_num_seqs=settings.max_num_seqs,
            max_model_len=self.longest,
        )
        most = settings.max_num_batched_tokens
        return plan_cache(self.loaded, pool, most, layer_groups=False, kv_dtype=self.kv_dtype)

    def describe(self, cache: CachePlan) -> dict[str, object]:
        """Rows of `describe()`."""
        return {
            "draft_attention_backend": self.choice.backend,
            "draft_kv_cache_bytes": cache.size.num_bytes,
        }


def load_draft(settings: EngineSettings, main: LoadedModel) -> LoadedDraft | None:
    """Load the draft model as the main one was asked for; None where there is none.

    It has the main model's device and dtype, and honours `quantization`, `attention_backend`,
    `kv_cache_dtype` and `block_size`. Raises `ConfigurationError` where one of them cannot be had.
    """
    if settings.draft_model is None:
        return None
    is_same = settings.draft_model == settings.model
    revision = settings.draft_revision or (settings.revision if is_same else None)
    draft = load_model(
        settings.draft_model,
        device=main.device,
        dtype=main.dtype,
        revision=revision,
        token=settings.token,
    )
    check_vocabularies(main, draft)
    with _about_the_draft():
        if settings.quantization is not None:
            quantise_linears(draft.model, draft.device)
        kv_dtype = resolve_kv_cache_dtype(settings.kv_cache_dtype, draft.dtype)
        needs = needs_of(
            draft.model,
            draft.device,
            draft.dtype,
            kv_dtype=kv_dtype,
            block_size=settings.asked_block_size,
        )
        choice = select_backend(settings.attention_backend, needs)
    longest = min(draft.max_model_len, main.max_model_len)
    return LoadedDraft(draft, choice, needs.cache_dtype, longest)


@contextmanager
def _about_the_draft() -> Iterator[None]:
    """A `ConfigurationError` inside says that it is about the draft model."""
    try:
        yield
    except ConfigurationError as error:
        raise ConfigurationError(f"draft_model: {error}") from error
