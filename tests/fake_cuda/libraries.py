"""Attention libraries over kernels that check what they get, and compute nothing.

The Python of the libraries is real: what it hands to its kernels depends on its release.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tests.fake_cuda.releases import FLASH_ATTN

PROCESSORS = 132

used_modules: set[str] = set()
"""The modules that flashinfer has asked for, by name. A GPU machine compiles each of them."""


def install(backend: str) -> None:
    """Put the stand-ins of `backend` in place of its kernels."""
    if backend == "flashinfer":
        _install_flashinfer()
    elif backend == "flash-attn":
        _install_flash_attn()
    elif backend == "flash-attn-3":
        _install_flash_attn_3()
    elif backend in ("varlen", "cudnn"):
        _install_varlen()


def _on_device(*tensors: Any) -> None:
    for tensor in tensors:
        if tensor is not None:
            assert isinstance(tensor, FakeTensor) and tensor.device.type == "cuda", tensor


def _on_host(*tensors: Any) -> None:
    for tensor in tensors:
        assert not isinstance(tensor, FakeTensor) and tensor.device.type == "cpu", tensor


class PrefillModule:
    """The kernels of flashinfer's wrappers, which decode by tensor cores, too."""

    def __init__(self, backend: str, *kind: Any) -> None:
        from flashinfer.jit.attention import get_batch_prefill_uri

        self._backend = backend
        used_modules.add(get_batch_prefill_uri(backend, *kind))

    def plan(self, *arguments: Any) -> list[Any]:
        """`PrefillPlan` of flashinfer's `scheduler.cuh`: it reads lengths on the host."""
        floats, ints, pinned, starts, page_starts, lengths, rows, batch = arguments[:8]
        heads, kv_heads, page, graph, dim_k, dim_v, causal, left = arguments[8:16]
        _on_device(floats, ints)
        _on_host(pinned, starts, page_starts, lengths)
        assert {starts.dtype, page_starts.dtype, lengths.dtype} == {torch.int32}
        assert pinned.numel() == ints.numel()
        assert int(starts[-1]) == rows
        assert (len(page_starts), len(lengths)) == (batch + 1, batch)
        assert dim_k == dim_v
        if self._backend == "fa2":
            need = _workspace(starts, rows, batch, heads // kv_heads, heads, kv_heads, dim_v, graph)
            assert need <= floats.numel(), f"{need} bytes of workspace for {floats.numel()}"
        return [rows, batch, heads, kv_heads, page, graph, dim_k, causal, left]

    def paged_run(self, *arguments: Any) -> None:
        """Check everything that a kernel would read."""
        floats, ints, plan, query, keys, values, starts, page_starts, pages, last = arguments[:10]
        out, lse, _mask, _layout, left = arguments[10:15]
        rows, batch, heads, kv_heads, page, _graph, dim, _causal, planned_left = plan
        _on_device(floats, ints, query, keys, values, starts, page_starts, pages, last, out, lse)
        assert query.shape == out.shape == (rows, heads, dim)
        assert keys.shape == values.shape
        assert keys.shape[1:] == (page, kv_heads, dim)
        assert out.is_contiguous() and query.stride(-1) == 1
        assert left == planned_left
        assert (len(starts), len(page_starts), len(last)) == (batch + 1, batch + 1, batch)
        assert {starts.dtype, page_starts.dtype, pages.dtype, last.dtype} == {torch.int32}


def _cascade_module() -> SimpleNamespace:
    used_modules.add("cascade")
    return SimpleNamespace(merge_state_in_place=_merge_in_place)


def _merge_in_place(
    out: torch.Tensor,
    lse: torch.Tensor,
    other: torch.Tensor,
    other_lse: torch.Tensor,
    mask: torch.Tensor | None,
) -> None:
    """`merge_state_in_place` of flashinfer's `cascade.cu`."""
    _on_device(out, lse, other, other_lse, mask)
    assert all(tensor.is_contiguous() for tensor in (out, lse, other, other_lse))
    assert out.shape == other.shape and out.dim() == 3
    assert lse.shape == other_lse.shape == out.shape[:2]
    assert lse.dtype == other_lse.dtype == torch.float32
    assert mask is None or (mask.shape == out.shape[:1] and mask.element_size() == 1)


def _workspace(
    starts: torch.Tensor,
    rows: int,
    batch: int,
    group: int,
    heads: int,
    kv_heads: int,
    dim: int,
    graph: bool,
) -> int:
    """Bytes that `PrefillPlan` takes of the float workspace, where it splits keys."""
    split = 2 * PROCESSORS // kv_heads
    if graph:
        tile = _tile((rows - batch + 1) * group, dim)
        split = max(split, -(-rows * group // tile) + batch - 1)
    else:
        tile = _tile(int(starts.diff().sum()) * group // batch, dim)
    return 4 * heads * split * tile * (dim + 1) + 32


def _tile(packed_rows: int, dim: int) -> int:
    if packed_rows > 64 and dim < 256:
        return 128
    return 64 if packed_rows > 16 else 16


def _install_flashinfer() -> None:
    import flashinfer.cascade
    import flashinfer.decode
    import flashinfer.prefill
    import flashinfer.utils

    modules: list[Any] = [
        *(flashinfer.utils, flashinfer.decode, flashinfer.prefill, flashinfer.cascade),
    ]
    replaced = {
        "get_cascade_module": _cascade_module,
        "get_batch_prefill_module": PrefillModule,
        "get_compute_capability": lambda _device: torch.cuda.get_device_capability(),
        "device_support_pdl": lambda _device: True,
        "is_sm90a_supported": lambda _device: torch.cuda.get_device_capability() == (9, 0),
        "_check_workspace_buffer_alignment": lambda *_arguments: None,  # asks for an address
    }
    for module in modules:
        for name, stand_in in replaced.items():
            if hasattr(module, name):
                setattr(module, name, stand_in)


def _install_flash_attn() -> None:
    sys.path.append(str(FLASH_ATTN["oldest"]))
    kernels: Any = ModuleType("flash_attn_2_cuda")
    kernels.fwd_kvcache, kernels.varlen_fwd = _decode, _varlen
    sys.modules["flash_attn_2_cuda"] = kernels


def flash_attn_as(release: str) -> None:
    """Give the installed flash-attn another release, after which its kernels act, too."""
    import flash_attn

    flash_attn.__version__ = release


def _decode(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """`mha_fwd_kvcache` of flash-attn's `flash_api.cpp`."""
    import flash_attn

    query, keys, values, _key, _value, lengths, _cos, _sin, _index, _left, tables = arguments[:11]
    _on_device(query, keys, values, lengths, tables)
    assert lengths.dtype == tables.dtype == torch.int32
    assert lengths.is_contiguous() and tables.stride(-1) == query.stride(-1) == 1
    assert keys.shape[1] % 256 == 0
    assert len(query) == len(lengths) == len(tables)
    if not flash_attn.__version__.startswith("2.8.3"):
        lengths.max().item()  # it checks the tables against the longest sequence
    lse = query.new_empty(len(query), query.shape[2], query.shape[1], dtype=torch.float32)
    return torch.empty_like(query), lse


def _varlen(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """`mha_varlen_fwd` of the same."""
    query, keys, values, _out, starts, key_starts, _used, _left, tables, _slopes = arguments[:10]
    max_rows, max_keys = arguments[10:12]
    _on_device(query, keys, values, starts, key_starts, tables)
    assert starts.dtype == key_starts.dtype == tables.dtype == torch.int32
    assert starts.is_contiguous() and key_starts.is_contiguous()
    assert tables.stride(-1) == query.stride(-1) == 1
    assert keys.shape[1] % 256 == 0
    assert isinstance(max_rows, int) and isinstance(max_keys, int)
    assert len(tables) == len(starts) - 1 == len(key_starts) - 1
    lse = query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32)
    return torch.empty_like(query), lse, torch.empty(0), torch.empty(2, dtype=torch.int64)


def _install_flash_attn_3() -> None:
    library: Any = ModuleType("flash_attn_interface")
    library.__spec__ = ModuleSpec("flash_attn_interface", None)  # transformers looks at it
    library.flash_attn_with_kvcache = _decode_3
    sys.modules["flash_attn_interface"] = library


def _decode_3(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    return_softmax_lse: bool,
    **_settings: Any,
) -> Any:
    """`mha_fwd` of flash-attn 3's `flash_api.cpp`."""
    lengths, tables, starts = cache_seqlens, page_table, cu_seqlens_q
    _on_device(query, keys, values, lengths, tables, starts)
    assert lengths.dtype == tables.dtype == starts.dtype == torch.int32
    assert lengths.is_contiguous() and starts.is_contiguous()
    assert tables.stride(-1) == query.stride(-1) == 1
    assert isinstance(max_seqlen_q, int)
    assert len(lengths) == len(tables) == len(starts) - 1
    out = torch.empty_like(query)
    lse = query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32)
    return (out, lse) if return_softmax_lse else out


def _install_varlen() -> None:
    from torch.nn.attention import varlen

    module: Any = varlen
    for name, stand_in in {
        "_cudnn_decode_disabled": lambda _index: False,
        "_cudnn_version_and_major_capability": lambda _index: (
            92600,
            torch.cuda.get_device_capability()[0],
        ),
    }.items():
        if hasattr(module, name):
            setattr(module, name, stand_in)
