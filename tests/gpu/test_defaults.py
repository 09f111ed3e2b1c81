"""An engine as users get it: nothing is set about compiling, CUDA graphs and overlap."""

from typing import Any

import pytest

from pyengine import LLM
from tests.gpu.answers import GREEDY, WITH_PROMPT, ask, oracle
from tests.gpu.compare import rounded
from tests.gpu.conftest import InChild
from tests.gpu.models import LONGEST, Place

FAMILIES = ("llama", "qwen3", "gemma3_text", "gpt_oss")
"""Plain; norms of heads; windows of some layers; sinks and experts, too."""
CHUNK = 96
"""Tokens of a step: prompts are computed in chunks, beside decodes."""


@pytest.mark.parametrize("family", FAMILIES)
def test_the_default_configuration_is_the_oracle_up_to_rounding(
    in_child: InChild, family: str
) -> None:
    in_child(defaults_are_right, family)


def defaults_are_right(place: Place, family: str) -> dict[str, Any]:
    """Chunks of prompts beside decodes, then decodes after prefixes from the cache.

    On the CPU, compiling and overlap are off by default: they are set there.
    """
    settings: dict[str, Any] = {} if place.on_cuda else {"compile": True, "async_scheduling": True}
    llm = LLM(
        place.model(family),
        device=place.device,
        max_model_len=LONGEST,
        max_num_seqs=8,
        max_num_batched_tokens=CHUNK,
        kv_cache_memory=place.either(256 << 20, 24 << 20),
        **settings,
    )
    described = llm.describe()
    assert described["compile"] is True
    assert described["async_scheduling"] is True
    for kind in ("cuda_graphs", "piecewise_cuda_graphs"):
        assert (described[kind] != "none") == place.on_cuda
    dtype = str(described["dtype"])
    expected = oracle(place, family, dtype)
    found = [expected.compare(ask(llm, params)) for params in (WITH_PROMPT, GREEDY)]
    same, exact = zip(*found, strict=True)
    for against, comparisons in (("the oracle", same), ("float32", exact)):
        wrong = [words for comparison in comparisons for words in comparison.wrong]
        assert not wrong, f"against {against}: {wrong}"
    assert all(item.num_tokens > 0 for item in same)
    assert llm.stats().counters["cached_tokens"] > 0
    return {
        "attention_backend": described["attention_backend"],
        "dtype": dtype,
        "cuda_graphs": described["cuda_graphs"],
        "error": rounded(max(item.largest for item in same)),
        "bound": rounded(expected.bounds.same),
        "near_ties": sum(len(item.near_ties) for item in same),
    }
