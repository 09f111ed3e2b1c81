"""Settings at their extremes with a model behind them: served, or refused in a sentence."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyengine import LLM, SamplingParams
from pyengine.errors import ConfigurationError, ModelLoadError, PyEngineError
from tests.support.checkpoints import save_tiny
from tests.support.tokenizers import save_words
from tests.support.without_torch import needs_torch

HUGE = (2**31 - 1, 10**12, 2**63 - 1)
VALUES: dict[str, tuple[Any, ...]] = {
    "num_blocks": (1, *HUGE),
    "block_size": (1, 7, 65536, *HUGE),
    "kv_cache_memory": (1, 4096, *HUGE),
    "max_num_seqs": (1, *HUGE),
    "max_num_batched_tokens": (256, *HUGE),
    "max_model_len": (2, *HUGE),
    "tensor_parallel_size": (3, 100, *HUGE),
    "num_speculative_tokens": (1, 64, 65, *HUGE),
    "max_num_waiting": (1, *HUGE),
    "event_hash_seed": (0, *HUGE),
    "seed": (-(2**63), 2**64 - 1),
    "dtype": ("float64", "int8", "complex64", "nosuch", "", 5, None, np.int8, 10**5000),
    "device": ("meta", "cuda", "nosuch", "cpu:7", "", 5, None, object(), 10**5000, "\ud800"),
    "attention_backend": ("nosuch", "", "flashinfer", "\ud800", "a" * 10**6),
    "kv_cache_dtype": ("nosuch", "", "fp8", "\ud800"),
    "eviction": ("nosuch", "2q", ""),
    "revision": ("nosuch", "../..", "\ud800"),
    "speculation": ("ngram", "suffix", "mtp"),
    "quantization": ("int8",),
    "load_format": ("nosuch", "", "dummy", 5, None, "\ud800", "a" * 10**6),
}


def answer(folder: Path, **settings: Any) -> list[int]:
    plain: dict[str, Any] = {"device": "cpu", "dtype": "float32"}
    sized = {"num_blocks", "kv_cache_memory"} & settings.keys()
    with LLM(folder, **plain | ({} if sized else {"num_blocks": 64}) | settings) as llm:
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=1)
        (output,) = llm.generate([[3]], params, use_tqdm=False)
        return output.outputs[0].token_ids


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in VALUES.items() for value in values],
    ids=lambda value: (
        str(value)[:20]
        if not isinstance(value, int)
        else f"{value:e}"[:12]
        if value.bit_length() < 80
        else "wide"
    ),
)
def test_a_setting_is_served_or_refused(name: str, value: Any, tiny_folder: Path) -> None:
    try:
        assert len(answer(tiny_folder, **{name: value})) == 1
    except PyEngineError as error:
        assert len(str(error)) < 2000, "a wall of text is no sentence"


DRAFTS = {"speculation": "draft"}


def ask_for_code(folder: Path) -> None:
    """Have a model ask for code in its folder, which would leave a trace."""
    from tests.unit.models.test_remote_code import MODEL_MAP, add_code

    add_code(folder, "config.json", model_type="evil", auto_map=MODEL_MAP)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x"), "model.safetensors"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
        pytest.param(
            ask_for_code,
            "never runs code out of model folders",
            marks=needs_torch,
        ),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "tokenizer"),
    ],
    ids=["no config", "cut", "damaged", "code", "tokenizer"],
)
def test_a_draft_model_is_not_trusted_either(
    damage: Any, words: str, tiny_folder: Path, tmp_path: Path
) -> None:
    save_tiny(tmp_path)
    save_words(tmp_path)
    expected = answer(tiny_folder)
    assert answer(tiny_folder, draft_model=tmp_path, **DRAFTS) == expected
    damage(tmp_path)
    with pytest.raises(ModelLoadError, match=words):
        answer(tiny_folder, draft_model=tmp_path, **DRAFTS)
    assert not (tmp_path / "ran").exists()
    with pytest.raises((ModelLoadError, ConfigurationError)):
        answer(tiny_folder, draft_model="\ud800", **DRAFTS)
