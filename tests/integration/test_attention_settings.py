"""Settings of attention on a whole engine: the cache's dtype, the block size, a forced backend."""

from pathlib import Path

import pytest

from pyengine import LLM, SamplingParams
from pyengine.errors import ConfigurationError
from tests.unit.models.tiny import save_tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": [5, 6, 7, 8, 9] * 5}, {"prompt_token_ids": [5, 6, 7, 8, 9, 1]}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_model(path)
    return path


def open_llm(folder: Path, **settings: object) -> LLM:
    return LLM(folder, device="cpu", dtype="bfloat16", **settings)  # type: ignore[arg-type]


def test_a_cache_in_8_bit_floats_holds_twice_the_blocks(folder: Path) -> None:
    wide, narrow = (
        open_llm(folder, kv_cache_memory=1 << 20, kv_cache_dtype=dtype) for dtype in ("auto", "fp8")
    )
    about = [llm.describe() for llm in (wide, narrow)]
    assert [item["kv_cache_dtype"] for item in about] == ["bfloat16", "float8_e4m3fn"]
    blocks = [int(str(item["num_blocks"])) + 1 for item in about]
    assert blocks[1] == 2 * blocks[0]
    for llm in (wide, narrow):
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [6, 6]


def test_the_block_size_is_the_backends_unless_it_is_given(folder: Path) -> None:
    sizes = [
        open_llm(folder, num_blocks=8, block_size=size).describe()["block_size"]
        for size in (None, "auto", 8)
    ]
    assert sizes == [16, 16, 8]


def test_every_backend_says_why_it_was_chosen_or_not(folder: Path) -> None:
    verdicts = open_llm(folder, num_blocks=8).describe()["attention_backends"]
    assert isinstance(verdicts, dict)
    assert verdicts["flashinfer"] == "cannot serve: it runs on cuda, the device is cpu"
    assert [name for name, verdict in verdicts.items() if verdict == "chosen"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"attention_backend": "flashinfer"}, "'flashinfer' cannot serve: it runs on cuda"),
        ({"kv_cache_dtype": "fp4"}, "kv_cache_dtype='fp4' is not known"),
        ({"attention_backend": "flex", "kv_cache_dtype": "fp8"}, "cache in float8_e4m3fn"),
        ({"block_size": 0}, "block_size=0"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(
    folder: Path, settings: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        open_llm(folder, num_blocks=8, **settings)
