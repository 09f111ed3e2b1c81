"""Weights that change while requests run: answers are those of an engine with the new weights."""

import os
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from pyengine import LLM, AsyncEngine, RequestOutput, SamplingParams
from pyengine.engine import offloading
from pyengine.errors import (
    EngineAsleepError,
    InvalidRequestError,
    PyEngineError,
    WeightUpdateError,
)
from pyengine.utils.dtypes import Rows
from tests.support.checkpoints import (
    FAMILIES,
    read_weights,
    save_random,
    save_weights,
    write_json,
)
from tests.support.torch_engine import torch_llm
from tests.unit.models.decoder.tiny_models import RECURRENT, save

SETTINGS: dict[str, Any] = {"num_blocks": 256, "block_size": 4}
PARAMS = SamplingParams(temperature=0, ignore_eos=True, max_tokens=12, logprobs=3)
LONG = SamplingParams(temperature=0, ignore_eos=True, max_tokens=150)
MODES = ("finish", "abort", "keep", "recompute")


on_cpu = partial(LLM, device="cpu")


def prompts(count: int, length: int = 21, seed: int = 0) -> list[list[int]]:
    """Some prompts, whose first tokens are the same."""
    random = Random(seed)
    common = [random.randrange(3, 90) for _ in range(length // 2)]
    return [
        common + [random.randrange(3, 90) for _ in range(length - length // 2)]
        for _ in range(count)
    ]


def other_weights(folder: Path, seed: int = 1) -> dict[str, Rows]:
    """The weights of a folder, each matrix changed."""
    random = np.random.default_rng(seed)
    return {
        name: numbers + random.standard_normal(numbers.shape, np.float32) * 0.1 * numbers.std()
        for name, numbers in read_weights(folder).items()
    }


def save_other(folder: Path, weights: dict[str, Rows], target: Path) -> Path:
    """The same model with other weights, in a folder of its own."""
    target.mkdir()
    for name in ("config.json", "generation_config.json"):
        (target / name).write_bytes((folder / name).read_bytes())
    save_weights(target / "model.safetensors", weights, "float32")
    return target


def bits(outputs: list[RequestOutput]) -> list[Any]:
    """Tokens and log-probabilities, to the bit."""
    return [
        (
            output.outputs[0].token_ids,
            [
                {token: entry.logprob.hex() for token, entry in position.items()}
                for position in output.outputs[0].logprobs or ()
            ],
        )
        for output in outputs
    ]


def answers(llm: LLM, params: SamplingParams = PARAMS) -> list[Any]:
    return bits(llm.generate(prompts(4), params, use_tqdm=False))


def of_fresh(
    folder: Path, make: Callable[..., AbstractContextManager[LLM]] = on_cpu, **more: Any
) -> Any:
    with make(folder, **SETTINGS, **more) as llm:
        return answers(llm)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_a_fresh_engine(family: str, tmp_path: Path) -> None:
    folder = save_random(tmp_path / "old", family, **FAMILIES[family])
    weights = other_weights(folder)
    new = save_other(folder, weights, tmp_path / "new")
    before, expected = of_fresh(folder), of_fresh(new)
    assert before != expected
    with on_cpu(folder, **SETTINGS) as llm:
        assert answers(llm) == before
        assert llm.update_weights(weights) == 1
        assert answers(llm) == expected
        assert llm.update_weights(str(folder)) == 2
        assert answers(llm) == before
        named = {name: torch.from_numpy(numbers) for name, numbers in weights.items()}
        assert llm.update_weights(iter(named.items())) == llm.weights_version == 3
        outputs = llm.generate(prompts(4), PARAMS, use_tqdm=False)
        assert bits(outputs) == expected
        assert [output.outputs[0].weights_versions for output in outputs] == [((0, 3),)] * 4
        llm._manager.check()


@pytest.mark.parametrize(
    "make, more",
    [
        (torch_llm, {}),
        (on_cpu, {"quantization": "int8"}),
        (on_cpu, {"quantization": "int4"}),
        (on_cpu, {"dtype": "bfloat16"}),
        (on_cpu, {"linear_backend": "torch"}),
        (on_cpu, {"layer_groups": True}),
        (on_cpu, {"async_scheduling": True}),
    ],
)
def test_with_other_layouts(
    make: Callable[..., AbstractContextManager[LLM]], more: dict[str, Any], tmp_path: Path
) -> None:
    settings = {**FAMILIES["gemma3_text"], "tie_word_embeddings": True}
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    folder = save_random(tmp_path / "old", "gemma3_text", **settings, **sizes)
    weights = other_weights(folder)
    expected = of_fresh(save_other(folder, weights, tmp_path / "new"), make, **more)
    with make(folder, **SETTINGS, **more) as llm:
        before = answers(llm)
        assert before != expected
        llm.update_weights(weights)
        assert answers(llm) == expected
        llm.update_weights(folder)
        assert answers(llm) == before


def test_only_some_weights(tmp_path: Path) -> None:
    """Weights that are not given stay: also those of the fused matrix that a given one is in."""
    folder = save_random(tmp_path / "old", "llama")
    old, new = read_weights(folder), other_weights(folder)
    changed = [name for name in new if "layers.1.self_attn.q_proj" in name or "up_proj" in name]
    weights = {**old, **{name: new[name] for name in changed}}
    expected = of_fresh(save_other(folder, weights, tmp_path / "new"))
    with on_cpu(folder, **SETTINGS) as llm:
        layers = llm._weights._model._decoder._layers
        llm.update_weights({name: new[name] for name in changed if "layers.1." in name})
        assert llm._weights._model._decoder._layers[0] is layers[0]
        llm.update_weights({name: new[name] for name in changed})
        assert answers(llm) == expected
        with pytest.raises(WeightUpdateError, match=r"give model.layers.0.mlp.up_proj.weight too"):
            llm.update_weights({"model.layers.0.mlp.gate_proj.weight": new[changed[0]]})
        assert answers(llm) == expected


@pytest.mark.parametrize("has_head", [False, True])
def test_tied_weights_follow(has_head: bool, tmp_path: Path) -> None:
    folder = save_random(tmp_path / "old", "llama", tie_word_embeddings=True)
    weights = other_weights(folder)
    expected = of_fresh(save_other(folder, weights, tmp_path / "new"))
    if has_head:  # as `state_dict` has it
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    with on_cpu(folder, **SETTINGS) as llm:
        llm.update_weights(weights)
        assert answers(llm) == expected


def test_a_head_that_is_no_longer_the_embedding(tmp_path: Path) -> None:
    folder = save_random(tmp_path / "old", "llama", tie_word_embeddings=True)
    weights = other_weights(folder)
    weights["lm_head.weight"] = 2 * weights["model.embed_tokens.weight"]
    expected = of_fresh(save_other(folder, weights, tmp_path / "new"))
    with on_cpu(folder, **SETTINGS) as llm:
        llm.update_weights(weights)
        assert answers(llm) == expected
    with torch_llm(folder, **SETTINGS) as llm:
        before = answers(llm)
        with pytest.raises(WeightUpdateError, match="the head is the embedding in one of them"):
            llm.update_weights(weights)
        assert answers(llm) == before


class Running:
    """Requests that another thread waits for, once all of them have begun."""

    def __init__(self, llm: LLM, count: int, params: SamplingParams = LONG) -> None:
        self.outputs: list[RequestOutput] = []
        self._thread = threading.Thread(target=self._run, args=(llm, count, params))
        self._thread.start()
        while llm.stats().num_running < count or llm._engine.num_new_tokens < 2 * count:
            pass

    def _run(self, llm: LLM, count: int, params: SamplingParams) -> None:
        self.outputs = llm.generate(prompts(count), params, use_tqdm=False)

    def wait(self) -> list[RequestOutput]:
        self._thread.join()
        return self.outputs


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_requests_that_run(mode: Any, is_ahead: bool, tmp_path: Path) -> None:
    folder = save_random(tmp_path / "old", "llama")
    weights = other_weights(folder)
    new = save_other(folder, weights, tmp_path / "new")
    with on_cpu(new, **SETTINGS) as llm:
        expected = [output.outputs[0].token_ids for output in _greedy(llm)]
    with on_cpu(folder, async_scheduling=is_ahead, **SETTINGS) as llm:
        before = [output.outputs[0].token_ids for output in _greedy(llm)]
        llm._manager.evict_all()
        running = Running(llm, 4)
        llm.update_weights(weights, mode=mode)
        later = _greedy(llm)
        outputs = running.wait()
        assert [output.outputs[0].token_ids for output in later] == expected
        assert all(output.outputs[0].weights_versions == ((0, 1),) for output in later)
        llm._manager.check()
        assert llm.stats().usage.active == 0
    for output, old in zip(outputs, before, strict=True):
        answer = output.outputs[0]
        (first, *rest) = answer.weights_versions
        assert first == (0, 0)
        switch = rest[0][0] if rest else len(answer.token_ids)
        assert answer.token_ids[:switch] == old[:switch]
        if mode == "finish":
            assert not rest and answer.token_ids == old
        elif mode == "abort":
            assert (answer.finish_reason, answer.stop_reason) == ("abort", "weights_changed")
            assert not rest and 0 < len(answer.token_ids) < 150
        else:
            assert len(answer.token_ids) == 150 and answer.finish_reason == "length"
            assert rest == [(switch, 1)] and 0 < switch < 150


def _greedy(llm: LLM) -> list[RequestOutput]:
    return llm.generate(prompts(4), LONG, use_tqdm=False)


def test_recomputed_requests_go_on_as_a_fresh_engine_would(tmp_path: Path) -> None:
    folder = save_random(tmp_path / "old", "llama")
    weights = other_weights(folder)
    with on_cpu(folder, **SETTINGS) as llm:
        running = Running(llm, 4)
        llm.update_weights(weights, mode="recompute")
        outputs = running.wait()
    with on_cpu(save_other(folder, weights, tmp_path / "new"), **SETTINGS) as fresh:
        for output in outputs:
            answer = output.outputs[0]
            switch = answer.weights_versions[1][0]
            prompt = output.prompt_token_ids + answer.token_ids[:switch]
            rest = SamplingParams(temperature=0, ignore_eos=True, max_tokens=150 - switch)
            (again,) = fresh.generate([prompt], rest, use_tqdm=False)
            assert again.outputs[0].token_ids == answer.token_ids[switch:]


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_samples_grammars_and_scores_go_on(mode: Any, tmp_path: Path) -> None:
    """Forks and scored prompts: nothing is lost, and no score of old weights stays."""
    folder = save_random(tmp_path / "old", "llama")
    weights = other_weights(folder)
    new = save_other(folder, weights, tmp_path / "new")
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    several = SamplingParams(n=3, seed=7, ignore_eos=True, max_tokens=100)
    with on_cpu(new, **SETTINGS) as llm:
        expected = llm.generate(prompts(4), scored, use_tqdm=False)
    with on_cpu(folder, **SETTINGS) as llm:
        llm.generate(prompts(4), scored, use_tqdm=False)
        running = Running(llm, 2, several)
        llm.update_weights(weights, mode=mode)
        found = llm.generate(prompts(4), scored, use_tqdm=False)
        for output in running.wait():
            assert [len(sample.token_ids) for sample in output.outputs] == [100] * 3
        for output, other in zip(found, expected, strict=True):
            assert output.prompt_logprobs == other.prompt_logprobs
        llm._manager.check()


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "falcon_h1"])
def test_recurrent_layers(family: str, tmp_path: Path) -> None:
    (tiny,) = [tiny for tiny in RECURRENT if tiny.name == family]
    save(tiny, folder := tmp_path / "old")
    weights = other_weights(folder)
    expected = of_fresh(save_other(folder, weights, tmp_path / "new"))
    with on_cpu(folder, **SETTINGS) as llm:
        running = Running(llm, 4)
        llm.update_weights(weights, mode="keep")
        assert answers(llm) == expected
        running.wait()
        llm._manager.check()


def test_with_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """KV of one version is found again by an engine with these weights, and by no other."""
    monkeypatch.setattr(offloading, "_SHORT", 8)
    folder = save_random(tmp_path / "old", "llama")
    weights = other_weights(folder)
    new = save_other(folder, weights, tmp_path / "new")
    before, expected = of_fresh(folder), of_fresh(new)
    settings = {**SETTINGS, "kv_cache_dir": tmp_path / "kv"}

    def asked(llm: LLM) -> tuple[Any, int]:
        outputs = llm.generate(prompts(4), PARAMS, use_tqdm=False)
        assert llm._offloader is not None
        assert llm._offloader.flush(10)
        return bits(outputs), sum(output.num_restored_tokens for output in outputs)

    with on_cpu(folder, **settings) as llm:
        assert asked(llm) == (before, 0)
        llm.update_weights(weights)
        assert asked(llm) == (expected, 0)
        llm.update_weights(folder)
        again, restored = asked(llm)
        assert again == before and restored > 0
        llm.update_weights(weights)
        again, restored = asked(llm)
        assert again == expected and restored > 0
        llm._manager.check()
    with on_cpu(folder, **settings) as llm:
        again, restored = asked(llm)
        assert again == before and restored > 0
    with on_cpu(new, **settings) as llm:  # the same numbers, of a file: its digest is another
        assert asked(llm)[0] == expected


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[tuple[LLM, Path]]:
    folder = save_random(tmp_path / "model", "llama")
    with on_cpu(folder, **SETTINGS) as llm:
        yield llm, folder


def bad_updates(folder: Path, tmp_path: Path) -> dict[str, tuple[Any, str]]:
    weights = read_weights(folder)
    norm = weights["model.norm.weight"]
    query = "model.layers.0.self_attn.q_proj.weight"
    other = save_random(tmp_path / "other", "llama", hidden_size=32)
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    write_json(pickled / "config.json", {"model_type": "llama"})
    (pickled / "pytorch_model.bin").write_bytes(pickle.dumps(os.getcwd))
    half = save_other(folder, dict(list(weights.items())[:5]), tmp_path / "half")
    return {
        "unknown": ({"model.nrom.weight": norm}, "model.nrom.weight"),
        "beyond": ({"model.layers.9.mlp.up_proj.weight": norm}, "layers.9"),
        "shape": ({query: weights[query][:5]}, "shape"),
        "other base": ({query: np.zeros((32, 32), np.float32)}, "shape"),
        "NaN": ({"model.norm.weight": norm * np.nan}, "NaN or infinity"),
        "integers": ({"model.norm.weight": norm.astype(np.int32)}, "int32"),
        "bits": ({"model.norm.weight": norm.astype(np.uint16)}, "bfloat16"),
        "no tensor": ({"model.norm.weight": [1.0]}, "'list'"),
        "no name": ([(1, norm)], "pairs"),
        "no pairs": ([norm], "pairs"),
        "twice": ([("model.norm.weight", norm), ("norm.weight", norm)], "twice"),
        "nothing": ({}, "no tensors"),
        "no folder": ("/nonexistent/folder", "config.json"),
        "a file": (str(folder / "model.safetensors"), "config.json"),
        "another model": (other, "another model: hidden_size"),
        "a pickle": (pickled, "as pickles"),
        "half": (half, "lack"),
    }


def test_bad_updates_change_nothing(opened: tuple[LLM, Path], tmp_path: Path) -> None:
    llm, folder = opened
    before = answers(llm)
    for name, (weights, message) in bad_updates(folder, tmp_path).items():
        with pytest.raises(WeightUpdateError, match=message):
            llm.update_weights(weights)
        assert answers(llm) == before, name
    assert llm.weights_version == 0
    assert llm.generate(prompts(1), PARAMS, use_tqdm=False)[0].num_cached_tokens > 0


def test_a_mode_that_is_none(opened: tuple[LLM, Path]) -> None:
    llm, folder = opened
    with pytest.raises(InvalidRequestError, match=r"mode='wait': it must be one of finish, abort"):
        llm.update_weights(folder, mode="wait")  # type: ignore[arg-type]
    assert llm.update_weights(folder) == 1  # the refusal holds nothing


def test_two_at_once(opened: tuple[LLM, Path]) -> None:
    llm, folder = opened
    weights = read_weights(folder)
    inside, go_on = threading.Event(), threading.Event()

    def slowly() -> Iterator[tuple[str, Rows]]:
        inside.set()
        go_on.wait(10)
        yield from weights.items()

    versions: list[int] = []
    thread = threading.Thread(target=lambda: versions.append(llm.update_weights(slowly())))
    thread.start()
    inside.wait(10)
    with pytest.raises(WeightUpdateError, match="another update"):
        llm.update_weights(weights)
    before = answers(llm)  # meanwhile requests run
    go_on.set()
    thread.join()
    assert versions == [1] and answers(llm) == before


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_memory_back(level: int, tmp_path: Path) -> None:
    folder = save_random(tmp_path / "model", "llama", hidden_size=512, intermediate_size=4096)
    with on_cpu(folder, num_blocks=4096, block_size=16) as llm:
        before = answers(llm)
        llm._weights._pool.populate()  # type: ignore[union-attr]
        awake = _resident()
        llm.sleep(level)
        assert llm.is_sleeping
        pool = llm._weights._pool.num_bytes  # type: ignore[union-attr]
        weights = (folder / "model.safetensors").stat().st_size if level == 2 else 0
        assert awake - _resident() > 0.9 * (pool + weights)
        with pytest.raises(EngineAsleepError, match="wake it up first"):
            llm.generate(prompts(1), PARAMS, use_tqdm=False)
        with pytest.raises(EngineAsleepError, match="wake_up"):
            llm.update_weights(folder)
        with pytest.raises(EngineAsleepError, match="sleeps already"):
            llm.sleep()
        llm.wake_up()
        assert not llm.is_sleeping
        assert answers(llm) == before
        llm._manager.check()


def _resident() -> int:
    """Bytes of this process in memory."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


@pytest.mark.parametrize("mode", ["finish", "abort", "recompute"])
def test_sleep_while_requests_run(mode: Any, tmp_path: Path) -> None:
    folder = save_random(tmp_path / "model", "llama")
    with on_cpu(folder, **SETTINGS) as llm:
        expected = [output.outputs[0].token_ids for output in _greedy(llm)]
        running = Running(llm, 4)
        llm.sleep(2, mode=mode)
        llm.wake_up()
        for output, old in zip(running.wait(), expected, strict=True):
            answer = output.outputs[0]
            assert answer.token_ids == old[: len(answer.token_ids)]
            assert answer.finish_reason == ("abort" if mode == "abort" else "length")
            assert answer.weights_versions == ((0, 0),)
        llm._manager.check()


def test_waking_up_with_other_weights(opened: tuple[LLM, Path], tmp_path: Path) -> None:
    llm, folder = opened
    weights = other_weights(folder)
    expected = of_fresh(save_other(folder, weights, tmp_path / "new"))
    before = answers(llm)
    llm.sleep(2)
    llm.wake_up(["kv_cache"])
    with pytest.raises(EngineAsleepError, match="without weights"):
        answers(llm)
    with pytest.raises(WeightUpdateError, match="shape"):
        llm.wake_up(weights={"model.norm.weight": np.ones(3, np.float32)})
    llm.wake_up(weights=weights)
    assert answers(llm) == expected and llm.weights_version == 1
    llm.sleep(2)
    with pytest.raises(WeightUpdateError, match="no file has"):
        llm.wake_up()
    llm.wake_up(weights=folder)
    assert answers(llm) == before and llm.weights_version == 2
    with pytest.raises(InvalidRequestError, match="tags="):
        llm.wake_up(["everything"])
    for level in (0, 3, True, "1"):
        with pytest.raises(InvalidRequestError, match="it must be 1 or 2"):
            llm.sleep(level)  # type: ignore[arg-type]


def test_resetting_the_prefix_cache(opened: tuple[LLM, Path]) -> None:
    llm, _ = opened
    before = answers(llm)
    running = Running(llm, 4)
    llm.reset_prefix_cache()
    assert llm._manager.usage().evictable == 0
    (output,) = llm.generate(prompts(1, seed=3), PARAMS, use_tqdm=False)
    assert output.num_cached_tokens == 0
    running.wait()
    assert answers(llm) == before
    llm._manager.check()


def test_pins_end_with_the_weights(opened: tuple[LLM, Path]) -> None:
    llm, folder = opened
    pin = llm.pin(prompts(1)[0])
    assert pin.seconds_left > 0
    llm.update_weights(folder)
    assert pin.seconds_left == 0
    assert llm.stats().usage.active == llm.stats().usage.pinned == 0


async def test_the_async_twin(tmp_path: Path) -> None:
    folder = save_random(tmp_path / "model", "llama")
    weights = other_weights(folder)
    with on_cpu(save_other(folder, weights, tmp_path / "new"), **SETTINGS) as llm:
        expected = [output.outputs[0].token_ids for output in _greedy(llm)]
    async with AsyncEngine(folder, device="cpu", **SETTINGS) as engine:
        stream = engine.generate(prompts(1)[0], LONG)
        await anext(stream)
        assert await engine.update_weights(weights) == engine.weights_version == 1
        async for item in stream:
            last = item
        assert last.finished and len(last.outputs[0].weights_versions) == 2
        async for item in engine.generate(prompts(4)[0], LONG):
            last = item
        assert last.outputs[0].token_ids == expected[0]
        await engine.reset_prefix_cache()
        await engine.sleep(2, mode="finish")
        assert engine.is_sleeping
        with pytest.raises(PyEngineError):
            await anext(engine.generate(prompts(1)[0], LONG))
        await engine.wake_up(weights=weights)
        async for item in engine.generate(prompts(4)[0], LONG):
            last = item
        assert last.outputs[0].token_ids == expected[0]
