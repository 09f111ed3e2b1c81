"""Adapters that count from their invocation tokens on share the base model's cache before them."""

from pathlib import Path
from random import Random
from typing import Any

import pytest

from pyengine import LLM, LoRARequest, RequestOutput, SamplingParams
from pyengine.engine import offloading
from tests.support.adapters import save_adapter
from tests.support.checkpoints import save_random

INVOCATION = [7, 8, 9]
SHARED, EIGHT = 2048, 8
GREEDY = SamplingParams(temperature=0, ignore_eos=True, max_tokens=12)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_random(tmp_path / "model", "llama", max_position_embeddings=4096)


def adapters(tmp_path: Path, model: Path, count: int = EIGHT) -> list[LoRARequest]:
    requests = []
    for seed in range(count):
        folder = tmp_path / f"adapter {seed}"
        save_adapter(folder, model, seed=seed, alora_invocation_tokens=INVOCATION)
        requests.append(LoRARequest(f"adapter-{seed}", str(folder)))
    return requests


def prompt(length: int, own: int = 3, seed: int = 0) -> list[int]:
    """`length` tokens, the invocation, and some of its own."""
    random = Random(seed)
    common = [random.randrange(10, 90) for _ in range(length)]
    return common + INVOCATION + [random.randrange(10, 90) for _ in range(own)]


def opened(model: Path, **settings: Any) -> LLM:
    defaults = {"num_blocks": 1024, "block_size": 16, "max_loras": EIGHT, "max_lora_rank": 4}
    return LLM(model, device="cpu", enable_lora=True, **{**defaults, **settings})


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("length", [SHARED, SHARED - 5])
def test_eight_adapters_compute_a_shared_prefix_once(
    length: int, model: Path, tmp_path: Path
) -> None:
    requests, prompts = adapters(tmp_path, model), [prompt(length)] * EIGHT
    with opened(model, enable_prefix_caching=False) as llm:
        expected = tokens_of(llm.generate(prompts, GREEDY, False, lora_request=requests))
    assert len({str(tokens) for tokens in expected}) == EIGHT
    ends = EIGHT * (len(INVOCATION) + 3 + 15)  # each computes the rest of its prompt, and a block
    with opened(model) as llm:
        together = llm.generate(prompts, GREEDY, False, lora_request=requests)
        computed = llm.stats().counters["computed_tokens"] - EIGHT * (GREEDY.max_tokens or 0)
        assert tokens_of(together) == expected
        assert length <= computed <= length + ends
        again = llm.generate(prompts, GREEDY, False, lora_request=requests)
        assert tokens_of(again) == expected
        (base,) = llm.generate(prompts[:1], GREEDY, use_tqdm=False)
        assert base.num_cached_tokens >= length // 16 * 16
        llm._manager.check()


def test_the_base_computes_it_for_all(model: Path, tmp_path: Path) -> None:
    requests = adapters(tmp_path, model, 2)
    with opened(model) as llm:
        (base,) = llm.generate([prompt(100)], GREEDY, use_tqdm=False)
        for request in requests:
            (output,) = llm.generate([prompt(100)], GREEDY, False, lora_request=request)
            assert output.num_cached_tokens == 100  # six blocks, and the part before the switch
            (explained,) = llm.generate([prompt(100)], GREEDY, False, lora_request=request)
            assert explained.num_cached_tokens >= 105
        (again,) = llm.generate([prompt(100)], GREEDY, use_tqdm=False)
    assert tokens_of([again]) == tokens_of([base])


def test_random_prompts_have_the_tokens_that_they_have_without_a_cache(
    model: Path, tmp_path: Path
) -> None:
    """Invocations anywhere, in whole blocks and parts of them, and prompts that lack one."""
    random, requests = Random(1), adapters(tmp_path, model, 3)
    texts: list[list[int]] = []
    for _ in range(60):
        start = random.choice(texts)[: random.randrange(5, 60)] if texts else []
        middle = [random.randrange(10, 90) for _ in range(random.randrange(1, 20))]
        invoked = INVOCATION if random.random() < 0.8 else []
        texts.append(start + middle + invoked + middle[: random.randrange(4)])
    which = [random.choice([None, *requests]) for _ in texts]
    with opened(model, enable_prefix_caching=False) as llm:
        expected = tokens_of(llm.generate(texts, GREEDY, False, lora_request=which))
    for size in (1, 4, 16):
        with opened(model, block_size=size, num_blocks=16_384 // size) as llm:
            for _ in range(2):
                found = llm.generate(texts, GREEDY, False, lora_request=which)
                assert tokens_of(found) == expected
            assert sum(output.num_cached_tokens for output in found) > 0
            llm._manager.check()


def test_a_store_restores_them(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offloading, "_SHORT", 8)
    requests, prompts = adapters(tmp_path, model, 3), [prompt(100, own=40)] * 3
    settings = {"kv_cache_dir": tmp_path / "kv"}
    with opened(model, **settings) as llm:
        expected = tokens_of(llm.generate(prompts, GREEDY, False, lora_request=requests))
        assert llm._offloader is not None and llm._offloader.flush(10)
    with opened(model, **settings) as llm:
        found = llm.generate(prompts, GREEDY, False, lora_request=requests)
        assert tokens_of(found) == expected
        assert sum(output.num_restored_tokens for output in found) > 0
