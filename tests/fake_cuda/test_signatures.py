"""The functions that we call, in the oldest and the newest release of each library.

flashinfer's Python runs in `test_runner.py`. Of flash-attn, the stand-ins that compute must have
the parameters of the real functions.
"""

import ast
import inspect
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fake_cuda.releases import FLASH_ATTN, NEWEST
from tests.unit.attention import fake_kernels

RELEASES = tuple(FLASH_ATTN)


def parameters_in(file: Path, function: str) -> list[tuple[str, str]]:
    """The parameters of a function in a file that cannot be imported, with their defaults."""
    (found,) = (
        node
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == function
    )
    args = found.args.args
    without = len(args) - len(found.args.defaults)
    defaults = ["", *map(ast.unparse, found.args.defaults)]
    return [(arg.arg, defaults[max(0, at - without + 1)]) for at, arg in enumerate(args)]


def parameters_of(function: Callable[..., Any]) -> list[tuple[str, str]]:
    empty = inspect.Parameter.empty
    return [
        (parameter.name, "" if parameter.default is empty else repr(parameter.default))
        for parameter in inspect.signature(function).parameters.values()
    ]


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("function", ["flash_attn_with_kvcache", "flash_attn_varlen_func"])
def test_stand_ins_have_the_parameters_of_flash_attn_2(release: str, function: str) -> None:
    file = FLASH_ATTN[release] / "flash_attn" / "flash_attn_interface.py"
    stand_in = getattr(fake_kernels.flash_attn, function)
    assert parameters_of(stand_in) == parameters_in(file, function)


@pytest.mark.parametrize("release", RELEASES)
def test_stand_ins_have_the_parameters_of_flash_attn_3(release: str) -> None:
    file = FLASH_ATTN[release] / "hopper" / "flash_attn_interface.py"
    stand_in = fake_kernels.flash_attn_3.flash_attn_with_kvcache
    assert parameters_of(stand_in) == parameters_in(file, "flash_attn_with_kvcache")


@pytest.mark.parametrize("release", RELEASES)
def test_wrappers_of_flashinfer_take_what_we_give(release: str) -> None:
    """By their sources: two releases cannot be imported into one process."""
    folder = NEWEST if release == "newest" else Path(sysconfig.get_path("purelib"))
    prefill = (folder / "flashinfer" / "prefill.py").read_text()
    decode = (folder / "flashinfer" / "decode.py").read_text()
    for source, cls, method, names in (
        (prefill, "BatchPrefillWithPagedKVCacheWrapper", "plan", PLAN | {"causal", "seq_lens"}),
        (prefill, "BatchPrefillWithPagedKVCacheWrapper", "run", RUN),
        (prefill, "BatchPrefillWithPagedKVCacheWrapper", "__init__", PREFILL_GRAPH),
        (decode, "BatchDecodeWithPagedKVCacheWrapper", "_plan_impl", PLAN),  # by `plan`'s **kwargs
        (decode, "BatchDecodeWithPagedKVCacheWrapper", "run", RUN),
        (decode, "BatchDecodeWithPagedKVCacheWrapper", "__init__", GRAPH),
    ):
        assert names <= _parameters(source, cls, method), (cls, method)
    (fast,) = (
        node
        for node in ast.parse(decode).body
        if isinstance(node, ast.FunctionDef) and node.name == "fast_decode_plan"
    )
    assert PLAN | {"global_override_indptr_cpu"} <= _names(fast)
    cascade = folder / "flashinfer" / "cascade.py"
    stand_in = fake_kernels.flashinfer.merge_state_in_place
    assert parameters_of(stand_in) == parameters_in(cascade, "merge_state_in_place")


PLAN = {"window_left", "logits_soft_cap", "sm_scale", "q_data_type", "kv_data_type"}
RUN = {"out", "k_scale", "v_scale", "return_lse"}
GRAPH = {
    *("kv_layout", "backend", "use_cuda_graph", "use_tensor_cores"),
    *("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer"),
}
PREFILL_GRAPH = {
    *("kv_layout", "backend", "use_cuda_graph", "qo_indptr_buf"),
    *("paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf"),
}


def _parameters(source: str, cls: str, method: str) -> set[str]:
    """Of the last definition of a method: others are overloads."""
    (found,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == cls
    )
    methods = [
        node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == method
    ]
    return _names(methods[-1])


def _names(function: ast.FunctionDef) -> set[str]:
    return {arg.arg for arg in (*function.args.args, *function.args.kwonlyargs)}
