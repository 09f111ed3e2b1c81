"""Models with recurrent layers, whole engines: transformers' tokens, in every way the same bits."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from time import monotonic, sleep
from typing import Any

import pytest

from pyengine import LLM, AsyncEngine, RequestOutput, SamplingParams
from pyengine.errors import ConfigurationError, ModelLoadError
from pyengine.executor.executor import Executor
from pyengine.request.cache_hints import NO_HINTS, CacheHints
from tests.support.reference import Reference
from tests.support.without_torch import MISSING, needs_torch
from tests.unit.models.decoder.tiny_models import RECURRENT, Tiny, save, save_without_torch

MAX_TOKENS = 24
GREEDY = SamplingParams(temperature=0, ignore_eos=True, max_tokens=MAX_TOKENS, logprobs=1)
Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The folder of a model, by its name in `RECURRENT`."""
    known: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in known:
            known[name] = tmp_path_factory.mktemp(name)
            tiny = next(tiny for tiny in RECURRENT if tiny.name == name)
            settings = {**tiny.settings, "max_position_embeddings": 1024}
            save_it = save_without_torch if MISSING else save
            save_it(replace(tiny, settings=settings), known[name])
        return known[name]

    return folder


def prompts() -> list[list[int]]:
    """Most share 90 tokens, or all; one diverges in the middle, some are short."""
    rnd = Random(5)
    shared = [rnd.randrange(3, 97) for _ in range(90)]
    tails = [[rnd.randrange(3, 97) for _ in range(n)] for n in (1, 50, 30, 12)]
    return [
        shared + tails[0],
        shared + tails[1],
        [9],
        shared[:70] + tails[2],
        tails[3],
        shared + tails[1],
        shared,
    ]


def engine(folder: Path, **settings: Any) -> LLM:
    defaults: dict[str, Any] = {
        "device": "cpu",
        "block_size": 16,
        "num_blocks": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
    }
    return LLM(folder, **{**defaults, **settings})


def answers(llm: LLM, params: SamplingParams = GREEDY) -> list[RequestOutput]:
    outputs = llm.generate(prompts(), params, use_tqdm=False)
    deadline = monotonic() + 30
    while (usage := llm.stats().usage).pinned and monotonic() < deadline:
        sleep(0.01)  # blocks that are being written to the store are pinned
    assert (usage.active, usage.pinned) == (0, 0)
    return outputs


def bits(outputs: list[RequestOutput]) -> list[Any]:
    """Tokens and log-probabilities, to compare them exactly."""
    return [
        (
            list(part.token_ids),
            [sorted((t, p.logprob) for t, p in of.items()) for of in part.logprobs],
        )
        for output in outputs
        for part in output.outputs
    ]


def cached(outputs: list[RequestOutput]) -> list[int]:
    return [output.num_cached_tokens for output in outputs]


WAYS: dict[str, dict[str, Any]] = {
    "chunks of 8": {"max_num_batched_tokens": 8},
    "chunks of 33": {"max_num_batched_tokens": 33},
    "without a cache": {"enable_prefix_caching": False},
    "overlapping steps": {"async_scheduling": True},
    "blocks of 4": {"block_size": 4, "num_blocks": 1024},
    "few blocks": {"block_size": 4, "num_blocks": 60, "max_num_batched_tokens": 64},
}


@needs_torch
@pytest.mark.parametrize("tiny", RECURRENT, ids=lambda tiny: tiny.name)
def test_tokens_are_those_of_transformers_in_every_way(tiny: Tiny, folder_of: Folders) -> None:
    folder = folder_of(tiny.name)
    reference = Reference(folder, attention="eager", stop="at_length")
    with engine(folder) as llm:
        first, again = answers(llm), answers(llm)
    reference.compare(first, [MAX_TOKENS] * len(first)).assert_same()
    assert bits(again) == bits(first), "hits have other bits than misses"
    assert sum(cached(again)) >= 90 * 4 // 2 and min(cached(again)[:2]) >= 64
    for way, settings in WAYS.items():
        with engine(folder, **settings) as llm:
            for _ in range(2):
                assert bits(answers(llm)) == bits(first), way
            if way == "few blocks":
                several = int(str(llm.describe()["running_states"])) > 2
                assert (llm.stats().num_preemptions > 0) == several
                continue
            assert (llm.stats().counters["cached_tokens"] == 0) == (way == "without a cache")


FEW = ("qwen3_next", "granitemoehybrid", "lfm2", "jamba", "kimi_linear", "falcon_h1")


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "bfloat16"},
        {"kv_cache_dtype": "int8"},
        pytest.param({"attention_backend": "gather"}, marks=needs_torch),
    ],
    ids=str,
)
def test_hits_have_the_same_tokens_with_other_settings(
    name: str, settings: dict[str, Any], folder_of: Folders
) -> None:
    with engine(folder_of(name), **settings) as llm:
        first, again = answers(llm), answers(llm)
    assert [tokens for tokens, _ in bits(again)] == [tokens for tokens, _ in bits(first)]
    assert min(cached(again)[:2]) >= 64
    if settings == {"dtype": "bfloat16"}:
        assert bits(again) == bits(first)


_WIDE = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 1024,
}
WIDE = {
    "qwen3_5_text": {
        "num_hidden_layers": 5,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "head_dim": 16,
    },
    "granitemoehybrid": {
        "mamba_n_heads": 8,
        "mamba_d_state": 16,
        "shared_intermediate_size": 64,
        "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
}


@pytest.mark.parametrize("family", WIDE)
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_hits_have_the_same_bits_with_rounded_weights(
    family: str, quantization: str, tmp_path: Path
) -> None:
    save(Tiny(family, family, {**_WIDE, **WIDE[family]}), tmp_path)
    with engine(tmp_path, quantization=quantization) as llm:
        first, again = answers(llm), answers(llm)
    assert bits(again) == bits(first) and min(cached(again)[:2]) >= 64


@pytest.mark.parametrize("name", FEW)
def test_samples_of_a_prompt_continue_copies_of_its_state(name: str, folder_of: Folders) -> None:
    drawn = SamplingParams(
        temperature=1, seed=3, n=3, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=1
    )
    with engine(folder_of(name), enable_prefix_caching=False, max_num_seqs=3) as llm:
        expected = bits(answers(llm, drawn))
    assert len({str(tokens) for tokens, _ in expected[:3]}) == 3
    for settings in ({}, {"async_scheduling": True}, {"num_blocks": 40, "max_num_seqs": 6}):
        with engine(folder_of(name), **settings) as llm:
            for _ in range(2):
                assert bits(answers(llm, drawn)) == expected, settings


@pytest.fixture
def failing_step(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Let the n-th step fail after it has run: states of its sequences have changed."""
    compute, left = Executor._enqueue, [0]

    def enqueue(self: Executor, work: Callable[[], Any]) -> Any:
        def run() -> Any:
            result = work()
            left[0] -= 1
            if left[0] == 0:
                raise RuntimeError("the device has dropped this step")
            return result

        return compute(self, run)

    monkeypatch.setattr(Executor, "_enqueue", enqueue)
    yield lambda number: left.__setitem__(0, number)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("number", [1, 2, 5, 20])
def test_a_step_that_failed_leaves_no_wrong_state(
    number: int, overlap: bool, folder_of: Folders, failing_step: Callable[[int], None]
) -> None:
    settings = {"async_scheduling": overlap, "max_num_batched_tokens": 64}
    drawn = SamplingParams(
        temperature=1, seed=3, n=2, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=1
    )
    with engine(folder_of("qwen3_next"), **settings) as llm:
        expected = bits(answers(llm, drawn))
    with engine(folder_of("qwen3_next"), **settings) as llm:
        failing_step(number)
        assert bits(answers(llm, drawn)) == expected
        assert bits(answers(llm, drawn)) == expected


def test_a_second_request_computes_a_block_and_the_cadence_at_most(folder_of: Folders) -> None:
    rnd = Random(11)
    with engine(folder_of("lfm2"), num_blocks=4096, block_size=4) as llm:
        for _ in range(60):
            length = rnd.randrange(64, 400)
            shared = [rnd.randrange(3, 97) for _ in range(length)]
            first, second = (
                shared + [token] * rnd.randrange(1, 300) for token in rnd.sample(range(3, 97), 2)
            )
            one = SamplingParams(temperature=0, max_tokens=1)
            llm.generate([first], one, use_tqdm=False)
            [output] = llm.generate([second], one, use_tqdm=False)
            computed = length - output.num_cached_tokens
            assert computed <= 512 + 4
            [output] = llm.generate([[*shared, 2, 2]], one, use_tqdm=False)
            assert length - output.num_cached_tokens <= 64 + 4, "the third one, at a branch point"


@pytest.mark.parametrize("marked", [True, False])
def test_a_state_is_kept_where_a_request_marks_its_prefix(marked: bool, folder_of: Folders) -> None:
    rnd = Random(2)
    shared = [rnd.randrange(3, 97) for _ in range(160)]
    one = SamplingParams(temperature=0, max_tokens=1)
    hints = CacheHints(pins=((160, 60.0),)) if marked else NO_HINTS

    async def cached_tokens() -> int:
        async with AsyncEngine(folder_of("lfm2"), device="cpu", num_blocks=256) as engine:
            for prompt in ([*shared, *[4] * 200], [*shared, 5]):
                request = engine.request(prompt, one, cache_hints=hints)
                async for output in engine.submit([request]):
                    last = output
        return last.num_cached_tokens

    assert asyncio.run(cached_tokens()) == (160 if marked else 0)


def test_explain_says_that_no_state_was_kept(folder_of: Folders) -> None:
    rnd = Random(1)
    shared = [rnd.randrange(3, 97) for _ in range(200)]
    one = SamplingParams(temperature=0, max_tokens=1)
    with engine(folder_of("qwen3_next"), explain_misses=True) as llm:
        llm.generate([shared], one, use_tqdm=False)
        [output] = llm.generate([shared[:100] + [5] * 100], one, use_tqdm=False)
    assert output.cache is not None
    cache = output.cache
    assert (cache.reason, cache.position, cache.cached_to) == ("no_snapshot", 0, 96)
    assert "is cached to token 96, and the last state" in str(cache.hint)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speculation": "ngram"}, "speculation='ngram': .* keep a state"),
        ({"speculation": "suffix"}, "speculation='suffix': .* keep a state"),
        pytest.param({"compile": True}, "compile=True: .* keep a state", marks=needs_torch),
        pytest.param(
            {"tensor_parallel_size": 2},
            "tensor_parallel_size=2: .* keep a state",
            marks=needs_torch,
        ),
    ],
)
def test_settings_that_states_cannot_follow_are_refused_by_name(
    settings: dict[str, Any], message: str, folder_of: Folders
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        engine(folder_of("lfm2"), **settings)


def test_a_model_without_attention_is_refused_by_name(tmp_path: Path) -> None:
    tiny = next(tiny for tiny in RECURRENT if tiny.name == "qwen3_5")
    save(replace(tiny, settings={**tiny.settings, "num_hidden_layers": 3}), tmp_path)
    with pytest.raises(ModelLoadError, match="has no layer with attention"):
        engine(tmp_path)


def test_states_take_half_of_the_memory_at_most(folder_of: Folders) -> None:
    with engine(
        folder_of("qwen3_next"), num_blocks=None, kv_cache_memory=1 << 20, max_num_seqs=500
    ) as llm:
        rows = llm.describe()
        states = int(str(rows["running_states"])) * int(str(rows["state_bytes"]))
        assert states <= 1 << 19 and states + int(str(rows["kv_cache_bytes"])) <= 1 << 20
        assert int(str(rows["running_states"])) < 500
        answers(llm)


@pytest.mark.parametrize("name", FEW)
def test_hits_are_verified(name: str, folder_of: Folders) -> None:
    with engine(folder_of(name), verify_cache_hits=1.0) as llm:
        for _ in range(2):
            answers(llm)
        stats = llm.stats()
    assert stats.verification["verified_blocks"] > 0
    assert stats.verification["different_blocks"] == 0


@pytest.mark.parametrize("name", FEW)
def test_log_probabilities_of_a_prompt_have_the_same_bits_again(
    name: str, folder_of: Folders
) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)

    def logprobs(llm: LLM) -> list[Any]:
        outputs = llm.generate(prompts(), params, use_tqdm=False)
        return [[part and dict(part) for part in output.prompt_logprobs] for output in outputs]

    with engine(folder_of(name)) as llm:
        first = logprobs(llm)
        assert logprobs(llm) == first
    with engine(folder_of(name), enable_prefix_caching=False, max_num_batched_tokens=32) as llm:
        assert logprobs(llm) == first


@pytest.mark.parametrize("name", FEW)
def test_a_new_engine_restores_states_from_disk(
    name: str, folder_of: Folders, tmp_path: Path
) -> None:
    with engine(folder_of(name), kv_cache_dir=tmp_path / "kv") as llm:
        first = answers(llm)
        answers(llm)  # short prompts are stored when they are used again
    with engine(folder_of(name), kv_cache_dir=tmp_path / "kv") as llm:
        restored = answers(llm)
        stats = llm.stats()
    assert bits(restored) == bits(first)
    assert min(cached(restored)[:2]) >= 64
    assert stats.store["restored_tokens"] >= 64
    assert stats.store["failed_loads"] == 0
