"""The Triton kernels of pyengine against torch, on random numbers.

Another kernel is one more function in `CHECKS`, which records what it found.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import torch

from benches.gpu.first_run.context import Context
from benches.gpu.first_run.sampling_kernels import draws, log_probabilities, sampling_times
from pyengine.attention.paged import rotated
from pyengine.kernels.add_norm import RowNorm, add_norm
from pyengine.kernels.gate import Gate, gated
from pyengine.kernels.grouped_linear import grouped_linear
from pyengine.kernels.kv_write import write_rows
from pyengine.kernels.rope import HeadNorm, RotaryLayout, Rotation
from pyengine.kernels.rotation import write_rotated
from pyengine.kv_cache.pool import KVCacheSpec, KVPool
from pyengine.models.decoder.grouped import group_pairs
from pyengine.models.decoder.spec import MLP, Activation, ClampedGate
from pyengine.models.decoder.torch_kernels import TorchKernels
from pyengine.utils.dtypes import dtype_of

Heads = tuple[int, int, int]
"""Query heads, KV heads, elements of a head."""
ROUNDING = 2e-3
"""Relative error: bfloat16 may round once more in a few places."""
BLOCK = 16
ROTATIONS: tuple[tuple[Literal["halves", "pairs"], int, bool], ...] = (
    ("halves", 1, False),
    ("halves", 1, True),
    ("pairs", 1, False),
    ("halves", 2, False),
)
"""The order of pairs, a head's elements / rotated elements, with norms of heads."""


def run(context: Context) -> None:
    """All of `CHECKS`; one that raises does not stop the others."""
    torch.manual_seed(0)
    for check in CHECKS:
        context.attempt(check.__name__, check, context)


def kv_write(context: Context) -> None:
    """Keys and values in their slots, bit by bit; rows without a slot change nothing."""
    dtypes = context.either((torch.bfloat16, torch.float8_e4m3fn), (torch.float32,))
    wrong, checked = [], 0
    for heads, count in _cases(context):
        for dtype in dtypes:
            scales = (0.5, 2.0) if dtype.itemsize == 1 else (1.0, 1.0)
            ours, theirs = _pools(context, heads, dtype, count, scales)
            _, key, value = _rows(context, heads, count)
            slots = _slots(context, count)
            call = partial(write_rows, (key, value), (ours.keys[0], ours.values[0]), slots, scales)
            call()
            theirs.write(0, key, value, _without_gaps(slots, theirs))
            checked += 1
            if not all(torch.equal(a, b) for a, b in _written(ours, theirs)):
                wrong.append([heads, count, str(dtype)])
    seconds = context.bench("tiny").seconds_of(call)
    context.record(piece="kv write", checked=checked, wrong=wrong, last_us=1e6 * seconds)


def rotation(context: Context) -> None:
    """Rotary embedding, norms of heads and the KV write, in one kernel."""
    worst, wrong, checked = 0.0, [], 0
    for heads, count in _cases(context):
        for order, part, has_norm in ROTATIONS:
            layout = RotaryLayout(heads[2] // part, order, 1)
            turn = _rotation(context, layout, heads[2] if has_norm else 0, count)
            ours, theirs = _pools(context, heads, _dtype(context), count)
            rows, slots = _rows(context, heads, count), _slots(context, count)
            call = partial(write_rotated, rows, (ours.keys[0], ours.values[0]), slots, turn)
            query, key = rotated(rows[0], rows[1], turn)
            theirs.write(0, key, rows[2], _without_gaps(slots, theirs))
            error = max(
                relative_error(call(), query),
                *(relative_error(a, b) for a, b in _floats(ours, theirs)),
            )
            worst, checked = max(worst, error), checked + 1
            if not error < ROUNDING:  # NaN, too
                wrong.append([heads, count, order, part, has_norm, error])
    seconds = context.bench("tiny").seconds_of(call)
    context.record(
        piece="rotation", checked=checked, worst=worst, wrong=wrong[:5], last_us=1e6 * seconds
    )


def grouped_products(context: Context) -> None:
    """The products of a mixture of experts, in the shapes of real models."""
    bench = context.bench("tiny")
    shapes = [(128, 2048, 1536, 256, 8), (32, 2880, 5760, 64, 4), (8, 4096, 14_336, 33, 2)]
    for experts, inputs, outputs, tokens, choices in context.either(shapes, [(4, 64, 96, 5, 2)]):
        weight = torch.randn(experts, outputs, inputs, device=context.device) / inputs**0.5
        weight = weight.to(_dtype(context))
        rows = torch.randn(tokens, inputs, device=context.device).to(_dtype(context))
        picks = [torch.randperm(experts, device=context.device)[:choices] for _ in range(tokens)]
        chosen = torch.stack(picks)
        order, ends = group_pairs(chosen, experts)
        call = partial(grouped_linear, rows, weight, order, ends, choices)
        actual = call().view(tokens, choices, outputs)[:8]
        pairs = zip(rows[:8], chosen[:8], strict=True)
        expected = torch.stack([weight[pair].float() @ row.float() for row, pair in pairs])
        error = relative_error(actual, expected)
        seconds, used = bench.seconds_of(call), len(chosen.unique())
        context.record(
            piece="grouped products",
            shape=[experts, inputs, outputs, tokens, choices],
            error=error,
            ok=error < 1e-2,
            us=1e6 * seconds,
            TB_s=weight.element_size() * used * inputs * outputs / seconds / 1e12,
        )


def sums_and_norms(context: Context) -> None:
    """A residual sum and the norm after it."""
    worst, wrong = 0.0, []
    cases = [(1, 4096), (256, 4096), (33, 2880), (2048, 8192)]
    for count, size in context.either(cases, [(5, 96)]):
        stream, change = (_numbers(context, count, size) for _ in range(2))
        weight, bias = _numbers(context, size), _numbers(context, size)
        for is_centred in (False, True):
            norm = RowNorm(weight, bias if is_centred else None, 1e-6, 1.0, is_centred)
            call = partial(add_norm, stream, change, 0.5, norm)
            total, norms = call()
            exact = total.float()
            if is_centred:
                exact = exact - exact.mean(-1, keepdim=True)
            exact = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-6)
            exact = exact * (1.0 + weight.float()) + (bias.float() if is_centred else 0.0)
            sums = relative_error(total, stream.float() + 0.5 * change.float())
            error = max(sums, relative_error(norms, exact))
            worst = max(worst, error)
            if not error < ROUNDING:  # NaN, too
                wrong.append([count, size, is_centred, error])
    seconds = context.bench("tiny").seconds_of(call)
    context.record(piece="sum and norm", worst=worst, wrong=wrong, last_us=1e6 * seconds)


def gates(context: Context) -> None:
    """Gated activations, each against torch."""
    worst, wrong = 0.0, []
    torches = TorchKernels(torch.device(context.device), torch.float32)
    activations: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
    for count, size in context.either([(1, 14_336), (256, 3072)], [(3, 40)]):
        rows = _numbers(context, count, 2 * size)
        for activation in (*activations, ClampedGate(alpha=1.7, limit=1.0)):
            gate = Gate(activation) if isinstance(activation, str) else Gate("clamped", 1.7, 1.0)
            call = partial(gated, rows, gate)
            exact = torches.activated(rows.float(), MLP(size=size, activation=activation))
            error = relative_error(call(), exact)
            worst = max(worst, error)
            if not error < ROUNDING:  # NaN, too
                wrong.append([count, size, str(activation), error])
    seconds = context.bench("tiny").seconds_of(call)
    context.record(piece="gates", worst=worst, wrong=wrong, last_us=1e6 * seconds)


CHECKS = (
    *(kv_write, rotation, grouped_products, sums_and_norms, gates),
    *(draws, log_probabilities, sampling_times),
)


def _dtype(context: Context) -> torch.dtype:
    """float32 off CUDA: Triton's interpreter truncates bfloat16 instead of rounding it."""
    return context.either(torch.bfloat16, torch.float32)


def _numbers(context: Context, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=context.device).to(_dtype(context))


def _cases(context: Context) -> Iterator[tuple[Heads, int]]:
    shapes = [(32, 8, 128), (16, 8, 128), (64, 8, 64), (8, 4, 256), (14, 2, 64)]
    for heads in context.either(shapes, [(4, 2, 64)]):
        for count in context.either((1, 5, 256, 2048), (1, 5)):
            yield heads, count


def _rows(context: Context, heads: Heads, count: int) -> tuple[Any, Any, Any]:
    """Query, key and value: views of one product, as models pass them."""
    query_heads, kv_heads, dim = heads
    sizes = [query_heads * dim, kv_heads * dim, kv_heads * dim]
    whole = torch.randn(count, sum(sizes), device=context.device).to(_dtype(context))
    query, key, value = (part.unflatten(-1, (-1, dim)) for part in whole.split(sizes, -1))
    return query, key, value


def _slots(context: Context, count: int) -> torch.Tensor:
    slots = torch.randperm((count // BLOCK + 8) * BLOCK, device=context.device)[:count]
    slots[1::7] = -1
    return slots


def _without_gaps(slots: torch.Tensor, pool: KVPool) -> torch.Tensor:
    """Slots for `KVPool.write`: those of the null block in place of -1."""
    return torch.where(slots < 0, pool.num_blocks * pool.block_size, slots)


def _pools(
    context: Context,
    heads: Heads,
    dtype: torch.dtype,
    count: int,
    scales: tuple[float, float] = (1.0, 1.0),
) -> tuple[KVPool, KVPool]:
    """Two equal pools, filled with numbers that must stay where nothing is written."""
    _, kv_heads, dim = heads
    spec = KVCacheSpec(kv_heads, dim, dim, dtype_of(dtype), scale_k=scales[0], scale_v=scales[1])
    device, blocks = torch.device(context.device), count // BLOCK + 8
    ours, theirs = (KVPool([spec], blocks, BLOCK, device) for _ in range(2))
    for mine, other in _tensors(ours, theirs):
        other.copy_(mine.view(torch.uint8).random_(0, 60).view(dtype))
    return ours, theirs


def _tensors(ours: KVPool, theirs: KVPool) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    yield from zip(ours.keys + ours.values, theirs.keys + theirs.values, strict=True)


def _written(ours: KVPool, theirs: KVPool) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Their bytes without the null block, which takes rows without a slot."""
    for mine, other in _tensors(ours, theirs):
        yield mine[:-1].view(torch.uint8), other[:-1].view(torch.uint8)


def _floats(ours: KVPool, theirs: KVPool) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for mine, other in _tensors(ours, theirs):
        yield mine[:-1], other[:-1]


def _rotation(context: Context, layout: RotaryLayout, norm_size: int, count: int) -> Rotation:
    angle, dtype = torch.randn(count, layout.size, device=context.device), _dtype(context)
    norm = None
    if norm_size:
        query, key = (
            torch.rand(norm_size, device=context.device).to(dtype) + 0.5 for _ in range(2)
        )
        norm = HeadNorm(query, key, 1e-6, 0.0)
    return Rotation(angle.cos().to(dtype), angle.sin().to(dtype), layout, norm)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The relative error, in the norm of all numbers."""
    expected = expected.float()
    return float((actual.float() - expected).norm() / expected.norm().clamp_min(1e-20))
