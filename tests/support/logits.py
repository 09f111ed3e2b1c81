"""Logits of several kinds as arrays, requests for them, and the same as tensors of torch."""

import math
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import strategies as st

from pyengine.sampling.sampler import SamplingBatch
from pyengine.sampling.state import SamplingState
from pyengine.sampling_params import SamplingParams
from pyengine.utils.dtypes import Rows, rounded

if TYPE_CHECKING:
    import torch

KINDS = ("peaked", "flat", "ties", "equal", "barred")

requests = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.1, 0.8, 1.0, 3.0, 1e-30, 1e30]),
    top_k=st.sampled_from([0, 0, 1, 2, 50, 63, 64, 65, 400, 2**63]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.5, 0.999999, 1e-9]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.9, 1.0, 1e-12]),
)


def batch_of(params: list[SamplingParams], vocab_size: int) -> SamplingBatch:
    """Requests with the seeds 0, 1, 2."""
    return SamplingBatch(
        [
            SamplingState(param, (), seed=seed, vocab_size=vocab_size)
            for seed, param in enumerate(params)
        ]
    )


def normal(seed: int, *shape: int) -> Rows:
    """Normally distributed float32 numbers."""
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def make_logits(kind: str, rows: int, vocab_size: int, seed: int) -> Rows:
    """Logits of one of `KINDS`: float32 [rows, vocab_size]."""
    random = np.random.default_rng(seed)
    logits = random.standard_normal((rows, vocab_size), dtype=np.float32)
    if kind == "peaked":
        logits += np.float32(12) * (random.random((rows, vocab_size)) < 20 / vocab_size)
    elif kind == "ties":
        logits = (logits * 2).round()
    elif kind == "equal":
        logits = np.zeros_like(logits)
    elif kind == "barred":
        logits[random.random((rows, vocab_size)) < 0.97] = -math.inf
        logits[:, -1] = 0.5
    return logits * np.float32(3)


def in_type(logits: Rows, dtype: str) -> Rows:
    """The same rounded to an element type; "bfloat16" as its bits."""
    return rounded(logits, np.uint16) if dtype == "bfloat16" else logits.astype(dtype)


def tensor_of(logits: Rows) -> "torch.Tensor":
    """A tensor over the same memory; uint16 has the bits of bfloat16."""
    import torch

    tensor = torch.from_numpy(logits)
    return tensor.view(torch.bfloat16) if logits.dtype == np.uint16 else tensor
