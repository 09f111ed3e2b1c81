"""The loop over layer groups: each table must lead to its tokens, as far back as it is kept."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyengine.errors import InvalidRequestError
from pyengine.executor.kv_cache_config import longest_sequence
from pyengine.kv_cache import BlockManager
from pyengine.request.prompts import Prompt
from pyengine.sampling.state import sample_seed
from pyengine.sampling_params import SamplingParams
from tests.support.engines import Bench, add_request, make_bench
from tests.support.fake_runner import Fault, continued

WINDOW = 16
GROUPS = {
    "full and sliding": (None, WINDOW),
    "one full, six sliding": (None, *(WINDOW,) * 6),
    "sliding first": (WINDOW, None),
    "all sliding": (WINDOW,),
    "two windows": (5, WINDOW),
    "two full": (None, None, 7),
}


def params(max_tokens: int = 8, **fields: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "ignore_eos": True, **fields}, max_tokens=max_tokens)


def sight(groups: tuple[int | None, ...]) -> int | None:
    """The widest window, which bounds what the model sees."""
    return None if None in groups else max(window for window in groups if window)


def run_and_watch(bench: Bench) -> int:
    """Run to the end; the most blocks that were in use."""
    peak = 0
    while bench.engine.has_work:
        bench.engine.step()
        bench.manager.check()
        peak = max(peak, bench.manager.usage().active)
    return peak


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("budget", [8, 64])
def test_a_long_answer_slides_and_is_the_models(
    groups: tuple[int | None, ...], budget: int
) -> None:
    bench = make_bench(400, 4, max_num_batched_tokens=budget, max_num_seqs=8, groups=groups)
    prompt = list(range(40))
    (output,) = bench.generate([prompt], params(200))
    assert output.outputs[0].token_ids == continued(prompt, 200, sight(groups))
    bench.assert_all_free()


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_a_sequence_never_holds_more_than_it_was_promised(groups: tuple[int | None, ...]) -> None:
    bench = make_bench(400, 4, max_num_batched_tokens=12, max_num_seqs=4, groups=groups)
    bench.submit({"a": list(range(60))}, params(140))
    peak = run_and_watch(bench)
    assert peak <= bench.manager.blocks_for(200, 12)
    sliding = sum(window is not None for window in groups)
    assert peak <= (len(groups) - sliding) * 50 + sliding * (WINDOW + 12 + 8) // 4


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("caching", [True, False])
def test_tight_pools_preempt_and_change_no_token(
    groups: tuple[int | None, ...], caching: bool
) -> None:
    """The pool holds the longest request and little more; short prompts, long answers."""
    bench = make_bench(
        BlockManager(1, 4, groups=groups).blocks_for(80, 8) + len(groups),
        4,
        max_num_batched_tokens=8,
        max_num_seqs=8,
        max_model_len=80,
        groups=groups,
        prefix_caching=caching,
    )
    prompts = [[*range(9), *range(n)] for n in (3, 8, 0, 2, 8, 5)]
    outputs = bench.generate(prompts, params(60))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == continued(prompt, 60, sight(groups))
    assert bench.scheduler.num_preemptions > 0
    assert (sum(output.num_cached_tokens for output in outputs) > 0) == caching
    bench.assert_all_free()


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_a_prompt_sent_again_computes_one_token(groups: tuple[int | None, ...]) -> None:
    bench = make_bench(600, 4, groups=groups)
    prompt = list(range(80))
    bench.generate([prompt], params(1))
    before = sum(bench.runner.computed)
    (output,) = bench.generate([prompt], params(1))
    assert sum(bench.runner.computed) - before == 1
    assert output.num_cached_tokens == 79
    assert output.outputs[0].token_ids == continued(prompt, 1, sight(groups))


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_equal_prompts_of_one_step_are_computed_once(groups: tuple[int | None, ...]) -> None:
    bench = make_bench(600, 4, max_num_batched_tokens=256, max_num_seqs=8, groups=groups)
    prompt = list(range(64))
    outputs = bench.generate([prompt] * 8, params(30))
    assert bench.runner.computed[0] == 64 + 7
    for output in outputs:
        assert output.outputs[0].token_ids == continued(prompt, 30, sight(groups))
    bench.assert_all_free()


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_samples_fork_and_slide_each_on_their_own(groups: tuple[int | None, ...]) -> None:
    bench = make_bench(600, 4, max_num_seqs=8, groups=groups)
    prompt, seeded = list(range(30)), {"temperature": 1, "seed": 5}
    (output,) = bench.generate([prompt], params(50, n=4, **seeded))
    assert sum(bench.runner.computed) == 30 + 4 * 49
    assert len({tuple(each_output.token_ids) for each_output in output.outputs}) == 4
    for index, each_output in enumerate(output.outputs):
        alone = make_bench(600, 4, groups=groups)
        (expected,) = alone.generate(
            [prompt], params(50, temperature=1, seed=sample_seed(5, index))
        )
        assert each_output.token_ids == expected.outputs[0].token_ids
    assert 0 < bench.engine.stats().counters["copied_blocks"] <= 3 * len(groups)
    bench.assert_all_free()


@pytest.mark.parametrize("at", [0, 3, 40])
def test_a_failing_step_changes_no_request(at: int) -> None:
    bench = make_bench(60, 4, max_num_batched_tokens=16, max_num_seqs=8, groups=(None, 6))
    prompts = {"a": list(range(40)), "b": list(range(30, 45)), "c": list(range(40))}
    bench.submit(prompts, params(40))
    bench.runner.fault = Fault(at, RuntimeError("out of memory"))
    done = bench.run()
    assert bench.runner.fault is None
    for name, prompt in prompts.items():
        assert done[name].outputs[0].token_ids == continued(prompt, 40)
    bench.assert_all_free()


@settings(max_examples=150, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 60).map(lambda n: [i % 5 for i in range(n)]), min_size=1),
    groups=st.lists(st.sampled_from([None, 1, 3, 4, 8, 13]), min_size=1, max_size=4).map(tuple),
    spare=st.integers(0, 40),
    block_size=st.sampled_from([1, 2, 4, 8]),
    budget=st.integers(8, 48),
    caching=st.booleans(),
    sharing=st.booleans(),
    n=st.sampled_from([1, 1, 3]),
)
def test_any_batch_gives_the_models_tokens(
    prompts: list[list[int]],
    groups: tuple[int | None, ...],
    spare: int,
    block_size: int,
    budget: int,
    caching: bool,
    sharing: bool,
    n: int,
) -> None:
    bench = make_bench(
        BlockManager(1, block_size, groups=groups).blocks_for(80, budget) + spare,
        block_size,
        max_num_batched_tokens=budget,
        max_num_seqs=8,
        max_model_len=80,
        groups=groups,
        prefix_caching=caching,
        in_flight_sharing=sharing,
    )
    for prompt, output in zip(prompts, bench.generate(prompts, params(20, n=n)), strict=True):
        for each_output in output.outputs:
            assert each_output.token_ids == continued(prompt, 20, sight(groups))
    bench.assert_all_free()


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("max_tokens", [1, 8, 100])
def test_the_longest_sequence_is_the_longest_that_fits(
    groups: tuple[int | None, ...], max_tokens: int
) -> None:
    for num_blocks in (1, 7, 30, 100):
        manager = BlockManager(num_blocks, 4, groups=groups)
        longest = longest_sequence(manager, max_tokens, 500)
        assert longest == 0 or manager.blocks_for(longest, max_tokens) <= num_blocks
        assert longest == 500 or manager.blocks_for(longest + 1, max_tokens) > num_blocks


@pytest.mark.parametrize("groups", [(None, 8), (8, 8), (None, None)])
def test_what_can_never_fit_is_refused_and_what_just_fits_is_served(
    groups: tuple[int | None, ...],
) -> None:
    bench = make_bench(
        24, 4, max_num_batched_tokens=64, max_num_seqs=4, max_model_len=1000, groups=groups
    )
    longest = longest_sequence(bench.manager, 64, 1000)
    with pytest.raises(InvalidRequestError, match=rf"at most {longest - 1} fit .*24 blocks of 4"):
        add_request(bench, "a", Prompt(token_ids=[1] * longest), params())
    prompt = [at % 97 for at in range(longest - 1)]
    (output,) = bench.generate([prompt], params(None))  # type: ignore[arg-type]
    assert output.outputs[0].token_ids == continued(prompt, 1, sight(groups))
    assert bench.scheduler.num_preemptions == 0
