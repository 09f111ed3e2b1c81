"""A backend tried out before the KV pool is made: does it import, does it compile?"""

from collections.abc import Callable

import numpy as np
import torch

from pyengine.attention.interface import AttentionBackend, AttentionOptions
from pyengine.attention.metadata import StepInputs
from pyengine.attention.needs import AttentionNeeds, LayerNeeds
from pyengine.cache.kv_pool import KVCacheSpec, KVPool

_TRIAL_BLOCKS = 4


def try_out(
    build: Callable[[KVPool], AttentionBackend], needs: AttentionNeeds, block_size: int
) -> str | None:
    """Run a prefill and a decode of each kind of layer over a pool of a few blocks.

    Returns why that did not work, in one line; None: it did. What it computes is not looked at.
    """
    kinds = list(dict.fromkeys(needs.layers))
    specs = [
        KVCacheSpec(kind.kv_heads, kind.head_dim_k, kind.head_dim_v, needs.cache_dtype)
        for kind in kinds
    ]
    try:
        backend = build(KVPool(specs, _TRIAL_BLOCKS, block_size, needs.device))
        for new_tokens in (3, 1):
            plan = backend.plan(_inputs(new_tokens, block_size, needs.device))
            for layer, kind in enumerate(kinds):
                plan.forward(layer, *_rows(new_tokens, kind, needs), _options(kind, needs))
        if needs.device.type == "cuda":
            torch.cuda.synchronize(needs.device)
    except Exception as error:  # whatever an import, a compiler or a driver raises
        text = " ".join(str(error).split())
        return f"{type(error).__name__}: {text[:300]}"
    return None


def _inputs(new_tokens: int, block_size: int, device: torch.device) -> StepInputs:
    """One sequence of three tokens, in block 1, of which the last `new_tokens` are new."""
    starts, lens = np.array([0, new_tokens], dtype=np.int32), np.array([3], dtype=np.int32)
    tables = np.array([[[1]]], dtype=np.int32)
    positions = torch.arange(3 - new_tokens, 3, device=device)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    return StepInputs(
        input_ids=none,
        positions=positions,
        slot_mapping=positions[None] + block_size,
        query_start_loc=torch.from_numpy(starts).to(device),
        seq_lens=torch.from_numpy(lens).to(device),
        block_tables=torch.from_numpy(tables).to(device),
        logits_indices=none,
        host_query_start_loc=starts,
        host_seq_lens=lens,
        host_block_tables=tables,
    )


def _rows(
    num_tokens: int, kind: LayerNeeds, needs: AttentionNeeds
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shapes = (
        (kind.query_heads, kind.head_dim_k),
        (kind.kv_heads, kind.head_dim_k),
        (kind.kv_heads, kind.head_dim_v),
    )
    query, key, value = (
        torch.zeros(num_tokens, *shape, dtype=needs.dtype, device=needs.device) for shape in shapes
    )
    return query, key, value


def _options(kind: LayerNeeds, needs: AttentionNeeds) -> AttentionOptions:
    sinks = torch.zeros(kind.query_heads, dtype=needs.dtype, device=needs.device)
    return AttentionOptions(
        scaling=kind.head_dim_k**-0.5,
        sliding_window=kind.window,
        softcap=kind.softcap,
        sinks=sinks if kind.sinks else None,
    )
