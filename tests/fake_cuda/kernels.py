"""Our Triton kernels, compiled as calls of them are, for GPUs that are not there."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from pyengine.kernels.rope import HeadNorm, RotaryLayout, Rotation
from pyengine.kv_cache.pool import KVCacheSpec, KVPool
from pyengine.sampling.logprobs import PendingLogprobs
from pyengine.sampling.sampler import SamplingBatch, draw
from pyengine.sampling.state import SamplingState
from pyengine.sampling_params import SamplingParams
from pyengine.utils.dtypes import dtype_of
from tests.support.fake_cuda import FakeCuda, kernels_warmed_up

HEADS = ((16, 8, 128), (8, 4, 256), (64, 8, 64), (14, 2, 64))
"""Query heads, KV heads and head size: Qwen3, Gemma 3, GPT-OSS, Qwen2."""
DTYPES = ((torch.bfloat16, None), (torch.float16, None), (torch.bfloat16, torch.float8_e4m3fn))
"""Of rows, and of the cache if that is another."""
HALVES = (torch.bfloat16, torch.float16)
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped")
FLOAT8_CAPABILITY = 89
ROWS = 5
PROMPT = 40
"""Tokens of steps with a prompt beside decodes."""
LOGITS = ((151_936, torch.bfloat16), (151_936, torch.float32), (1001, torch.float16))
"""Vocabulary sizes and types."""


def compile_for(capability: str) -> None:
    """Compile every kernel for a GPU of this compute capability, 90 for 9.0."""
    from pyengine.kernels.add_norm import RowNorm, add_norm
    from pyengine.kernels.gate import Gate, gated
    from pyengine.kernels.grouped_linear import grouped_linear
    from pyengine.kernels.kv_write import write_rows
    from pyengine.kernels.rotation import write_rotated

    major, minor = divmod(int(capability), 10)
    with FakeCuda((major, minor)), kernels_warmed_up() as compiled:
        for (dtype, stored), heads, with_norm in product(DTYPES, HEADS, (False, True)):
            if stored is not None and int(capability) < FLOAT8_CAPABILITY:
                continue  # torch converts there
            rows, caches, rotation = _layer(heads, dtype, stored or dtype, with_norm)
            slots = torch.zeros(ROWS, dtype=torch.int64, device="cuda")
            before = len(compiled)
            write_rotated(rows, caches, slots, rotation)
            write_rows(rows[1:], caches, slots)
            assert len(compiled) == before + 2
        before = len(compiled)
        products = list(_products(has_float8=int(capability) >= FLOAT8_CAPABILITY))
        for arguments, named in products:
            assert len(grouped_linear(*arguments, **named)) == (ROWS if len(arguments) == 2 else 10)
        assert len(compiled) == before + len(products)
        before = len(compiled)
        for dtype, (size, has_bias) in product(HALVES, ((4096, False), (2880, True))):
            rows = torch.zeros(ROWS, size, dtype=dtype, device="cuda")
            weight = torch.zeros(size, dtype=dtype, device="cuda")
            norm = RowNorm(weight, weight if has_bias else None, 1e-6, 0.0, has_bias)
            add_norm(rows, rows.clone(), 1.0, norm)
            add_norm(rows.view(ROWS, 16, -1), None, 1.0, norm._replace(weight=None, bias=None))
        assert len(compiled) == before + 8
        before = len(compiled)
        for dtype, activation in product(HALVES, ACTIVATIONS):
            rows = torch.zeros(ROWS, 2 * 3072, dtype=dtype, device="cuda")
            assert gated(rows, Gate(activation, 1.7, 7.0)).shape == (ROWS, 3072)
        assert len(compiled) == before + 2 * len(ACTIVATIONS)
        before = len(compiled)
        _mix()
        kinds = {kernel.metadata.name for kernel in compiled[before:]}
        assert kinds == {"_kernel", "_recurrent_kernel", "_chunked_kernel"}
        assert len(compiled) == before + 7 + 17 + 4
        before = len(compiled)
        for case in LOGITS:
            _draw(*case)
        kinds = {kernel.metadata.name for kernel in compiled[before:]}
        names = ("sums", "floors", "kept_sums", "choice", "best", "forbid")
        assert kinds == {f"_{name}_kernel" for name in names}
        assert len(compiled) == before + 12 * len(LOGITS)
    for kernel in compiled:
        assert kernel.metadata.target.arch == int(capability)
        assert kernel.asm["cubin"].startswith(b"\x7fELF")
        assert "ptx" in kernel.asm


def _products(*, has_float8: bool) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments of grouped products: experts as families have them, and one weight in squares."""
    device = torch.device("cuda:0")
    order = torch.zeros(10, dtype=torch.int64, device=device)
    for dtype, (num_experts, inputs, outputs) in product(
        (torch.bfloat16, torch.float16), ((128, 2048, 1536), (32, 2880, 5760))
    ):
        rows = torch.zeros(ROWS, inputs, dtype=dtype, device=device)
        ends = torch.zeros(num_experts, dtype=torch.int64, device=device)
        weight = torch.zeros(num_experts, outputs, inputs, dtype=dtype, device=device)
        bias = torch.zeros(num_experts, outputs, dtype=dtype, device=device)
        yield (rows, weight, order, ends, 2), {}
        yield (rows, weight.mT.contiguous().mT, order, ends, 2), {"bias": bias}
        yield (rows.repeat(2, 1), weight, order, ends, 1), {"factors": order.to(dtype)}
        if has_float8:
            codes = weight.to(torch.float8_e4m3fn)
            scales = torch.zeros(num_experts, outputs, 1, device=device)
            yield (rows, codes, order, ends, 2), {"scales": scales}
            squares = scales.new_zeros(1, -(-outputs // 128), -(-inputs // 128))
            yield (rows, codes[:1]), {"scales": squares}


def _layer(
    heads: tuple[int, int, int], dtype: torch.dtype, stored: torch.dtype, with_norm: bool
) -> tuple[Any, Any, Rotation]:
    """Rows as fused projections give them, a layer's caches, and a rotation."""
    query_heads, kv_heads, dim = heads
    device = torch.device("cuda:0")
    pool = KVPool([KVCacheSpec(kv_heads, dim, dim, dtype_of(stored))], 4, 16, device)
    sizes = [query_heads * dim, kv_heads * dim, kv_heads * dim]
    whole = torch.zeros(ROWS, sum(sizes), dtype=dtype, device=device)
    rows = tuple(part.unflatten(-1, (-1, dim)) for part in whole.split(sizes, -1))
    angles = torch.zeros(ROWS, dim, dtype=dtype, device=device)
    norm = None
    if with_norm:
        weight = torch.zeros(dim, dtype=dtype, device=device)
        norm = HeadNorm(weight, weight.clone(), 1e-6, 0.0)
    rotation = Rotation(angles, angles.clone(), RotaryLayout(dim, "halves", 1), norm)
    return rows, (pool.keys[0], pool.values[0]), rotation


def _mix() -> None:
    """Recurrent layers as families have them, in decodes and beside prompts."""
    from pyengine.kernels.delta_rule import DeltaRule, gated_delta
    from pyengine.kernels.gated_norm import gated_norm
    from pyengine.kernels.sequences import Sequences
    from pyengine.kernels.short_conv import short_conv
    from pyengine.kernels.state_space import SpaceWeights, state_space

    def array(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device="cuda")

    places = array(ROWS, dtype=torch.int64)
    sequences = Sequences(array(ROWS + 1, dtype=torch.int32), places, places.clone())
    for dtype in HALVES:
        for tokens in (ROWS, PROMPT) if dtype == torch.bfloat16 else (ROWS,):
            rows = array(tokens, 3 * 8192, dtype=dtype)
            qkv, gates = rows[:, :8192], (rows[:, 8192:16384], rows[:, 16384:])
            conv, bias = array(3, 3, 8192), array(8192)
            short_conv(qkv, array(8192, 4), bias, conv, sequences, has_silu=True)
            short_conv(qkv, array(8192, 4), None, conv, sequences, has_silu=True)
            short_conv(
                *(qkv, array(8192, 3), None, array(3, 2, 8192), sequences),
                has_silu=False,
                gates=gates,
            )
            for key_heads, by_channel in ((16, False), (32, True)):
                keys = array(tokens, key_heads, 128, dtype=dtype)
                value, gate = array(tokens, 32, 128, dtype=dtype), array(tokens, 32, dtype=dtype)
                decay = array(tokens, 32 * 128, dtype=dtype) if by_channel else gate
                rule = DeltaRule(array(32), array(decay.shape[1]), 1.0, False, 1e-6)
                parts = keys, keys.clone(), value, decay, gate
                gated_delta(parts, rule, array(3, 32, 128, 128), sequences)
            x, time = array(tokens, 128, 64, dtype=dtype), array(tokens, 128, dtype=dtype)
            inner = array(tokens, 1, 128, dtype=dtype)
            space = SpaceWeights(array(128), array(128), array(128))
            state_space((x, time, inner, inner), space, array(3, 128, 128, 64), sequences, x)
            inner = array(tokens, 16, dtype=dtype)
            space = SpaceWeights(array(16, 8192), array(8192), array(8192))
            state_space((qkv, qkv, inner, inner), space, array(3, 16, 8192), sequences, gates[0])
        for size in (128, 8192):
            rows = array(ROWS, 8192, dtype=dtype)
            gated_norm(rows, rows, rows[0], size, 1e-6)


def _draw(vocab_size: int, dtype: torch.dtype) -> None:
    """Draws with and without filters, masks, log-probabilities with and without other tokens."""
    from pyengine.kernels.masks import forbid

    logits = torch.zeros(ROWS, vocab_size, dtype=dtype, device="cuda")
    for params in (SamplingParams(temperature=1), SamplingParams(temperature=1, top_p=0.9)):
        state = SamplingState(params, (), seed=1, vocab_size=vocab_size)
        draws = SamplingBatch([state] * ROWS).draws
        assert draws is not None
        assert draw(logits, draws, range(ROWS)).shape == (ROWS,)
    tokens = torch.zeros(ROWS, dtype=torch.int64, device="cuda")
    words = torch.zeros(ROWS, vocab_size // 32, dtype=torch.int32, device="cuda")
    forbid(logits, tokens, words)
    for most in (0, 5):
        PendingLogprobs(logits, tokens, [most] * ROWS)
