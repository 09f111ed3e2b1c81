"""A whole engine in 8-bit integers: it answers, says so, and refuses what it cannot be."""

from pathlib import Path
from random import Random

import pytest

from pyengine import LLM, RequestOutput, SamplingParams
from pyengine.errors import ConfigurationError
from tests.support.checkpoints import save_random

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(tmp_path_factory.mktemp("llama"), "llama", tie_word_embeddings=True)


def prompts() -> list[list[int]]:
    random = Random(3)
    return [[random.randrange(3, 97) for _ in range(length)] for length in (1, 5, 8, 17, 30)]


def said(output: RequestOutput) -> tuple[object, ...]:
    completion = output.outputs[0]
    return completion.token_ids, completion.logprobs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_answer_is_the_same_alone_and_among_others(folder: Path, dtype: str) -> None:
    llm = LLM(
        folder,
        device="cpu",
        dtype=dtype,
        quantization="int8",
        num_blocks=64,
        enable_prefix_caching=False,
    )
    assert llm.describe()["quantization"] == "int8"
    together = llm.generate(prompts(), GREEDY, use_tqdm=False)
    for prompt, output in zip(prompts(), together, strict=True):
        [alone] = llm.generate([prompt], GREEDY, use_tqdm=False)
        assert said(alone) == said(output)


def test_what_it_is_not_for_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="it runs the model")
    from tests.unit.executor.hand_made import random_model

    random_model("cohere").save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match=r"runs as transformers' module .*not quantised"):
        LLM(tmp_path, device="cpu", quantization="int8", num_blocks=8)
