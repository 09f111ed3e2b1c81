"""`verify_cache_hits` on a model: with products of the Rust kernel, a row has the same bits."""

import logging
import shutil
from pathlib import Path
from time import monotonic, sleep

import pytest

from pyengine import LLM, SamplingParams
from pyengine.errors import ConfigurationError
from tests.support.serving import save_small_model
from tests.support.without_torch import needs_torch

PROMPT = [5 + at % 200 for at in range(70)]
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def verified(llm: LLM, hits: int) -> dict[str, int]:
    """The counters once so many hits were verified."""
    deadline = monotonic() + 60
    while (found := dict(llm.stats().verification))["verified_hits"] < hits:
        assert monotonic() < deadline, found
        sleep(0.01)
    return found


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        ({"dtype": "float32", "linear_backend": "pyengine"}, 0.0),
        pytest.param({"dtype": "float32", "linear_backend": "torch"}, 0.05, marks=needs_torch),
        ({"dtype": "bfloat16", "linear_backend": "pyengine"}, 0.0),
        pytest.param({"dtype": "bfloat16", "linear_backend": "torch"}, 0.05, marks=needs_torch),
        pytest.param({"dtype": "float16"}, 0.05, marks=needs_torch),
    ],
)
def test_hits_are_recomputed(
    settings: dict[str, str], tolerance: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_small_model(tmp_path)
    given = {"device": "cpu", "num_blocks": 64, "block_size": 16, "max_num_batched_tokens": 48}
    with LLM(folder, **given, **settings, max_num_seqs=8, verify_cache_hits=1.0) as llm:  # type: ignore[arg-type]
        verifier = llm._verifier
        assert verifier is not None and verifier.tolerance == tolerance
        llm.generate(PROMPT, ONE, use_tqdm=False)
        llm.generate([*PROMPT, 7, 8], ONE, use_tqdm=False)
        assert verified(llm, 1) == {
            "verified_hits": 1,
            "verified_blocks": 4,
            "different_blocks": 0,
        }
        with llm._manager.match_prefix(PROMPT) as pin:
            other, _, block, _ = pin.blocks
        pool = verifier._differences.__self__  # type: ignore[attr-defined]
        keys, _ = pool.arrays[0]
        keys[block] = keys[other]
        with caplog.at_level(logging.ERROR):
            llm.generate([*PROMPT, 9, 9], ONE, use_tqdm=False)
            assert verified(llm, 2)["different_blocks"] >= 1
        assert f"block {block} of layer group 0" in caplog.text
        assert verifier.kept is not None and str(verifier.kept.path) in caplog.text
    assert verifier.kept.path.exists()
    shutil.rmtree(verifier.kept.path.parent)


def test_a_recording_of_the_caller_takes_the_place_of_its_own(tmp_path: Path) -> None:
    folder = save_small_model(tmp_path / "model")
    with LLM(folder, device="cpu", num_blocks=64, verify_cache_hits=1.0) as llm:
        verifier = llm._verifier
        assert verifier is not None and verifier.kept is not None and verifier.kept.path.exists()
        with llm.recording(tmp_path / "own.kvtrace"):
            llm.generate(PROMPT, ONE, use_tqdm=False)
        assert not verifier.kept.path.exists()
    assert (tmp_path / "own.kvtrace").stat().st_size > 100


def test_a_closed_engine_leaves_no_recording(tmp_path: Path) -> None:
    with LLM(save_small_model(tmp_path), device="cpu", num_blocks=64, verify_cache_hits=1.0) as llm:
        verifier = llm._verifier
        llm.generate(PROMPT, ONE, use_tqdm=False)
    assert verifier is not None and verifier.kept is not None
    assert not verifier.kept.path.parent.exists()


def test_settings() -> None:
    with pytest.raises(ConfigurationError, match=r"verify_cache_hits=2\.0: it must be from 0 to 1"):
        LLM(verify_cache_hits=2)
    with pytest.raises(ConfigurationError, match=r"verify_cache_hits=1\.0 cannot be combined"):
        LLM(verify_cache_hits=1.0, tensor_parallel_size=2)
