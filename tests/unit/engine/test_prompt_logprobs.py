"""Prompts that want log-probabilities read the cache, and get what they would get without it."""

from collections.abc import Sequence
from functools import cache
from random import Random
from typing import Any

import pytest

from pyengine.core import RequestOutput, SamplingParams
from pyengine.engine import Prompt
from pyengine.engine.prompt_logprobs import PromptLogprobCache, PromptLogprobs
from pyengine.sampling import TokenLogprobs
from tests.support.engines import Bench, make_bench
from tests.support.fake_runner import Fault

BLOCK = 4


def asked(top: int | None = 1, **params: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0, "max_tokens": 2, "ignore_eos": True, "prompt_logprobs": top, **params}
    )


def computed(prompt: Sequence[int], params: SamplingParams) -> RequestOutput:
    """What an engine gives that has nothing in its cache."""
    (output,) = make_bench(256, BLOCK).generate([list(prompt)], params)
    return output


def same(found: RequestOutput, expected: RequestOutput) -> None:
    assert found.outputs == expected.outputs
    assert found.prompt_logprobs == expected.prompt_logprobs


def work(bench: Bench) -> int:
    return sum(bench.runner.computed)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("budget", [7, 64])
def test_a_second_run_computes_little_and_gives_the_same(depth: int, budget: int) -> None:
    random = Random(budget)
    shots = [random.randrange(90) for _ in range(400)]
    suite = [
        [*shots, *(random.randrange(90) for _ in range(random.randint(1, 9)))] for _ in "abcdefgh"
    ]
    bench = make_bench(1024, BLOCK, depth=depth, max_num_batched_tokens=budget, max_num_seqs=4)
    first = bench.generate(suite, asked(max_tokens=1))
    before = work(bench)
    second = bench.generate(suite, asked(max_tokens=1))
    total = sum(map(len, suite))
    assert work(bench) - before < 0.05 * total
    for one, other, prompt in zip(first, second, suite, strict=True):
        same(one, computed(prompt, asked(max_tokens=1)))
        same(other, one)
        assert other.num_cached_tokens >= len(prompt) - BLOCK
    bench.assert_all_free()


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_of_a_prompt_that_is_known_as_a_whole_its_last_block_is_computed(length: int) -> None:
    prompt = list(range(length))
    bench = make_bench(64, BLOCK)
    bench.generate([prompt], asked())
    (found,) = bench.generate([prompt], asked())
    same(found, computed(prompt, asked()))
    assert found.num_cached_tokens == (length - 1) // BLOCK * BLOCK
    (found,) = bench.generate([[*prompt, 90]], asked())  # its end is no beginning of this one's
    same(found, computed([*prompt, 90], asked()))
    assert found.num_cached_tokens == max(0, length // BLOCK - 1) * BLOCK


def test_those_that_come_later_in_the_same_run_read_what_the_first_computed() -> None:
    shots = list(range(60))
    bench = make_bench(256, BLOCK, max_num_batched_tokens=80)
    bench.submit({"a": [*shots, 1]}, asked())
    bench.engine.step()
    bench.submit({"b": [*shots, 2], "c": [*shots, 3]}, asked())
    done = bench.run()
    for name, last in [("a", 1), ("b", 2), ("c", 3)]:
        same(done[name], computed([*shots, last], asked()))
    assert (done["a"].num_cached_tokens, done["b"].num_cached_tokens) == (0, 56)


@pytest.mark.parametrize("first", [0, 1, 3, None])
@pytest.mark.parametrize("second", [0, 1, 2, -1])
def test_who_reads_what_whom_has_left(first: int | None, second: int) -> None:
    prompt = list(range(50))
    bench = make_bench(256, BLOCK)
    bench.generate([prompt], asked(first))
    (found,) = bench.generate([prompt], asked(second))
    same(found, computed(prompt, asked(second)))
    reads = first is not None and second in (0, 1)
    assert found.num_cached_tokens == (48 if reads else 0)


def test_other_requests_read_the_whole_cache_as_ever() -> None:
    prompt = list(range(50))
    bench = make_bench(256, BLOCK)
    bench.generate([prompt], asked())
    (found,) = bench.generate([prompt], asked(None))
    assert found.num_cached_tokens == 48
    assert found.prompt_logprobs is None


def test_a_prefix_that_was_computed_without_them_is_computed_again_from_there() -> None:
    prompt = list(range(50))
    bench = make_bench(256, BLOCK)
    bench.generate([prompt[:21]], asked())
    bench.generate([prompt], asked(None))  # the blocks of all of it are there
    (found,) = bench.generate([prompt], asked())
    same(found, computed(prompt, asked()))
    assert found.num_cached_tokens == 16


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("groups", [(None,), (None, 6)])
def test_the_counters_have_what_they_read(groups: tuple[int | None, ...], depth: int) -> None:
    shots = list(range(60))
    bench = make_bench(512, BLOCK, groups=groups, depth=depth)
    found = [
        output
        for at in range(6)
        for output in bench.generate([[*shots, 60 + at]], asked(max_tokens=1))
    ]
    cached = sum(one.num_cached_tokens for one in found)
    counters = bench.engine.stats().counters
    assert cached > 5 * 50
    assert counters["cached_tokens"] == cached
    assert counters["prompt_tokens"] == 6 * 61
    assert counters["computed_tokens"] == 6 * 61 - cached == work(bench)
    if groups == (None,):
        assert counters["hit_blocks"] * BLOCK in (cached, cached + 5)  # one token each is replayed
    else:
        assert cached // BLOCK < counters["hit_blocks"] < 2 * cached // BLOCK


def test_the_counters_have_what_a_step_that_was_rolled_back_read_once() -> None:
    prompt = list(range(50))
    bench = make_bench(256, BLOCK)
    bench.generate([prompt], asked(max_tokens=1))
    before = bench.engine.stats().counters
    bench.runner.fault = Fault(len(bench.runner.computed), RuntimeError("by chance"))
    (found,) = bench.generate([prompt], asked(max_tokens=1))
    after = bench.engine.stats().counters
    assert after["cached_tokens"] - before["cached_tokens"] == found.num_cached_tokens >= 45
    assert after["prompt_tokens"] - before["prompt_tokens"] == 50


def test_other_namespaces_are_not_read() -> None:
    prompt = list(range(50))
    bench = make_bench(256, BLOCK)
    for name, salt in [("a", b"x"), ("b", b"y"), ("c", b"x")]:
        state = bench.engine.add_request(name, Prompt(token_ids=prompt, namespace=salt), asked())
        bench.states[name] = state
        found = bench.run()[name]
        same(found, computed(prompt, asked()))
        assert found.num_cached_tokens == (48 if name == "c" else 0)


@pytest.mark.parametrize(("groups", "num_blocks"), [((None,), 14), ((None, 6), 20), ((5,), 9)])
@pytest.mark.parametrize(("depth", "faults"), [(1, False), (2, False), (1, True), (2, True)])
def test_in_a_tiny_pool_nothing_is_ever_taken_for_another(
    depth: int, faults: bool, groups: tuple[int | None, ...], num_blocks: int
) -> None:
    random = Random(depth)
    stems = [[random.randrange(4) for _ in range(14)] for _ in range(3)]
    bench = make_bench(
        num_blocks,
        BLOCK,
        depth=depth,
        groups=groups,
        max_num_batched_tokens=16,
        max_num_seqs=4,
        max_model_len=40,
    )
    kept = bench.engine.intake._prompt_logprobs
    expected: dict[str, RequestOutput] = {}
    num_cached = 0
    for number in range(200):
        stem = random.choice(stems)
        prompt = [
            *stem[: random.randint(1, 14)],
            *(random.randrange(4) for _ in range(random.randint(0, 6))),
        ]
        top = random.choice([None, 0, 1, 1, 2])
        params = asked(top, max_tokens=random.randint(1, 12), n=random.choice([1, 1, 2]))
        name = str(number)
        expected[name] = reference(prompt, params, groups)
        bench.submit({name: prompt}, params)
        if faults and not bench.engine._faults.is_searching and random.random() < 0.1:
            bench.runner.fault = Fault(len(bench.runner.computed) + 1, RuntimeError("by chance"))
        for _ in range(random.choice([0, 1, 3])):
            bench.engine.step()
            bench.manager.check()
        if random.random() < 0.05:
            bench.abort([name])
            del bench.states[name], expected[name]
        assert len(kept) <= bench.manager.num_blocks
    found = bench.run()
    assert found.keys() == expected.keys()
    for name, one in found.items():
        same(one, expected[name])
        num_cached += one.num_cached_tokens if one.prompt_logprobs is not None else 0
    assert num_cached > 30
    assert bench.scheduler.num_preemptions > 0
    assert bench.manager.stats().evicted_blocks > 0
    bench.assert_all_free()


@cache
def without_cache(groups: tuple[int | None, ...]) -> Bench:
    return make_bench(64, BLOCK, groups=groups, max_model_len=40, prefix_caching=False)


def reference(
    prompt: list[int], params: SamplingParams, groups: tuple[int | None, ...]
) -> RequestOutput:
    (output,) = without_cache(groups).generate([prompt], params)
    return output


def entries(tokens: Sequence[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs(token, -token / 8, 2, (9,), (-0.5,)) for token in tokens]


def test_the_cache_keeps_what_was_used_last_and_the_beginnings_of_prompts() -> None:
    kept = PromptLogprobCache(4, 2)
    prompts = [Prompt(token_ids=[at, 1, 2, 3, 4, 5]) for at in (7, 8)]
    for prompt in prompts:
        scores = PromptLogprobs(kept, prompt, 1)
        assert scores.readable_tokens() == 0
        scores.extend(1, entries(prompt.token_ids[1:]))
    assert len(kept) == 4
    assert PromptLogprobs(kept, prompts[0], 1).readable_tokens() == 0  # its first block has gone
    again = PromptLogprobs(kept, prompts[1], 1)
    assert again.readable_tokens() == 4
    assert again.extend(5, entries([5])) == entries([1, 2, 3, 4, 5])
    other = PromptLogprobs(kept, Prompt(token_ids=[8, 1, 2, 4]), 0)
    assert other.readable_tokens() == 0
    assert PromptLogprobs(kept, prompts[1], 2).readable_tokens() == 0


def test_a_position_that_was_computed_before_is_passed_over() -> None:
    kept = PromptLogprobCache(16, 2)
    scores = PromptLogprobs(kept, Prompt(token_ids=[1, 2, 3, 4, 5]), 1)
    assert scores.extend(1, entries([2, 3])) == entries([2, 3])
    assert scores.extend(1, entries([2, 3, 4])) == entries([4])
    assert scores.extend(4, entries([5])) == entries([5])
    assert scores.extend(1, entries([2])) == []
