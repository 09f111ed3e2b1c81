"""The cost of equal prompts, value by value; and the same tokens as for each prompt alone.

The fake runner's logits depend on exactly what the paged cache holds: a block that is shared too
early, or not written, gives other tokens.
"""

from collections.abc import Collection
from dataclasses import replace
from functools import partial

import pytest

from pyengine.request.request import SequenceState
from pyengine.sampling_params import SamplingParams
from pyengine.scheduler.batch import ScheduledStep
from tests.support.engines import GREEDY, Bench, make_bench
from tests.support.fake_runner import FakeRunner, continued
from tests.support.requests import entries_of

BLOCK = 16
DRAWN = SamplingParams(max_tokens=6, ignore_eos=True)


def prompt_of(count: int) -> list[int]:
    return [(position * position + 3 * position) % 97 for position in range(count)]


def counters(bench: Bench) -> dict[str, int]:
    return bench.engine.stats().counters


@pytest.mark.parametrize("sharing", [True, False])
def test_32_equal_prompts_of_512_tokens(sharing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tests.support.engines.FakeRunner", partial(FakeRunner, max_tokens=32 * 512)
    )
    settings = {"max_num_batched_tokens": 32 * 512, "max_num_seqs": 32}
    bench = make_bench(1100, BLOCK, in_flight_sharing=sharing, **settings)
    prompt = prompt_of(512)
    for seed in range(32):  # each draws different tokens
        bench.submit({str(seed): prompt}, replace(DRAWN, seed=seed))
    bench.engine.step()

    assert bench.runner.computed == [512 + 31 if sharing else 32 * 512]
    assert bench.manager.usage().active == 32
    sequences = bench.scheduler._running
    assert len(sequences) == 32
    assert len({tuple(sequence.kv.block_table) for sequence in sequences}) == 1
    assert [bench.manager.refs(block) for block in sequences[0].kv.block_table] == [32] * 32
    seen = counters(bench)
    assert seen["registered_blocks"] == 32
    # memory saved: shared before they were computed, or merged after it
    saved = (seen["in_flight_blocks"], seen["merged_blocks"])
    assert saved == ((31 * 32, 0) if sharing else (0, 31 * 32))
    # prefill saved, apart from it
    assert seen["cached_tokens"] == (31 * 511 if sharing else 0)
    assert seen["prompt_tokens"] == seen["cached_tokens"] + seen["computed_tokens"] == 32 * 512

    together = {name: output.outputs[0].token_ids for name, output in bench.run().items()}
    for seed in range(32):
        alone = make_bench(40, BLOCK, max_num_batched_tokens=512)
        [output] = alone.generate([prompt], replace(DRAWN, seed=seed))
        assert together[str(seed)] == output.outputs[0].token_ids
    assert len({tuple(tokens) for tokens in together.values()}) > 16
    bench.assert_all_free()


def test_a_prompt_of_10_full_blocks_sent_twice() -> None:
    bench = make_bench(16, BLOCK)
    prompt = prompt_of(10 * BLOCK)
    params = replace(GREEDY, max_tokens=1)
    [first] = bench.generate([prompt], params)
    before, usage = counters(bench), bench.manager.usage()
    assert (before["computed_tokens"], before["allocated_blocks"]) == (160, 10)
    assert (usage.free, usage.evictable) == (6, 10)

    [second] = bench.generate([prompt], params)
    after = counters(bench)
    assert bench.runner.computed == [160, 1]
    assert after["computed_tokens"] - before["computed_tokens"] == 1
    assert after["allocated_blocks"] == before["allocated_blocks"]
    assert after["hit_blocks"] - before["hit_blocks"] == 10
    assert (second.num_cached_tokens, bench.manager.usage()) == (159, usage)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids == continued(prompt, 1)


def test_a_second_request_while_the_first_is_half_through() -> None:
    """The first computes 512 tokens a step, and 8 of the budget are left for the second."""
    bench = make_bench(600, BLOCK, max_num_batched_tokens=520)
    planned: dict[str, list[tuple[int, int]]] = {"first": [], "second": []}
    schedule = bench.scheduler.schedule

    def watched(*, ahead: bool, without: Collection[SequenceState]) -> ScheduledStep | None:
        step = schedule(ahead=ahead, without=without)
        for entry in entries_of(step) if step else ():
            planned[entry.sequence.request.request_id].append((entry.num_cached, entry.num_tokens))
        return step

    bench.scheduler.schedule = watched  # type: ignore[method-assign]
    prompt = prompt_of(4096)
    bench.submit({"first": prompt})
    while sum(bench.runner.computed) < 2048:
        bench.engine.step()
    bench.submit({"second": prompt})
    done = bench.run()

    decodes = [(0, 1)] * 7
    assert planned["first"] == [(0, 512)] * 8 + decodes  # (reused, computed) of each step
    assert planned["second"] == [
        (2048 + 512, 8),  # what is there, and what the first computes in the same step
        (0, 8),  # ends on a boundary
        (1024 - 16, 8),  # and reuses there what has come since
        (0, 8),
        (512 - 17, 1),
        *decodes,
    ]
    for output in done.values():
        assert output.outputs[0].token_ids == continued(prompt, 8)
    assert done["second"].num_cached_tokens == 4096 - 4 * 8 - 1
    bench.assert_all_free()
