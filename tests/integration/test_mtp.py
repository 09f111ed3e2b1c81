"""A model's own MTP layers as drafters: the tokens are those without, and the MTP layers' cache is
exact."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

import numpy as np
import pytest

from pyengine import LLM, BlockManager, SamplingParams
from pyengine.engine.core import Engine
from pyengine.errors import ConfigurationError, ModelLoadError
from pyengine.request.prompts import Prompt
from pyengine.request.request import Request, SequenceState
from pyengine.speculation.drafters import Draft
from pyengine.speculation.mtp import MTPDrafter
from pyengine.utils.dtypes import Rows
from tests.integration.test_speculation import ROOMY, VOCAB, answers, same, served
from tests.support.checkpoints import read_weights, save_random, save_weights
from tests.support.drafters import speculate
from tests.support.engines import add_request
from tests.support.mtp import LAYERS, Reference, save_with_mtp_layers
from tests.support.processes import run_python
from tests.support.soak import soak_only
from tests.support.tokenizers import save_byte_level

MODELS = [
    *[("deepseek_v3", 2), ("glm4_moe", 1)],  # latent attention and plain, several layers and one
    *soak_only([("deepseek_v3", 1), ("glm4_moe", 3)]),
]
_ALONE = """
import sys
from pyengine import LLM, SamplingParams
llm = LLM(sys.argv[1], device="cpu", num_blocks=32, speculation="mtp")
llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=9), use_tqdm=False)
assert "transformers" not in sys.modules, "transformers was imported"
"""
GREEDY = SamplingParams(temperature=0, ignore_eos=True, max_tokens=20)


@pytest.fixture
def can_run() -> None:
    from transformers.modeling_layers import MtpModel

    if not hasattr(MtpModel, "forward_layer"):
        pytest.skip("needs a transformers that runs a single head")


@pytest.fixture(scope="module", params=MODELS, ids=lambda item: f"{item[0]}-{item[1]}")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder, and the number of MTP layers."""
    family, mtp_layers = request.param
    path = tmp_path_factory.mktemp(family)
    save_with_mtp_layers(family, path, mtp_layers, vocab_size=VOCAB)
    save_byte_level(path, VOCAB)
    return path, mtp_layers


def keen(llm: LLM, drafts: int) -> MTPDrafter:
    """Let an engine compute every draft of its MTP layers; returns the drafter."""
    engine = llm._engine
    drafter = MTPDrafter(engine._executor, engine._manager.block_size)
    speculate(engine, drafter, drafts, llm._input_processor.limits.vocab_size)
    return drafter


def mtp(folder: Path, **settings: Any) -> LLM:
    drafts = settings.get("num_speculative_tokens", 1)
    llm = served(folder, speculation="mtp", **{**ROOMY, **settings})
    keen(llm, drafts)
    return llm


def by_hand(llm: LLM) -> Engine:
    """The engine of an `LLM` whose thread has ended: the test runs the steps."""
    llm._engine_loop.close()
    return llm._engine


def prompts(count: int, seed: int = 1) -> list[list[int]]:
    random = Random(seed)
    return [
        [random.randrange(3, VOCAB) for _ in range(random.randint(1, 25))] for _ in range(count)
    ]


def test_the_tokens_are_those_without(made: Any) -> None:
    folder, mtp_layers = made
    plain = answers(served(folder, **ROOMY))
    tight = {"num_blocks": BlockManager(1, 4).blocks_for(64, 48), "block_size": 4}
    uncached = {**tight, "enable_prefix_caching": False}
    for setup, is_ahead, drafts in (
        (ROOMY, True, mtp_layers + 3),
        (tight, False, mtp_layers),
        (uncached, True, mtp_layers + 3),
    ):
        llm = mtp(folder, **setup, async_scheduling=is_ahead, num_speculative_tokens=drafts)
        same(plain, answers(llm))
        stats = llm.stats()
        drafted = stats.counters["draft_tokens"]
        accepted = stats.counters["accepted_draft_tokens"]
        assert stats.num_drafts > 50 and 0.1 * drafted < accepted < drafted
        assert (stats.num_preemptions > 0) == (setup is not ROOMY)


@pytest.mark.usefixtures("can_run")
def test_drafts_are_those_of_transformers(made: Any) -> None:
    """Also behind prefix hits, chunks, rejected drafts and forks."""
    folder, mtp_layers = made
    reference = Reference(folder, mtp_layers)
    llm = served(folder, **ROOMY, speculation="mtp", max_num_batched_tokens=12)
    assert llm.describe()["num_speculative_tokens"] == mtp_layers
    drafter = keen(llm, mtp_layers)
    seen: list[tuple[list[int], Sequence[int]]] = []
    propose = drafter.propose

    def noted(contexts: Sequence[SequenceState], most: Sequence[int]) -> list[Draft]:
        drafts = propose(contexts, most)
        for context, count, draft in zip(contexts, most, drafts, strict=True):
            tokens = [*map(int, context.request.prompt_token_ids), *context.token_ids]
            left = 4 - (len(tokens) - 1) % 4
            assert len(draft.tokens) == min(count, left, mtp_layers)
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


@pytest.mark.usefixtures("can_run")
def test_tokens_are_those_of_transformers_generate(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    folder, mtp_layers = made
    model = Reference(folder, mtp_layers).model
    patterns = [rf"model\.layers\.{index}\." for index in range(LAYERS, LAYERS + mtp_layers)]
    monkeypatch.setattr(type(model), "_keys_to_ignore_on_load_unexpected", patterns)
    model.generation_config.eos_token_id = None
    llm = mtp(folder, num_speculative_tokens=mtp_layers)
    asked = prompts(4)[:3]
    outputs = llm.generate(asked, GREEDY, use_tqdm=False)
    for prompt, output in zip(asked, outputs, strict=True):
        theirs = model.generate(
            torch.tensor([prompt]), use_mtp=True, do_sample=False, max_new_tokens=20
        )
        assert theirs[0, len(prompt) :].tolist() == output.outputs[0].token_ids


def mtp_cache(llm: LLM, request: Request, mtp_layers: int) -> list[Rows]:
    """Keys and values of a request's MTP layers, at all positions that are computed and have
    some."""
    sequence, pool = request.sequences[0], llm._engine._executor.runner.pool  # type: ignore[attr-defined]
    table = list(sequence.kv.block_table)
    return [
        kept[table].reshape(-1, *kept.shape[2:])[1 + layer : sequence.num_computed]
        for layer in range(mtp_layers)
        for kept in pool.arrays[LAYERS + layer]
    ]


def run_to_middle(llm: LLM, prompt: list[int], stop: int = 12) -> Request:
    """Generate until the answer has so many tokens."""
    engine = by_hand(llm)
    request = add_request(llm, str(prompt), Prompt(token_ids=prompt), GREEDY)
    while len(request.sequences[0].token_ids) < stop:
        engine.step()
    return request


def test_the_heads_cache_is_the_same_with_and_without_a_hit(made: Any) -> None:
    folder, mtp_layers = made
    prompt = prompts(1, seed=5)[0] * 3
    alone = run_to_middle(plain := mtp(folder), prompt)
    expected = mtp_cache(plain, alone, mtp_layers)
    for settings in ({}, {"max_num_batched_tokens": 7}, {"num_speculative_tokens": mtp_layers + 2}):
        llm = mtp(folder, **settings)
        llm.generate([prompt[: len(prompt) // 2], prompt], GREEDY, use_tqdm=False)
        cached = llm.stats().counters["cached_tokens"]
        request = run_to_middle(llm, prompt)
        assert llm.stats().counters["cached_tokens"] > cached
        for left, right in zip(expected, mtp_cache(llm, request, mtp_layers), strict=True):
            shared = min(len(left), len(right))
            assert shared >= len(prompt) + 8
            np.testing.assert_allclose(left[:shared], right[:shared], atol=1e-4, rtol=1e-3)


def test_a_hit_costs_one_row_a_head_and_never_a_block(made: Any) -> None:
    folder, mtp_layers = made
    llm = mtp(folder)
    prompt = list(range(3, 23))  # five blocks of four
    llm.generate([prompt], GREEDY, use_tqdm=False)
    engine = by_hand(llm)
    before = llm.stats().usage
    request = add_request(llm, "hit", Prompt(token_ids=prompt), GREEDY)
    assert engine.step().num_tokens == mtp_layers
    usage = llm.stats().usage
    assert usage.active == 5 and usage.free == before.free
    assert request.progress.num_cached_tokens == len(prompt) - mtp_layers
    engine.abort([request])


def test_stale_heads_cost_acceptance_only(made: Any) -> None:
    folder, mtp_layers = made
    asked = prompts(8, seed=2)
    plain = served(folder, **ROOMY).generate(asked, GREEDY, use_tqdm=False)
    llm = mtp(folder)
    same(plain, llm.generate(asked, GREEDY, use_tqdm=False))
    pool = llm._engine._executor.runner.pool  # type: ignore[attr-defined]
    random = np.random.default_rng(0)
    for layer in range(LAYERS, LAYERS + mtp_layers):
        for kept in pool.arrays[layer]:
            kept[:] = 9 * random.standard_normal(kept.shape)
    same(plain, llm.generate(asked, GREEDY, use_tqdm=False))
    assert llm.stats().counters["cached_tokens"] > 0
    usage = llm.stats().usage
    assert (usage.active, usage.pinned) == (0, 0)


def test_a_model_without_heads_is_refused(tmp_path: Path) -> None:
    save_random(tmp_path, "llama")
    with pytest.raises(ConfigurationError, match=r"'mtp': .* has no MTP layers.*'ngram'"):
        served(tmp_path, **ROOMY, speculation="mtp")


def test_a_model_without_a_decoder_of_ours_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="it runs the model")
    from tests.unit.executor.hand_made import random_model

    random_model("opt", num_attention_heads=4).save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match=r"'mtp': .* transformers' module .*'ngram'"):
        served(tmp_path, **ROOMY, speculation="mtp")


def test_mtp_layers_need_no_transformers(tmp_path: Path) -> None:
    save_with_mtp_layers("glm4_moe", tmp_path, 1)
    run_python(_ALONE, tmp_path)


def test_heads_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    save_with_mtp_layers("glm4_moe", tmp_path, 1)
    path = tmp_path / "model.safetensors"
    whole = read_weights(tmp_path)
    for spoil, words in SPOILT.items():
        save_weights(path, words[0](dict(whole)))
        with pytest.raises((ModelLoadError, ConfigurationError), match=words[1]):
            served(tmp_path, **ROOMY, speculation="mtp")
        assert spoil
    save_weights(path, whole)
    served(tmp_path, **ROOMY, speculation="mtp")


Tensors: TypeAlias = dict[str, Rows]


def _without(tensors: Tensors, part: str) -> Tensors:
    return {name: item for name, item in tensors.items() if part not in name}


SPOILT: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "none": (lambda tensors: _without(tensors, f"layers.{LAYERS}."), "has no MTP layers"),
    "half": (lambda tensors: _without(tensors, "eh_proj"), "eh_proj"),
    "broken": (
        lambda tensors: {
            **tensors,
            f"model.layers.{LAYERS}.enorm.weight": np.full(64, np.nan, np.float32),
        },
        "NaN or infinity",
    ),
}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"compile": True}, "compile=True cannot be combined with speculation='mtp'"),
        ({"tensor_parallel_size": 2}, "'mtp' cannot be combined with tensor_parallel_size=2"),
    ],
)
def test_what_does_not_go_with_heads_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        LLM("nowhere", speculation="mtp", **settings)


RUNNING, DRAFTS, ARRIVALS = 256, 7, 8


def waited(llm: LLM) -> list[int]:
    """Steps of the engine from the arrival of each of a stream of prompts until it is computed,
    beside 256 that run and in a pool without a free block; each other prompt is in the cache."""
    engine, random = by_hand(llm), Random(4)
    known = [[random.randrange(3, VOCAB) for _ in range(21)] for _ in range(ARRIVALS // 2)]
    for at in range(10_000):
        free = llm.stats().usage.free
        if not free:
            break
        tokens = [3 + at // 200, 3 + at % 200, *([5] * 200)][: 4 * free]
        add_request(llm, f"old {at}", Prompt(token_ids=tokens), replace(GREEDY, max_tokens=1))
        while engine.has_work:
            engine.step()
    running = [
        add_request(llm, f"runs {at}", Prompt(token_ids=[3 + at, 7]), GREEDY)
        for at in range(RUNNING)
    ]
    running += [
        add_request(llm, f"known {at}", Prompt(token_ids=entry), replace(GREEDY, max_tokens=1))
        for at, entry in enumerate(known)
    ]
    while any(sequence.first_token_time is None for sequence in running):
        engine.step()
    assert llm.stats().num_running == RUNNING
    arrived: dict[str, tuple[int, Request]] = {}
    steps: dict[str, int] = {}
    for at in range(ARRIVALS + 3):
        if at < ARRIVALS:
            fresh = [random.randrange(3, VOCAB) for _ in range(21)]
            prompt = known[at // 2] if at % 2 else fresh
            params = replace(GREEDY, max_tokens=3)
            arrived[f"new {at}"] = (
                at,
                add_request(llm, f"new {at}", Prompt(token_ids=prompt), params),
            )
        engine.step()
        for name, (came, request) in arrived.items():
            if request.result.first_token_time is not None:
                steps.setdefault(name, at - came)
    assert llm.stats().num_preemptions == 0
    return [steps[f"new {at}"] for at in range(ARRIVALS)]


@pytest.mark.parametrize("is_ahead", [False, True])
def test_nobody_starves_beside_heads(tmp_path: Path, is_ahead: bool) -> None:
    """256 sequences with seven drafts each are the whole budget of 2,048 tokens."""
    save_with_mtp_layers("deepseek_v3", tmp_path, 1, vocab_size=VOCAB)
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
