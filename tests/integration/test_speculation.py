"""Real models with drafts: the tokens are those without, whatever is drafted."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pyengine import LLM, BlockManager, RequestOutput, SamplingParams
from pyengine.engine.drafting import Drafting
from pyengine.errors import ConfigurationError
from pyengine.models.source import resolve_source
from pyengine.sampling_params import StructuredOutputs
from pyengine.speculation import draft_model as draft_loading
from pyengine.speculation.draft_model import DraftModel
from pyengine.speculation.drafters import Drafter, NgramDrafter, SuffixDrafter
from tests.support.checkpoints import FAMILIES, read_weights, save_random
from tests.support.drafters import AnswerDrafter, RandomDrafter, speculate
from tests.support.layer_groups import groups_of
from tests.support.soak import soak_only
from tests.support.tokenizers import save_byte_level
from tests.support.without_torch import needs_torch

VOCAB = 300
NAMES = [
    *["llama", "gpt_oss"],  # one layer group, and several with windows and sinks
    *soak_only(["qwen3", "gemma3_text"]),
]
ROOMY: dict[str, Any] = {"num_blocks": 512, "block_size": 4}
SIZES: dict[str, Any] = {"max_num_seqs": 6, "max_num_batched_tokens": 48}


@pytest.fixture(scope="module", params=NAMES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    save_random(path, request.param, **{**FAMILIES[request.param], "vocab_size": VOCAB})
    save_byte_level(path, VOCAB)
    return path


def asked() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts that repeat themselves, and every setting that looks at tokens."""
    random = Random(7)
    shared = [random.randrange(3, 60) for _ in range(12)]
    wishes = [
        {"temperature": 0},
        {"temperature": 0.7, "seed": 1},
        {"temperature": 1, "top_p": 0.6, "seed": 2},
        {"temperature": 0, "repetition_penalty": 1.3},
        {"temperature": 0.5, "seed": 3, "frequency_penalty": 0.5, "presence_penalty": 0.2},
        {"temperature": 0, "stop": ["e", "qu"], "min_tokens": 4},
        {"temperature": 0, "stop_token_ids": [random.randrange(VOCAB) for _ in range(9)]},
        {"temperature": 0.8, "seed": 4, "n": 3, "logprobs": 2},
        {"temperature": 0, "structured_outputs": StructuredOutputs(regex="(abc|abd){6}x")},
        {"temperature": 1, "seed": 5, "structured_outputs": StructuredOutputs(regex="[a-f]{30}")},
        {"temperature": 0, "logit_bias": {9: 4.0}, "bad_words": ["e"], "logprobs": 0},
        {"temperature": 0.3, "seed": 6, "min_p": 0.05, "speculate": False},
    ]
    prompts = [
        [*shared[: random.randint(3, 12)], *[random.randrange(3, 60)] * 4, *shared][:24]
        for _ in wishes
    ]
    common: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True}
    return prompts, [SamplingParams(**{**common, **wish}) for wish in wishes]


def served(folder: Path, **settings: Any) -> LLM:
    return LLM(folder, device="cpu", dtype="float32", **{**SIZES, **settings})


def answers(llm: LLM) -> list[RequestOutput]:
    outputs = llm.generate(*asked(), use_tqdm=False)
    usage = llm.stats().usage
    assert (usage.active, usage.pinned) == (0, 0)
    return outputs


def same(some: list[RequestOutput], others: list[RequestOutput]) -> None:
    for place, (item, other) in enumerate(zip(some, others, strict=True)):
        for a, b in zip(item.outputs, other.outputs, strict=True):
            assert a.token_ids == b.token_ids, place
            assert (a.text, a.finish_reason, a.stop_reason) == (
                b.text,
                b.finish_reason,
                b.stop_reason,
            )
            for left, right in zip(a.logprobs or [], b.logprobs or [], strict=True):
                for token, said in left.items():
                    assert said.logprob == pytest.approx(right[token].logprob, abs=1e-3)


def test_the_tokens_are_those_without(folder: Path) -> None:
    plain = answers(served(folder, **ROOMY))
    right = {
        (tuple(item.prompt_token_ids), each.index): each.token_ids
        for item in plain
        for each in item.outputs
    }
    longest = BlockManager(1, 4, groups=groups_of(folder)).blocks_for(64, 48)
    tight = {"num_blocks": longest, "block_size": 4}
    setups: list[dict[str, Any]] = [
        ROOMY,
        tight,
        {**tight, "enable_prefix_caching": False, "async_scheduling": True},
    ]
    preemptions = {True: 0, False: 0}
    for setup in setups:
        drafters: list[Drafter] = [RandomDrafter(1, VOCAB), AnswerDrafter(right)]
        drafters += [SuffixDrafter()] if setup is tight else [NgramDrafter(shortest=1)]
        for drafter in drafters:
            llm = served(folder, **setup, speculation="ngram", num_speculative_tokens=5)
            speculate(llm._engine, drafter, vocab_size=llm._input_processor.limits.vocab_size)
            same(plain, answers(llm))
            stats = llm.stats()
            assert stats.num_drafts >= (0 if isinstance(drafter, SuffixDrafter) else 10)
            drafted = stats.counters["draft_tokens"]
            accepted = stats.counters["accepted_draft_tokens"]
            preemptions[setup is ROOMY] += stats.num_preemptions
            if isinstance(drafter, AnswerDrafter):
                assert accepted > 0.9 * drafted
            elif isinstance(drafter, RandomDrafter):
                assert accepted < 0.2 * drafted
    assert preemptions[True] == 0 < preemptions[False]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and its first layer as a second model."""
    whole, first = (tmp_path_factory.mktemp(name) for name in ("whole", "first"))
    for path, num_layers in ((whole, 3), (first, 1)):
        save_random(path, "llama", vocab_size=VOCAB, num_hidden_layers=num_layers)
        save_byte_level(path, VOCAB)
    weights, of_first = read_weights(whole), read_weights(first)
    assert all((weights[name] == of_first[name]).all() for name in of_first)
    return whole, first


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_second_model_can_draft(pair: tuple[Path, Path], is_ahead: bool) -> None:
    whole, first = pair
    plain = answers(served(whole, **ROOMY))
    tight: dict[str, Any] = {"num_blocks": BlockManager(1, 4).blocks_for(64, 48), "block_size": 4}
    for setup, drafters in ((ROOMY, (first, whole)), (tight, (first,))):
        for drafts_by in drafters:
            llm = served(
                whole,
                **setup,
                speculation="draft",
                draft_model=drafts_by,
                num_speculative_tokens=5,
                async_scheduling=is_ahead,
            )
            assert llm.describe()["draft_model"] == str(drafts_by)
            drafter = drafter_of(llm)
            speculate(llm._engine, drafter, vocab_size=llm._input_processor.limits.vocab_size)
            same(plain, answers(llm))
            stats = llm.stats()
            drafted = stats.counters["draft_tokens"]
            accepted = stats.counters["accepted_draft_tokens"]
            assert drafted > 50 and llm.stats().num_drafts > 50
            if drafts_by is whole and setup is ROOMY:
                params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=31)
                llm.generate([[5, 6, 7], list(range(3, 12))], params, use_tqdm=False)
                counters = llm.stats().counters
                assert counters["draft_tokens"] - drafted == 50
                assert counters["accepted_draft_tokens"] - accepted == 50
            usage = drafter._manager.usage()
            assert not drafter._sequences and (usage.active, usage.pinned) == (0, 0)
            drafter._manager.check()


def drafting(pair: tuple[Path, Path], **settings: Any) -> tuple[LLM, DraftModel]:
    """An engine whose model drafts by its first layer, and the drafter."""
    whole, first = pair
    llm = served(whole, speculation="draft", draft_model=first, **settings)
    return llm, drafter_of(llm)


def drafter_of(llm: LLM) -> DraftModel:
    (drafting,) = [part for part in llm._engine._parts.all if isinstance(part, Drafting)]
    assert isinstance(drafting._drafter, DraftModel)
    return drafting._drafter


@needs_torch
def test_a_draft_model_is_as_the_model_was_asked_for(pair: tuple[Path, Path]) -> None:
    settings = {"quantization": "int8", "attention_backend": "gather", "block_size": 8}
    llm, drafter = drafting(pair, num_blocks=256, **settings)
    runner: Any = drafter._runner
    assert runner._model._decoder._head.packed.format == "Q8_0"
    assert drafter._manager.block_size == 8
    assert llm.describe()["draft_attention_backend"] == "gather"
    llm, drafter = drafting(pair, num_blocks=256)
    assert llm.describe()["draft_attention_backend"] != "gather"


@pytest.mark.parametrize("settings", [{"kv_cache_memory": 1 << 20}, {}])
def test_both_models_share_the_memory_of_the_pool(
    settings: dict[str, Any], pair: tuple[Path, Path]
) -> None:
    """The pools hold equally many tokens, and together as much as one alone would take."""
    llm, drafter = drafting(pair, block_size=4, **settings)
    alone = served(pair[0], block_size=4, **settings).describe()
    described, (ours, theirs) = llm.describe(), (llm._manager, drafter._manager)
    assert theirs.num_blocks * theirs.block_size == ours.num_blocks * ours.block_size
    both = int(str(described["kv_cache_bytes"])) + int(str(described["draft_kv_cache_bytes"]))
    if settings:
        assert 0.95 * settings["kv_cache_memory"] < both <= settings["kv_cache_memory"]
        assert ours.num_blocks < int(str(alone["num_blocks"]))


def test_a_draft_model_has_a_revision_of_its_own(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def resolve(*args: Any, **settings: Any) -> Any:
        seen.append(settings["revision"])
        return resolve_source(*args, **{**settings, "revision": None})

    monkeypatch.setattr(draft_loading, "resolve_source", resolve)
    drafting(pair, **ROOMY)
    drafting(pair, **ROOMY, draft_revision="v2")
    assert seen == [None, "v2"]


def test_what_a_draft_model_cannot_do_is_said_of_it(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    pytest.importorskip("transformers", reason="it runs the draft model")
    from tests.unit.executor.hand_made import random_model

    random_model("phi", vocab_size=VOCAB).save_pretrained(tmp_path)
    save_byte_level(tmp_path, VOCAB)
    settings: dict[str, Any] = {**ROOMY, "speculation": "draft", "draft_model": tmp_path}
    with pytest.raises(ConfigurationError, match="draft_model: quantization='int8'"):
        served(pair[0], **settings, quantization="int8")


def test_a_draft_model_of_another_vocabulary_is_refused(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    save_random(tmp_path, "llama", vocab_size=VOCAB - 1)
    settings: dict[str, Any] = {**ROOMY, "speculation": "draft", "draft_model": tmp_path}
    with pytest.raises(ConfigurationError, match=f"knows {VOCAB - 1} token ids and .* {VOCAB}"):
        served(pair[0], **settings)
    save_random(tmp_path, "llama", vocab_size=VOCAB)
    save_byte_level(tmp_path, VOCAB)
    path = tmp_path / "tokenizer.json"
    text = json.loads(path.read_text())
    words = text["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    path.write_text(json.dumps(text))
    with pytest.raises(ConfigurationError, match=r"draft_model: '[ab]' is token"):
        served(pair[0], **settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"speculation": "guess"},
            "speculation='guess' is not known: use one of ngram, suffix, mtp,",
        ),
        ({"speculation": "draft"}, "draft_model=None: a second model drafts with"),
        ({"draft_model": "x"}, "speculation=None and draft_model='x'"),
        ({"draft_revision": "x"}, "draft_revision='x' is that of draft_model"),
        ({"speculation": "ngram", "num_speculative_tokens": 0}, "it must be at least 1"),
        ({"speculation": "ngram", "num_speculative_tokens": 10_000}, "it must be at most 64"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        LLM("nowhere", **settings)


def test_a_request_can_do_without(tmp_path: Path) -> None:
    save_random(tmp_path, "llama")
    llm = served(tmp_path, **ROOMY, speculation="ngram")
    assert llm.describe()["speculation"] == "ngram"
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=200)
    speculate(
        llm._engine, NgramDrafter(), vocab_size=llm._input_processor.limits.vocab_size
    )  # also where it gains nothing
    prompt = [5, 6, 7, 5, 6, 7, 5, 6]
    llm.generate([prompt], replace(params, speculate=False), use_tqdm=False)
    assert llm.stats().num_drafts == 0
    llm.generate([prompt], params, use_tqdm=False)
    assert llm.stats().num_drafts > 0
