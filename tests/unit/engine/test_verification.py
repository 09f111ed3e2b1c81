"""Verified cache hits: right KV passes, one wrong block is found and named."""

import gc
import logging
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest

from pyengine.engine import verification
from pyengine.engine.verification import HitVerifier, KeptRecording
from pyengine.kv_cache import replay
from pyengine.sampling_params import SamplingParams
from tests.support.engines import Bench, add_parts, make_bench

PROMPT = list(range(10, 23))
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def verified_bench(share: float = 1.0, num_blocks: int = 64, **settings: object) -> Bench:
    bench = make_bench(num_blocks, **settings)  # type: ignore[arg-type]

    def differences(blocks: Sequence[int], others: Sequence[int], group: int) -> list[float]:
        runner = bench.runner
        return [
            float((runner.block(runner.slots, one) != runner.block(runner.slots, two)).any())
            for one, two in zip(blocks, others, strict=True)
        ]

    verifier = HitVerifier(
        bench.manager,
        bench.processor.request,
        differences,
        share=share,
        tolerance=0.0,
    )
    add_parts(bench.engine, verifier)
    return bench


def verifier_of(bench: Bench) -> HitVerifier:
    (verifier,) = [part for part in bench.engine._parts.all if isinstance(part, HitVerifier)]
    return verifier


def counters(bench: Bench) -> tuple[int, ...]:
    return tuple(bench.engine.stats().verification.values())


def run(bench: Bench, prompt: list[int]) -> None:
    """Run a request, and what it causes."""
    bench.generate([prompt], ONE)
    while bench.engine.has_work:
        bench.engine.step()


def test_right_kv_passes() -> None:
    bench = verified_bench()
    run(bench, PROMPT)
    assert counters(bench) == (0, 0, 0), "nothing was cached"
    run(bench, [*PROMPT, 5])
    assert counters(bench) == (1, 3, 0)
    bench.assert_all_free()


def test_a_wrong_block_is_found_and_named(caplog: pytest.LogCaptureFixture) -> None:
    bench = verified_bench()
    run(bench, PROMPT)
    with bench.manager.match_prefix(PROMPT) as pin:
        wrong = pin.blocks[1]
    bench.runner.block(bench.runner.slots, wrong)[2] = 77
    with caplog.at_level(logging.ERROR):
        run(bench, [*PROMPT, 5])
    assert counters(bench) == (1, 3, 1)
    [record] = caplog.records
    assert f"tokens 4 to 8 of request '0', block {wrong} of layer group 0" in record.getMessage()
    assert "llm.recording(FILE)" in record.getMessage()
    verifier_of(bench).recording = "calls.trace"
    caplog.clear()
    run(bench, [*PROMPT, 6])
    assert "pyengine trace view calls.trace" in caplog.text


def test_a_difference_keeps_a_recording(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    bench = verified_bench()
    verifier = verifier_of(bench)
    assert verifier is not None
    with mock.patch("tempfile.tempdir", str(tmp_path)):
        verifier.kept = KeptRecording(bench.manager)
    path = verifier.kept.path
    assert path.parent.parent == tmp_path and path.parent.stat().st_mode & 0o777 == 0o700
    run(bench, PROMPT)
    with bench.manager.match_prefix(PROMPT) as pin:
        wrong = pin.blocks[1]
    bench.runner.block(bench.runner.slots, wrong)[2] = 77
    with caplog.at_level(logging.ERROR):
        run(bench, [*PROMPT, 5])
        run(bench, [*PROMPT, 6])
    assert [f"pyengine trace view {path}" in each.getMessage() for each in caplog.records] == [
        True,
        True,
    ]
    report = replay(path)
    assert report.is_complete and report.divergence is None
    assert report.stats.computed_tokens > len(PROMPT)
    verifier.kept.remove()
    verifier.kept = None
    gc.collect()
    assert path.exists()


@pytest.mark.parametrize("ends", ["removed", "dropped", "too long"])
def test_without_a_difference_no_file_is_left(
    ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    bench = verified_bench()
    verifier = verifier_of(bench)
    assert verifier is not None
    verifier.kept = KeptRecording(bench.manager)
    assert list(tmp_path.glob("pyengine-verify-*/*"))
    if ends == "too long":
        monkeypatch.setattr(verification, "_MAX_RECORDED_BYTES", -1)
    run(bench, PROMPT)
    run(bench, [*PROMPT, 5])
    if ends == "removed":
        verifier.kept.remove()
    elif ends == "dropped":
        verifier.kept = None
        gc.collect()
    assert list(tmp_path.iterdir()) == []
    assert counters(bench) == (1, 3, 0)


def test_a_share_of_the_hits_is_verified() -> None:
    bench = verified_bench(share=0.25)
    run(bench, PROMPT)
    for token in range(12):
        run(bench, [*PROMPT, token])
    assert counters(bench)[0] == 3


def test_evicted_blocks_are_left_out() -> None:
    bench = verified_bench(num_blocks=16, max_num_seqs=1)
    run(bench, PROMPT)
    others = [[50 + at] * 20 for at in range(4)]
    bench.generate([[*PROMPT, 5], *others], ONE)  # they run before the verification
    while bench.engine.has_work:
        bench.engine.step()
    hits, blocks, different = counters(bench)
    assert hits == 1 and blocks < 3 and different == 0


def test_layer_groups_are_compared_one_by_one() -> None:
    bench = verified_bench(groups=(None, 6))
    run(bench, PROMPT)
    run(bench, [*PROMPT, 5])
    hits, blocks, different = counters(bench)
    assert hits == 1 and blocks > 3 and different == 0


def test_requests_after_a_verification_draw_the_same_tokens() -> None:
    drawn = SamplingParams(temperature=1, max_tokens=8, ignore_eos=True)
    outputs = []
    for share in (0.0, 1.0):
        bench = verified_bench(share=share)
        several = [[*PROMPT, token] for token in range(4)]
        found = [bench.generate([prompt], drawn)[0] for prompt in several]
        outputs.append([output.outputs[0].token_ids for output in found])
    assert outputs[0] == outputs[1]


def test_a_recording_that_another_program_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    bench = verified_bench()
    verifier = verifier_of(bench)
    assert verifier is not None
    verifier.kept = KeptRecording(bench.manager)
    verifier.kept.path.unlink()
    run(bench, PROMPT)
    with bench.manager.match_prefix(PROMPT) as pin:
        bench.runner.block(bench.runner.slots, pin.blocks[1])[2] = 77
    run(bench, [*PROMPT, 5])
    assert "llm.recording(FILE)" in caplog.text
