"""Models with recurrent layers on the device, against the engine for CPUs."""

from contextlib import AbstractContextManager
from typing import Any

import pytest

from pyengine import LLM
from tests.gpu.answers import GREEDY, WITH_PROMPT, ask, oracle
from tests.gpu.compare import rounded
from tests.gpu.conftest import InChild
from tests.gpu.models import LONGEST, WITH_STATES, Place
from tests.support.torch_engine import torch_llm

CHUNK = 96
"""Tokens of a step: prompts are computed in chunks, beside decodes."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", WITH_STATES)
def test_states_are_those_of_the_cpu_up_to_rounding(
    in_child: InChild, family: str, dtype: str
) -> None:
    in_child(states_are_right, family, dtype)


def states_are_right(place: Place, family: str, dtype: str) -> dict[str, Any]:
    """Chunks of prompts beside decodes, then decodes after snapshots."""
    expected = oracle(Place("cpu", place.folder), family, dtype, "cpu")
    with _llm(place, family, dtype) as llm:
        described = llm.describe()
        assert (described["cuda_graphs"] != "none") == place.on_cuda
        found = [expected.compare(ask(llm, params)) for params in (WITH_PROMPT, GREEDY)]
        assert llm.stats().counters["cached_tokens"] > 0
    same, exact = zip(*found, strict=True)
    for against, comparisons in (("the CPU", same), ("float32", exact)):
        wrong = [words for comparison in comparisons for words in comparison.wrong]
        assert not wrong, f"against {against}: {wrong}"
    assert all(item.num_tokens > 0 for item in same)
    return {
        "attention_backend": described["attention_backend"],
        "cuda_graphs": described["cuda_graphs"],
        "error": rounded(max(item.largest for item in same)),
        "bound": rounded(expected.bounds.same),
        "equal": sum(item.num_equal for item in same),
        "near_ties": sum(len(item.near_ties) for item in same),
    }


def _llm(place: Place, family: str, dtype: str) -> AbstractContextManager[LLM]:
    """The default configuration on CUDA; elsewhere torch's operations instead of kernels."""
    folder = place.model(family)
    if place.on_cuda:
        settings = {"enforce_eager": False, "compile": None, "max_num_batched_tokens": CHUNK}
        return place.llm(folder, dtype, "auto", **settings)
    return torch_llm(
        folder,
        dtype=dtype,
        max_model_len=LONGEST,
        max_num_seqs=8,
        max_num_batched_tokens=CHUNK,
        kv_cache_memory=24 << 20,
    )
