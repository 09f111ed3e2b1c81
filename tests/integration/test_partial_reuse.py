"""Prompts that part inside a block: what is equal is copied, and the tokens stay what they were."""

from pathlib import Path
from random import Random
from typing import Any

import pytest

from pyengine import LLM, SamplingParams
from tests.support.checkpoints import save_random
from tests.support.soak import soak_cases
from tests.support.without_torch import needs_torch

SIZE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "initializer_range": 0.5,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 2},
    "mistral": {"num_hidden_layers": 2, "sliding_window": 32},
    "gemma3_text": {
        "num_hidden_layers": 6,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 24,
    },
}
GREEDY = SamplingParams(temperature=0, ignore_eos=True, max_tokens=12)


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return save_random(folder, request.param, **{**SIZE, **MODELS[request.param]})


def prompts() -> list[list[int]]:
    """Each begins like an earlier one, for any length, and ends differently."""
    random = Random(3)
    all_of_them = [[random.randrange(3, 97) for _ in range(90)]]
    for _ in range(23):
        before = random.choice(all_of_them)
        own = [random.randrange(3, 97) for _ in range(random.randint(1, 30))]
        all_of_them.append(before[: random.randrange(len(before))] + own)
    return all_of_them


def generate(folder: Path, *, partial_reuse: bool, **settings: Any) -> tuple[list[Any], LLM]:
    """What is generated, one prompt after the other, then all together."""
    llm = LLM(
        folder,
        device="cpu",
        max_num_seqs=8,
        max_model_len=256,
        partial_reuse=partial_reuse,
        **{"num_blocks": 400, "max_num_batched_tokens": 64, **settings},
    )
    asked = prompts()
    outputs = [llm.generate([request], GREEDY, use_tqdm=False)[0] for request in asked[:8]]
    outputs += llm.generate(asked[8:], GREEDY, use_tqdm=False)
    llm._engine._manager.check()
    usage = llm.stats().usage
    assert (usage.active, usage.pinned) == (0, 0)
    return [output.outputs for output in outputs], llm


@pytest.mark.parametrize(
    ("block_size", "ahead"),
    [(4, True), (16, False), (64, True), *soak_cases([(4, False), (16, True), (64, False)])],
)
def test_the_tokens_are_those_of_without(folder: Path, block_size: int, ahead: bool) -> None:
    settings = {"block_size": block_size, "async_scheduling": ahead}
    plain, without = generate(folder, partial_reuse=False, **settings)
    copied, llm = generate(folder, partial_reuse=True, **settings)
    assert copied == plain
    counters, before = llm.stats().counters, without.stats().counters
    assert before["partial_hits"] == before["copied_blocks"] == 0
    assert counters["partial_tokens"] >= counters["partial_hits"] * block_size // 8 > 0
    assert counters["copied_blocks"] % counters["partial_hits"] == 0  # a block of every group
    assert counters["computed_tokens"] < before["computed_tokens"]


@pytest.mark.parametrize(
    "settings",
    [{"num_blocks": 60}, pytest.param({"kv_cache_dtype": "fp8"}, marks=needs_torch)],
)
def test_the_same_in_a_pool_that_forgets_and_one_of_eight_bits(
    folder: Path, settings: dict[str, Any]
) -> None:
    settings = {"block_size": 16, **settings}
    plain, _ = generate(folder, partial_reuse=False, **settings)
    copied, llm = generate(folder, partial_reuse=True, **settings)
    assert copied == plain
    assert llm.stats().counters["partial_hits"] > 0


@pytest.mark.slow
def test_the_default_model_says_the_same() -> None:
    head = "You are a helpful assistant who answers briefly and says so when he does not know. "
    asked = [
        head + "What is the capital of France?",
        head + "What is the capital of Italy, and how large is it?",
        head + "Name three colours.",
        head + "What is the capital of Italy, and who lives there?",
    ]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    said = []
    for partial_reuse in (False, True):
        llm = LLM(
            device="cpu", dtype="float32", num_blocks=64, block_size=32, partial_reuse=partial_reuse
        )
        each = [llm.generate([text], params, use_tqdm=False)[0] for text in asked]
        said.append([item.outputs[0].text for item in each])
        assert (llm.stats().counters["partial_hits"] == 3) is partial_reuse
        cached = [item.num_cached_tokens for item in each]
        assert all(cached[1:]) is partial_reuse
    assert said[0] == said[1]
