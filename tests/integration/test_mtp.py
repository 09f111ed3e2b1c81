"""A model's own heads as drafters: the tokens are those without, and the heads' cache is exact."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

from pyengine import LLM, BlockManager, SamplingParams
from pyengine.core.errors import ConfigurationError, ModelLoadError
from pyengine.engine.heads import HeadDrafter
from pyengine.engine.prompts import Prompt
from pyengine.engine.request import RequestState
from pyengine.speculation import Context, Draft, EveryDraft, Speculator
from tests.integration.test_speculation import ROOMY, VOCAB, answers, same, served
from tests.support.mtp import LAYERS, Reference, save_with_heads
from tests.support.soak import soak_only
from tests.support.tokenizers import save_byte_level
from tests.unit.runner.hand_made import random_model

MODELS = [
    *[("deepseek_v3", 2), ("glm4_moe", 1)],  # latent attention and plain, several layers and one
    *soak_only([("deepseek_v3", 1), ("glm4_moe", 3)]),
]
GREEDY = SamplingParams(temperature=0, ignore_eos=True, max_tokens=20)


@pytest.fixture(scope="module")
def can_run() -> None:
    if not hasattr(MtpModel, "forward_layer"):
        pytest.skip("needs a transformers that runs a single head")


@pytest.fixture(scope="module", params=MODELS, ids=lambda one: f"{one[0]}-{one[1]}")
def made(
    can_run: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """A folder, and the number of heads."""
    family, heads = request.param
    path = tmp_path_factory.mktemp(family)
    save_with_heads(family, path, heads, vocab_size=VOCAB)
    save_byte_level(path, VOCAB)
    return path, heads


def keen(llm: LLM, drafts: int) -> HeadDrafter:
    """Let an engine compute every draft of its heads; returns the drafter."""
    engine = llm._engine
    drafter = HeadDrafter(engine._executor, engine._manager.block_size)
    speculator = Speculator(drafter, EveryDraft(), most=drafts, vocab_size=VOCAB)
    engine.speculate(speculator, drafter)
    return drafter


def mtp(folder: Path, **settings: Any) -> LLM:
    drafts = settings.get("num_speculative_tokens", 1)
    llm = served(folder, speculation="mtp", **{**ROOMY, **settings})
    keen(llm, drafts)
    return llm


def prompts(count: int, seed: int = 1) -> list[list[int]]:
    random = Random(seed)
    return [
        [random.randrange(3, VOCAB) for _ in range(random.randint(1, 25))] for _ in range(count)
    ]


def test_the_tokens_are_those_without(made: Any) -> None:
    folder, heads = made
    plain = answers(served(folder, **ROOMY))
    tight = {"num_blocks": BlockManager(1, 4).blocks_for(64, 48), "block_size": 4}
    uncached = {**tight, "enable_prefix_caching": False}
    for setup, is_ahead, drafts in (
        (ROOMY, False, heads),
        (ROOMY, True, heads + 3),
        (tight, False, heads + 3),
        (tight, True, heads),
        (uncached, True, heads + 3),
    ):
        llm = mtp(folder, **setup, async_scheduling=is_ahead, num_speculative_tokens=drafts)
        same(plain, answers(llm))
        stats = llm.stats()
        drafted = stats.counters["draft_tokens"]
        accepted = stats.counters["accepted_draft_tokens"]
        assert stats.num_drafts > 50 and 0.1 * drafted < accepted < drafted
        assert (stats.num_preemptions > 0) == (setup is not ROOMY)


def test_drafts_are_those_of_transformers(made: Any) -> None:
    """Also behind prefix hits, chunks, rejected drafts and forks."""
    folder, heads = made
    reference = Reference(folder, heads)
    llm = served(folder, **ROOMY, speculation="mtp", max_num_batched_tokens=12)
    assert llm.describe()["num_speculative_tokens"] == heads
    drafter = keen(llm, heads)
    seen: list[tuple[list[int], Sequence[int]]] = []
    propose = drafter.propose

    def noted(contexts: Sequence[Context], most: Sequence[int]) -> list[Draft]:
        drafts = propose(contexts, most)
        for one, count, draft in zip(contexts, most, drafts, strict=True):
            tokens = [*map(int, one.request.prompt_token_ids), *one.token_ids]
            left = 4 - (len(tokens) - 1) % 4
            assert len(draft.tokens) == min(count, left, heads)
            seen.append((tokens, draft.tokens))
        return drafts

    drafter.propose = noted  # type: ignore[method-assign]
    asked = prompts(6)
    params = [GREEDY, SamplingParams(temperature=1, seed=3, n=3, max_tokens=14, ignore_eos=True)]
    llm.generate([*asked, asked[0]], [params[at % 2] for at in range(7)], use_tqdm=False)
    llm.generate([asked[1], [*asked[2], 5, 6], asked[3]], GREEDY, use_tqdm=False)
    assert llm.stats().counters["cached_tokens"] > 0 and len(seen) > 100
    for tokens, drafts in seen:
        assert list(drafts) == reference.drafts(tokens)[: len(drafts)]


def test_tokens_are_those_of_transformers_generate(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, heads = made
    model = Reference(folder, heads).model
    patterns = [rf"model\.layers\.{one}\." for one in range(LAYERS, LAYERS + heads)]
    monkeypatch.setattr(type(model), "_keys_to_ignore_on_load_unexpected", patterns)
    model.generation_config.eos_token_id = None
    llm = mtp(folder, num_speculative_tokens=heads)
    asked = prompts(4)[:3]
    outputs = llm.generate(asked, GREEDY, use_tqdm=False)
    for prompt, output in zip(asked, outputs, strict=True):
        theirs = model.generate(
            torch.tensor([prompt]), use_mtp=True, do_sample=False, max_new_tokens=20
        )
        assert theirs[0, len(prompt) :].tolist() == output.outputs[0].token_ids


def head_cache(llm: LLM, state: RequestState, heads: int) -> list[torch.Tensor]:
    """Keys and values of a request's heads, at all positions that are computed and have some."""
    job, pool = state.samples[0], llm._engine._executor.runner._pool  # type: ignore[attr-defined]
    table = list(job.sequence.block_table)
    return [
        tensor[table].flatten(0, 1)[1 + layer : job.num_computed]
        for layer in range(heads)
        for kept in (pool.keys, pool.values)
        for tensor in [kept[LAYERS + layer]]
    ]


def run_to_middle(llm: LLM, prompt: list[int], stop: int = 12) -> RequestState:
    """Generate until the answer has so many tokens."""
    engine = llm._engine
    state = engine.add_request(str(prompt), Prompt(token_ids=prompt), GREEDY)
    while len(state.samples[0].token_ids) < stop:
        engine.step()
    return state


def test_the_heads_cache_is_the_same_with_and_without_a_hit(made: Any) -> None:
    folder, heads = made
    prompt = prompts(1, seed=5)[0] * 3
    alone = run_to_middle(plain := mtp(folder), prompt)
    expected = head_cache(plain, alone, heads)
    for settings in ({}, {"max_num_batched_tokens": 7}, {"num_speculative_tokens": heads + 2}):
        llm = mtp(folder, **settings)
        llm.generate([prompt[: len(prompt) // 2], prompt], GREEDY, use_tqdm=False)
        cached = llm.stats().counters["cached_tokens"]
        state = run_to_middle(llm, prompt)
        assert llm.stats().counters["cached_tokens"] > cached
        for left, right in zip(expected, head_cache(llm, state, heads), strict=True):
            shared = min(len(left), len(right))
            assert shared >= len(prompt) + 8
            torch.testing.assert_close(left[:shared], right[:shared], atol=1e-4, rtol=1e-3)


def test_a_hit_costs_one_row_a_head_and_never_a_block(made: Any) -> None:
    folder, heads = made
    llm = mtp(folder)
    engine, prompt = llm._engine, list(range(3, 23))  # five blocks of four
    llm.generate([prompt], GREEDY, use_tqdm=False)
    before = llm.stats().usage
    state = engine.add_request("hit", Prompt(token_ids=prompt), GREEDY)
    assert engine.step().num_tokens == heads
    usage = llm.stats().usage
    assert usage.active == 5 and usage.free == before.free
    assert state.num_cached_tokens == len(prompt) - heads
    engine.abort([state])


def test_stale_heads_cost_acceptance_only(made: Any) -> None:
    folder, heads = made
    asked = prompts(8, seed=2)
    plain = served(folder, **ROOMY).generate(asked, GREEDY, use_tqdm=False)
    llm = mtp(folder)
    same(plain, llm.generate(asked, GREEDY, use_tqdm=False))
    pool = llm._engine._executor.runner._pool  # type: ignore[attr-defined]
    for layer in range(LAYERS, LAYERS + heads):
        pool.keys[layer].normal_(std=9)
        pool.values[layer].normal_(std=9)
    same(plain, llm.generate(asked, GREEDY, use_tqdm=False))
    assert llm.stats().counters["cached_tokens"] > 0
    usage = llm.stats().usage
    assert (usage.active, usage.pinned) == (0, 0)


def test_a_model_without_heads_is_refused(tmp_path: Path) -> None:
    random_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match=r"'mtp': .* has no heads .*'ngram'"):
        served(tmp_path, **ROOMY, speculation="mtp")


def test_a_transformers_that_is_too_old_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_with_heads("glm4_moe", tmp_path, 1)
    monkeypatch.delattr(MtpModel, "forward_layer", raising=False)
    with pytest.raises(ConfigurationError, match=r"transformers [\d.]+ cannot run a single head"):
        served(tmp_path, **ROOMY, speculation="mtp")


@pytest.mark.usefixtures("can_run")
def test_heads_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    save_with_heads("glm4_moe", tmp_path, 1)
    path = tmp_path / "model.safetensors"
    whole = load_file(path)
    for spoil, words in SPOILT.items():
        save_file(words[0](dict(whole)), path, metadata={"format": "pt"})
        with pytest.raises((ModelLoadError, ConfigurationError), match=words[1]):
            served(tmp_path, **ROOMY, speculation="mtp")
        assert spoil
    save_file(whole, path, metadata={"format": "pt"})
    served(tmp_path, **ROOMY, speculation="mtp")


def _without(tensors: dict[str, torch.Tensor], part: str) -> dict[str, torch.Tensor]:
    return {name: one for name, one in tensors.items() if part not in name}


SPOILT: dict[str, tuple[Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], str]] = {
    "none": (lambda tensors: _without(tensors, f"layers.{LAYERS}."), "has no heads"),
    "half": (lambda tensors: _without(tensors, "eh_proj"), "eh_proj"),
    "broken": (
        lambda tensors: {
            **tensors,
            f"model.layers.{LAYERS}.enorm.weight": torch.full((64,), torch.nan),
        },
        "NaN or infinity",
    ),
}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"compile": True}, "compile=True does not go together with speculation='mtp'"),
        ({"tensor_parallel_size": 2}, "'mtp' does not go together with tensor_parallel_size=2"),
    ],
)
def test_what_does_not_go_with_heads_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        LLM("nowhere", speculation="mtp", **settings)


RUNNING, DRAFTS, ARRIVALS = 256, 7, 8


def waited(llm: LLM) -> list[int]:
    """Steps of the engine from the arrival of each of a stream of prompts until it is computed,
    beside 256 that run and in a pool without a free block; each other prompt is in the cache."""
    engine, random = llm._engine, Random(4)
    known = [[random.randrange(3, VOCAB) for _ in range(21)] for _ in range(ARRIVALS // 2)]
    for at in range(10_000):
        free = llm.stats().usage.free
        if not free:
            break
        tokens = [3 + at // 200, 3 + at % 200, *([5] * 200)][: 4 * free]
        engine.add_request(f"old {at}", Prompt(token_ids=tokens), replace(GREEDY, max_tokens=1))
        while engine.has_work:
            engine.step()
    running = [
        engine.add_request(f"runs {at}", Prompt(token_ids=[3 + at, 7]), GREEDY)
        for at in range(RUNNING)
    ]
    running += [
        engine.add_request(f"known {at}", Prompt(token_ids=one), replace(GREEDY, max_tokens=1))
        for at, one in enumerate(known)
    ]
    while any(one.first_token_time is None for one in running):
        engine.step()
    assert llm.stats().num_running == RUNNING
    arrived: dict[str, tuple[int, RequestState]] = {}
    steps: dict[str, int] = {}
    for at in range(ARRIVALS + 3):
        if at < ARRIVALS:
            fresh = [random.randrange(3, VOCAB) for _ in range(21)]
            prompt = known[at // 2] if at % 2 else fresh
            params = replace(GREEDY, max_tokens=3)
            arrived[f"new {at}"] = (
                at,
                engine.add_request(f"new {at}", Prompt(token_ids=prompt), params),
            )
        engine.step()
        for name, (came, state) in arrived.items():
            if state.first_token_time is not None:
                steps.setdefault(name, at - came)
    assert llm.stats().num_preemptions == 0
    return [steps[f"new {at}"] for at in range(ARRIVALS)]


@pytest.mark.usefixtures("can_run")
@pytest.mark.parametrize("is_ahead", [False, True])
def test_nobody_starves_beside_heads(tmp_path: Path, is_ahead: bool) -> None:
    """256 sequences with seven drafts each are the whole budget of 2,048 tokens."""
    save_with_heads("deepseek_v3", tmp_path, 1, vocab_size=VOCAB)
    sizes: dict[str, Any] = {
        "num_blocks": RUNNING * 7 + 3 * 7,
        "block_size": 4,
        "max_num_seqs": 2 * RUNNING,
        "max_num_batched_tokens": RUNNING * (1 + DRAFTS),
        "async_scheduling": is_ahead,
    }
    plain = waited(served(tmp_path, **sizes))
    llm = served(tmp_path, **sizes, speculation="mtp", num_speculative_tokens=DRAFTS)
    keen(llm, DRAFTS)
    assert all(ours <= theirs for ours, theirs in zip(waited(llm), plain, strict=True))
    assert llm.stats().counters["draft_tokens"] > 1000
    assert llm.stats().counters["cached_tokens"] > 0
