"""Stand-ins for packages that are not installed, with the real ones' parameters.

They compute in plain torch, from nothing but what they are given: a wrong argument gives a wrong
number. Parameters as in flashinfer-python 0.6.18, flash-attn 2.8.3 and 3, and torch 2.15; `make
gpu-tests` compares them with the real ones.
"""

import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch


def attend(query, key, value, length, scale, left=-1, softcap=0.0, causal=True):
    """Attention of the last rows of a sequence: `[n, H, d]` over `[m, KV, d]`, `length` of the `m`.

    Returns the result and the logarithm of the sum under the softmax, `[n, H]`. Masked scores are
    replaced; masked values are multiplied by zero, as flash-attn 3 does (flash-attention#2374).
    """
    group = query.shape[1] // key.shape[1]
    key, value = (item.float().repeat_interleave(group, 1) for item in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.float(), key) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    own = torch.arange(len(query))[:, None] + length - len(query)
    at = torch.arange(len(key))
    seen = ((at <= own) | (not causal)) & (at < length)
    if left >= 0:
        seen &= at >= own - left
    scores = scores.masked_fill(~seen, -math.inf)
    lse = scores.logsumexp(-1)
    out = torch.einsum("hqk,khd->qhd", (scores - lse[..., None]).exp(), value)
    return out.to(query.dtype), lse.T


def paged(cache, pages):
    """The rows of whole pages: kernels read what the last one holds past the end, too."""
    return cache[pages.long()].flatten(0, 1)


class PlanQueue:
    """The device's queue of plans: it reads their memory on request, not before."""

    def __init__(self):
        self.planned = self.done = 0
        self.waiting = []
        self.is_late = False

    def plan(self, memory):
        self.planned += 1
        memory[0] = self.planned
        self.waiting.append((memory, self.planned))
        if not self.is_late:
            self.run()

    def mark(self):
        planned = self.planned
        return lambda: self.done >= planned

    def run(self):
        for memory, number in self.waiting:
            assert int(memory[0]) == number, "a plan was written over one that had not been read"
            self.done = number
        self.waiting.clear()


queue = PlanQueue()


class _Wrapper:
    """The common part of flashinfer's two wrappers."""

    num_created = 0

    def __init__(self, workspace, kv_layout="NHD", **settings):
        type(self).num_created += 1
        assert workspace.dtype == torch.uint8
        assert not workspace.any()
        assert kv_layout == "NHD"
        assert settings["backend"] == "fa2", "or flashinfer compiles other kernels, too"
        self.settings = settings
        self.plans = 0
        self.workspace = workspace
        self.int_workspace = torch.zeros(1, dtype=torch.uint8)
        self._pin_memory_int_workspace_buffer = torch.zeros(1, dtype=torch.int64)

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer):
        self.workspace, self.int_workspace = float_workspace_buffer, int_workspace_buffer
        self._pin_memory_int_workspace_buffer = torch.zeros(1, dtype=torch.int64)

    def keep(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
        *, window_left=-1, logits_soft_cap=None, q_data_type="float16", kv_data_type=None,
        sm_scale=None,
    ):  # fmt: skip
        assert indptr.dtype == indices.dtype == last_page_len.dtype == torch.int32
        assert len(indptr) == len(last_page_len) + 1
        assert int(indptr[-1]) == len(indices)
        assert ((last_page_len >= 1) & (last_page_len <= page_size)).all()
        self.plans += 1
        queue.plan(self._pin_memory_int_workspace_buffer)
        self.pages = [indices[indptr[b] : indptr[b + 1]].clone() for b in range(len(last_page_len))]
        self.lengths = [
            (len(own) - 1) * page_size + int(last)
            for own, last in zip(self.pages, last_page_len, strict=True)
        ]
        self.shape = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self.dtypes = (q_data_type, kv_data_type)
        self.left, self.cap, self.scale = window_left, logits_soft_cap or 0.0, sm_scale
        self.causal = True

    def attend(self, starts, q, cache, k_scale, v_scale, out, return_lse):
        keys, values = cache
        assert (q.dtype, keys.dtype) == self.dtypes
        assert (q.shape[1], keys.shape[2], keys.shape[3], keys.shape[1]) == self.shape
        assert q.is_contiguous()
        result, lses = torch.empty_like(q) if out is None else out, []
        for b, (pages, length) in enumerate(zip(self.pages, self.lengths, strict=True)):
            rows = slice(starts[b], starts[b + 1])
            if rows.start == rows.stop:  # in a graph, of which some sequences are not used
                continue
            k, v = (paged(item.float(), pages) for item in (keys, values))
            scale = self.scale * (k_scale or 1.0)
            v = v * (v_scale or 1.0)
            own, lse = attend(q[rows], k, v, length, scale, self.left, self.cap, self.causal)
            result[rows] = own
            lses.append(lse)
        return (result, torch.cat(lses) / math.log(2)) if return_lse else result


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def plan(self, indptr, indices, last_page_len, *shape, **settings):
        buffer = self.settings.get("paged_kv_last_page_len_buffer")
        if buffer is not None:
            assert self.settings["use_cuda_graph"]
            assert len(buffer) == len(last_page_len)
            assert len(self.settings["paged_kv_indptr_buffer"]) == len(indptr)
            assert len(self.settings["paged_kv_indices_buffer"]) >= len(indices)
            self.settings["paged_kv_indptr_buffer"].copy_(indptr)
            self.settings["paged_kv_indices_buffer"][: len(indices)].copy_(indices)
            buffer.copy_(last_page_len)
        self.planned_in_full = True
        self.keep(indptr, indices, last_page_len, *shape, **settings)

    def run(self, q, cache, *, k_scale=None, v_scale=None, out=None, return_lse=False):
        assert len(q) == len(self.pages)
        starts = range(len(q) + 1)
        return self.attend(starts, q, cache, k_scale, v_scale, out, return_lse)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def plan(
        self, qo_indptr, indptr, indices, last_page_len, *shape, causal=False, seq_lens=None,
        **settings,
    ):  # fmt: skip
        assert len(qo_indptr) == len(indptr)
        assert qo_indptr.dtype == torch.int32
        self.starts = qo_indptr.tolist()
        if self.settings.get("use_cuda_graph"):
            inputs = {"qo_indptr": qo_indptr, "paged_kv_indptr": indptr,
                     "paged_kv_last_page_len": last_page_len}  # fmt: skip
            for name, numbers in inputs.items():
                assert len(self.settings[f"{name}_buf"]) == len(numbers)
                self.settings[f"{name}_buf"].copy_(numbers)
            self.settings["paged_kv_indices_buf"][: len(indices)].copy_(indices)
            self.rows = getattr(self, "rows", self.starts[-1])
            assert self.starts[-1] == self.rows, "a graph has as many rows in every step"
        self.keep(indptr, indices, last_page_len, *shape, **settings)
        self.causal = causal
        assert seq_lens.dtype == torch.int32
        assert seq_lens.tolist() == self.lengths

    def run(self, q, cache, *, k_scale=None, v_scale=None, out=None, return_lse=False):
        assert len(q) == self.starts[-1]
        return self.attend(self.starts, q, cache, k_scale, v_scale, out, return_lse)


def fast_decode_plan(
    self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
    pos_encoding_mode="NONE", window_left=-1, logits_soft_cap=None, q_data_type=None,
    kv_data_type=None, data_type=None, sm_scale=None, rope_scale=None, rope_theta=None,
    non_blocking=True, fixed_split_size=None, disable_split_kv=False, q_len_per_req=1,
    global_override_indptr_cpu=None,
):  # fmt: skip
    assert self.planned_in_full, "it uses what the first plan has made"
    assert global_override_indptr_cpu.device.type == last_page_len.device.type == "cpu"
    fixed = {name: self.settings[f"paged_kv_{name}_buffer"] for name in ("indptr", "indices")}
    assert fixed["indptr"].tolist() == global_override_indptr_cpu.tolist()
    read = fixed["indices"][: len(indices)]  # what the kernels read; nothing is copied here
    assert read.tolist() == indices.tolist()
    assert self.settings["paged_kv_last_page_len_buffer"].tolist() == last_page_len.tolist()
    self.keep(
        indptr, read, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
        window_left=window_left, logits_soft_cap=logits_soft_cap, q_data_type=q_data_type,
        kv_data_type=kv_data_type, sm_scale=sm_scale,
    )  # fmt: skip


def merge_state_in_place(v, s, v_other, s_other, mask=None):
    assert all(tensor.is_contiguous() for tensor in (v, s, v_other, s_other))
    assert s.dtype == s_other.dtype == torch.float32
    merged = slice(None) if mask is None else mask
    assert mask is None or mask.dtype == torch.bool
    mine, other = s[merged], s_other[merged]
    share = torch.sigmoid((other - mine) * math.log(2))[..., None]
    v[merged] = torch.lerp(v[merged].float(), v_other[merged].float(), share).to(v.dtype)
    s[merged] = torch.logaddexp2(mine, other)


flashinfer = SimpleNamespace(
    fast_decode_plan=fast_decode_plan,
    merge_state_in_place=merge_state_in_place,
    BatchDecodeWithPagedKVCacheWrapper=BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper,
)


def _left(window_size, causal):
    left, right = window_size
    assert causal
    assert right in (-1, 0)
    return left


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
    return_softmax_lse=False,
):  # fmt: skip
    assert cache_seqlens.dtype == block_table.dtype == torch.int32
    assert len(q) == len(cache_seqlens) == len(block_table)
    outs, lses = [], []
    for own, length, table in zip(q, cache_seqlens.tolist(), block_table, strict=True):
        pages = table[: -(-length // k_cache.shape[1])]
        keys, values = (paged(item, pages) for item in (k_cache, v_cache))
        settings = (softmax_scale, _left(window_size, causal), softcap)
        out, lse = attend(own, keys, values, length, *settings)
        outs.append(out)
        lses.append(lse.T)
    stacked = torch.stack(outs)
    return (stacked, torch.stack(lses)) if return_softmax_lse else stacked


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False, block_table=None,
):  # fmt: skip
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == block_table.dtype == torch.int32
    out, lse = _varlen(
        q, (k, v), cu_seqlens_q, cu_seqlens_k.diff(), block_table, (max_seqlen_q, max_seqlen_k),
        (softmax_scale, _left(window_size, causal), softcap),
    )  # fmt: skip
    return (out, lse, None) if return_attn_probs else out


flash_attn = SimpleNamespace(
    __version__="2.8.3",
    flash_attn_with_kvcache=flash_attn_with_kvcache,
    flash_attn_varlen_func=flash_attn_varlen_func,
)


def reads_lengths(*_arguments, **_named):
    raise AssertionError("the host would wait for the longest length")


flash_attn_reading_lengths = SimpleNamespace(
    __version__="2.8.4",
    flash_attn_with_kvcache=reads_lengths,
    flash_attn_varlen_func=flash_attn_varlen_func,
)


def flash_attn_3_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None,
    cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None,
    cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None,
    q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
):  # fmt: skip
    assert cu_seqlens_q.dtype == cache_seqlens.dtype == page_table.dtype == torch.int32
    limits = (max_seqlen_q, page_table.shape[1] * k_cache.shape[1])
    out, lse = _varlen(
        q, (k_cache, v_cache), cu_seqlens_q, cache_seqlens, page_table, limits,
        (softmax_scale, _left(window_size, causal), softcap),
    )  # fmt: skip
    return (out, lse) if return_softmax_lse else out


flash_attn_3 = SimpleNamespace(flash_attn_with_kvcache=flash_attn_3_with_kvcache)


def varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None,
    window_size=(-1, -1), enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
) -> Any:  # fmt: skip
    assert cu_seq_q.dtype == cu_seq_k.dtype == seqused_k.dtype == block_table.dtype == torch.int32
    assert num_splits in (None, 1)
    assert enable_gqa
    if window_size == (-1, -1):
        assert max_q == 1, "several rows would see keys after their own"
    assert cu_seq_k.diff().tolist() == seqused_k.tolist()
    out, lse = _varlen(
        query, (key, value), cu_seq_q, seqused_k, block_table, (max_q, max_k),
        (scale, _left(window_size, causal=True), 0.0),
    )  # fmt: skip
    return out if return_aux is None or not return_aux.lse else (out, lse)


def _varlen(query, cache, starts, lengths, tables, limits, settings):
    starts, lengths = starts.tolist(), lengths.tolist()
    assert max(b - a for a, b in pairwise(starts)) <= limits[0]
    assert max(lengths) <= limits[1]
    assert len(starts) - 1 == len(lengths) == len(tables)
    assert starts[-1] == len(query)
    outs, lses = [], []
    for b, length in enumerate(lengths):
        pages = tables[b, : -(-length // cache[0].shape[1])]
        keys, values = (paged(item, pages) for item in cache)
        out, lse = attend(query[starts[b] : starts[b + 1]], keys, values, length, *settings)
        outs.append(out)
        lses.append(lse.T)
    return torch.cat(outs), torch.cat(lses, dim=1)
