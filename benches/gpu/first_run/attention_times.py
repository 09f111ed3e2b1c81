"""flashinfer's kernels alone, in the shape of Llama-3.1-8B: what a layer's attention takes."""

from functools import partial
from typing import Any

import torch

from benches.gpu.first_run.context import Context
from benches.gpu.first_run.modules import spec
from benches.gpu.target import NotHere

HEADS, KV_HEADS, DIM = 32, 8, 128
PAGES = (16, 64)
WORKSPACE = 256 << 20


def run(context: Context) -> None:
    """Decodes of 256 rows over 570 tokens, and prefills of 4 x 2,048, by page size."""
    if not context.on_cuda:
        raise NotHere("flashinfer's kernels are for CUDA")
    for page in PAGES:
        context.attempt(f"decode, pages of {page}", decode, context, page)
    for kind in ("fa2", "fa3"):
        context.attempt(f"prefill {kind}", prefill, context, kind, PAGES[0])


def decode(context: Context, page: int) -> None:
    """Bytes of keys and values per second."""
    library, batch, length = _library(), 256, 570
    pages = -(-length // page)
    cache, order = _cache(context, batch * pages, page)
    query = torch.randn(batch, HEADS, DIM, device=context.device).bfloat16()
    starts = torch.arange(batch + 1, dtype=torch.int32) * pages
    last = torch.full((batch,), length - (pages - 1) * page, dtype=torch.int32)
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
        _workspace(context), "NHD", use_tensor_cores=True, backend="fa2"
    )
    sizes = (HEADS, KV_HEADS, DIM, page)
    wrapper.plan(starts, order, last, *sizes, q_data_type=torch.bfloat16)
    seconds = context.bench("tiny").seconds_of(partial(wrapper.run, query, cache))
    num_bytes = 2 * batch * length * KV_HEADS * DIM * 2
    context.record(piece="decode", page=page, us=1e6 * seconds, TB_s=num_bytes / seconds / 1e12)


def prefill(context: Context, kind: str, page: int) -> None:
    """Operations per second of causal attention."""
    library, count, length = _library(), 4, 2048
    if kind != "fa2" and not spec(f"{kind}-{DIM}").is_aot:
        raise NotHere("it is not prebuilt, and takes minutes to compile")
    pages = length // page
    cache, order = _cache(context, count * pages, page)
    query = torch.randn(count * length, HEADS, DIM, device=context.device).bfloat16()
    wrapper = library.BatchPrefillWithPagedKVCacheWrapper(_workspace(context), "NHD", backend=kind)
    numbers = torch.arange(count + 1, dtype=torch.int32)
    last = torch.full((count,), page, dtype=torch.int32)
    wrapper.plan(
        numbers * length,
        numbers * pages,
        order,
        last,
        HEADS,
        KV_HEADS,
        DIM,
        page,
        causal=True,
        q_data_type=torch.bfloat16,
    )
    seconds = context.bench("tiny").seconds_of(partial(wrapper.run, query, cache))
    flops = 4 * count * HEADS * DIM * length * (length + 1) / 2
    context.record(
        piece=f"prefill {kind}", page=page, us=1e6 * seconds, TFLOP_s=flops / seconds / 1e12
    )


def _library() -> Any:
    try:
        import flashinfer
    except ImportError as error:
        raise NotHere(str(error)) from error
    return flashinfer


def _workspace(context: Context) -> torch.Tensor:
    return torch.zeros(WORKSPACE, dtype=torch.uint8, device=context.device)


def _cache(context: Context, pages: int, page: int) -> tuple[Any, torch.Tensor]:
    """Keys and values of pages in random order, and that order."""
    shape = (pages, page, KV_HEADS, DIM)
    cache = tuple(torch.randn(shape, device=context.device).bfloat16() for _ in range(2))
    return cache, torch.randperm(pages, device=context.device).int()
