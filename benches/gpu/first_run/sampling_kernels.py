"""Drawn tokens and log-probabilities on the device, against those of the CPU; and their time."""

from functools import partial
from typing import Any

import numpy as np
import torch

from benches.gpu.first_run.context import Context
from pyengine import SamplingParams
from pyengine.sampling.logprobs import PendingLogprobs, TokenLogprobs
from pyengine.sampling.operations import operations_of
from pyengine.sampling.sampler import SamplingBatch, sample
from pyengine.sampling.state import SamplingState, uniforms
from pyengine.sampling.tensor_operations import draw_by_kernels
from pyengine.utils.dtypes import Rows

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 1.0},
    "min-p 0.05": {"temperature": 0.8, "min_p": 0.05},
    "top-k 20, top-p 0.95": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "5 log-probabilities": {"temperature": 0, "logprobs": 5},
}
DIFFERENT = 0.01
"""Share of drawn tokens that may differ: a draw on the border of two tokens goes by rounding."""
_ERROR = 1e-4


def draws(context: Context) -> None:
    """The tokens of the CPU for the same seeds, for every kind of parameters."""
    rows = context.either(64, 3)
    for vocabulary in context.either((128_256, 151_936), (5000,)):
        logits = _logits(context, rows, vocabulary)
        on_host = _array(logits)
        for name, fields in KINDS.items():
            plan = _batch(fields, rows, vocabulary).draws
            if plan is None:
                continue
            numbers = uniforms(plan.seeds, np.zeros(rows, dtype=np.int64))
            drawn = draw_by_kernels(logits, plan, numbers).cpu().numpy()
            expected = operations_of(on_host).draw(on_host, plan, numbers)
            different = int((drawn != expected).sum())
            context.record(
                piece="draw",
                kind=name,
                rows=rows,
                vocabulary=vocabulary,
                different=different,
                ok=different <= context.either(DIFFERENT * rows, 0),
            )


def sampling_times(context: Context) -> None:
    """Milliseconds of a sampled step, and how many times it could have read the logits."""
    rows, vocabulary = context.either((256, 151_936), (3, 5000))
    logits = _logits(context, rows, vocabulary)
    for name, fields in KINDS.items():
        batch = _batch(fields, rows, vocabulary)
        call = partial(sample, logits, batch, [0] * rows)
        seconds = context.bench("tiny").seconds_of(call, repeat=10)
        context.record(
            piece="sampling",
            kind=name,
            rows=rows,
            vocabulary=vocabulary,
            ms=1e3 * seconds,
            reads=seconds * context.rates()[0] / logits.nbytes,
        )


def log_probabilities(context: Context) -> None:
    """The best tokens, in order, and their log-probabilities; equal logits by id."""
    rows, vocabulary, count = context.either((256, 151_936, 20), (3, 5000, 5))
    logits = _logits(context, rows, vocabulary)
    tokens = torch.randint(vocabulary, (rows,), device=context.device)
    actual = PendingLogprobs(logits, tokens, [count] * rows).result()
    expected = PendingLogprobs(_array(logits), tokens.cpu().numpy(), [count] * rows).result()
    wrong = [
        row
        for row, (got, want) in enumerate(zip(actual, expected, strict=True))
        if (got.rank, got.top_ids) != (want.rank, want.top_ids)
    ]
    worst = max(
        abs(mine - other)
        for got, want in zip(actual, expected, strict=True)
        for mine, other in zip(_numbers(got), _numbers(want), strict=True)
    )
    context.record(
        piece="log-probabilities", rows=rows, worst=worst, wrong=wrong[:5], ok=worst < _ERROR
    )


def _numbers(entry: TokenLogprobs) -> tuple[float, ...]:
    return entry.logprob, *entry.top_logprobs


def _logits(context: Context, rows: int, vocabulary: int) -> torch.Tensor:
    """With many equal ones, as bfloat16 has them."""
    return (3 * torch.randn(rows, vocabulary, device=context.device)).bfloat16()


def _array(logits: torch.Tensor) -> Rows:
    """The same logits on the CPU, as the CPU engine has them."""
    return logits.cpu().view(torch.uint16).numpy()


def _batch(fields: dict[str, Any], rows: int, vocabulary: int) -> SamplingBatch:
    params = SamplingParams(**fields)
    return SamplingBatch(
        [SamplingState(params, (), seed=row, vocab_size=vocabulary) for row in range(rows)]
    )
