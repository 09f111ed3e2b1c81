"""Prompts that want log-probabilities read the cache, and get what they would get without it."""

from collections.abc import Sequence
from functools import cache
from random import Random
from typing import Any

import pytest

from pyengine.engine import input_processor
from pyengine.executor.model_runner import StepLogits
from pyengine.outputs import RequestOutput
from pyengine.request.prompt_entries import PromptEntryCache
from pyengine.request.prompt_logprobs import PromptLogprobs
from pyengine.request.prompts import Prompt
from pyengine.sampling.logprobs import TokenLogprobs
from pyengine.sampling_params import SamplingParams
from tests.support.engines import Bench, add_request, make_bench
from tests.support.fake_runner import VOCAB_SIZE, Fault

BLOCK = 4


def asked(top: int | None = 1, **params: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0, "max_tokens": 2, "ignore_eos": True, "prompt_logprobs": top, **params}
    )


def computed(prompt: Sequence[int], params: SamplingParams) -> RequestOutput:
    """The output of an engine with an empty cache."""
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
    for item, other, prompt in zip(first, second, suite, strict=True):
        same(item, computed(prompt, asked(max_tokens=1)))
        same(other, item)
        assert other.num_cached_tokens >= len(prompt) - BLOCK
    bench.assert_all_free()


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_of_a_prompt_that_is_known_one_token_is_computed_behind_its_blocks(length: int) -> None:
    prompt = list(range(length))
    bench = make_bench(64, BLOCK)
    bench.generate([prompt], asked())
    (found,) = bench.generate([prompt], asked())
    same(found, computed(prompt, asked()))
    assert found.num_cached_tokens == min(length // BLOCK * BLOCK, length - 1)
    (found,) = bench.generate([[*prompt, 90]], asked())  # its end is no beginning of this one's
    same(found, computed([*prompt, 90], asked()))
    assert found.num_cached_tokens == max(0, length // BLOCK * BLOCK - 1)


def test_those_that_come_later_in_the_same_run_read_what_the_first_computed() -> None:
    shots = list(range(60))
    bench = make_bench(256, BLOCK, max_num_batched_tokens=80)
    bench.submit({"a": [*shots, 1]}, asked())
    bench.engine.step()
    bench.submit({"b": [*shots, 2], "c": [*shots, 3]}, asked())
    done = bench.run()
    for name, last in [("a", 1), ("b", 2), ("c", 3)]:
        same(done[name], computed([*shots, last], asked()))
    assert (done["a"].num_cached_tokens, done["b"].num_cached_tokens) == (0, 59)


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
    assert found.num_cached_tokens == 19


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
    cached = sum(match.num_cached_tokens for match in found)
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


@pytest.mark.parametrize("groups", [(None,), (None, 6), (5,)])
def test_what_is_known_and_has_lost_its_keys_and_values_is_computed(
    groups: tuple[int | None, ...],
) -> None:
    """From where the keys and values end; the log-probability there is known."""
    prompt = list(range(40))
    bench = make_bench(16 * len(groups), BLOCK, groups=groups)
    bench.generate([prompt[:-1]], asked(max_tokens=1))
    kept = bench.processor._prompt_logprobs
    assert len(kept) == 10
    bench.generate([[90 - at for at in range(30)]], asked(None))  # takes blocks from the end
    (found,) = bench.generate([prompt], asked(max_tokens=1))
    same(found, computed_with(groups, prompt, asked(max_tokens=1)))
    if groups == (None,):
        assert 0 < found.num_cached_tokens < 35
        assert found.num_cached_tokens % BLOCK == 0
    bench.assert_all_free()


def computed_with(
    groups: tuple[int | None, ...], prompt: list[int], params: SamplingParams
) -> RequestOutput:
    (output,) = make_bench(64, BLOCK, groups=groups, prefix_caching=False).generate(
        [prompt], params
    )
    return output


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("groups", [(None,), (None, 6), (5,)])
@pytest.mark.parametrize("budget", [16, 256])
@pytest.mark.parametrize("length", [39, 40, 41])
def test_equal_prompts_that_are_queued_together_are_computed_once(
    length: int, budget: int, groups: tuple[int | None, ...], depth: int
) -> None:
    prompt = [at % 97 for at in range(length)]
    bench = make_bench(
        512, BLOCK, groups=groups, depth=depth, max_num_batched_tokens=budget, max_num_seqs=8
    )
    found = bench.generate([prompt] * 8, asked(max_tokens=1))
    expected = computed_with(groups, prompt, asked(max_tokens=1))
    for match in found:
        same(match, expected)
    assert work(bench) == length + 7 * max(1, length % BLOCK)
    bench.assert_all_free()


@pytest.mark.parametrize("depth", [1, 2])
def test_prompts_of_the_same_beginning_wait_for_the_first_and_for_nothing_else(depth: int) -> None:
    shots, others = list(range(40)), [[50 + at] * 9 for at in range(3)]
    bench = make_bench(512, BLOCK, depth=depth, max_num_batched_tokens=64, max_num_seqs=16)
    suite = [[*shots, 60 + at, 70 + at] for at in range(6)]
    prompts = [*suite[:3], *others, *suite[3:]]
    bench.submit({str(at): prompt for at, prompt in enumerate(prompts)}, asked(max_tokens=1))
    bench.engine.step()
    # The first one, and others while they fit; a chunk ends with a block.
    assert bench.runner.computed[0] == 42 + 9 + 9 + 4
    found = bench.run()
    for at, prompt in enumerate(prompts):
        same(found[str(at)], computed(prompt, asked(max_tokens=1)))
    assert work(bench) == 42 + 5 * 3 + 3 * 9
    bench.assert_all_free()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("how", ["abort", "fail", "by chance"])
def test_if_the_one_that_computes_for_others_goes_the_next_one_does(how: str, depth: int) -> None:
    prompt = list(range(40))
    bench = make_bench(512, BLOCK, depth=depth, max_num_batched_tokens=16, max_num_seqs=8)
    bench.submit(dict.fromkeys("abc", prompt), asked(max_tokens=1))
    bench.engine.step()
    if how == "abort":
        bench.abort(["a"])
    elif how == "fail":
        bench.engine._fail(bench.requests["a"], ValueError("by hand"))
    else:
        bench.runner.fault = Fault(len(bench.runner.computed), RuntimeError("by chance"))
    if how != "by chance":
        del bench.requests["a"]
    done = bench.run()
    assert len(done) == (3 if how == "by chance" else 2)
    for item in done.values():
        same(item, computed(prompt, asked(max_tokens=1)))
    assert work(bench) <= 40 + 16 * depth + 2
    kept = bench.processor._prompt_logprobs
    assert not kept.pending  # nothing is kept of requests that are gone
    bench.assert_all_free()


def test_requests_that_cannot_read_wait_for_no_other() -> None:
    prompt = list(range(40))
    bench = make_bench(512, BLOCK, max_num_batched_tokens=256)
    bench.submit({"a": prompt}, asked(1))
    bench.submit({"b": prompt}, asked(2))  # more than is kept
    bench.submit({"c": prompt}, asked(None))
    add_request(bench, "d", Prompt(token_ids=prompt, namespace=b"other"), asked(1))
    bench.engine.step()
    assert bench.scheduler.num_waiting == 0


def test_without_a_cache_equal_prompts_run_at_once() -> None:
    bench = make_bench(512, BLOCK, max_num_batched_tokens=256, prefix_caching=False)
    prompt = list(range(40))
    bench.submit({"a": prompt, "b": prompt, "c": prompt}, asked(1))
    bench.engine.step()
    assert bench.runner.computed == [120]


def test_many_that_wait_for_one_cost_a_step_little() -> None:
    bench = make_bench(512, BLOCK, max_num_batched_tokens=8, max_num_seqs=8)
    prompt, asks = list(range(64)), [0]
    bench.submit({str(at): prompt for at in range(500)}, asked(max_tokens=1))
    awaits = PromptLogprobs.awaits_prefix

    def counted(scores: PromptLogprobs) -> bool:
        asks[0] += 1
        return awaits(scores)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PromptLogprobs, "awaits_prefix", counted)
        for _ in range(4):
            asks[0] = 0
            bench.engine.step()
            assert 0 < asks[0] <= 66


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_requests", [1, 5])
def test_a_step_has_no_more_logits_of_prompts_than_the_cap(
    num_requests: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many prompts it computes, and whatever else is in it."""
    monkeypatch.setattr(input_processor, "_PROMPT_LOGITS", 20 * VOCAB_SIZE)
    bench = make_bench(512, BLOCK, depth=depth, max_num_batched_tokens=256, max_num_seqs=16)
    seen: list[int] = []
    run = bench.runner.run

    def counted(sizes: Any, copies: Any, sampled: Any, extra_rows: Any) -> StepLogits:
        seen.append(0 if extra_rows is None else len(extra_rows))
        return run(sizes, copies, sampled, extra_rows)

    bench.runner.run = counted  # type: ignore[method-assign]
    prompts = [[at * 7 % 97, *range(at, at + 50)] for at in range(num_requests)]
    bench.submit({str(at): prompt for at, prompt in enumerate(prompts)}, asked(0))
    plain = [[90 - at, *range(30)] for at in range(3)]
    bench.submit({f"plain {at}": prompt for at, prompt in enumerate(plain)}, asked(None))
    bench.engine.step()
    bench.engine.step()
    requests = bench.requests
    assert all(requests[f"plain {at}"].result.first_token_time is not None for at in range(3))
    done = bench.run()
    assert max(seen) <= 20
    assert sum(seen) == num_requests * 50
    assert len([item for item in seen if item]) <= num_requests * 50 / 20 + num_requests + 1
    for at, prompt in enumerate(prompts):
        same(done[str(at)], computed(prompt, asked(0)))
    bench.assert_all_free()


def test_other_namespaces_are_not_read() -> None:
    prompt = list(range(50))
    bench = make_bench(256, BLOCK)
    for name, salt in [("a", b"x"), ("b", b"y"), ("c", b"x")]:
        request = add_request(bench, name, Prompt(token_ids=prompt, namespace=salt), asked())
        bench.requests[name] = request
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
    kept = bench.processor._prompt_logprobs
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
        if faults and not bench.engine.recovery.faults.suspects and random.random() < 0.1:
            bench.runner.fault = Fault(len(bench.runner.computed) + 1, RuntimeError("by chance"))
        for _ in range(random.choice([0, 1, 3])):
            bench.engine.step()
            bench.manager.check()
        if random.random() < 0.05:
            bench.abort([name])
            del bench.requests[name], expected[name]
        assert len(kept) <= bench.manager.num_blocks
    found = bench.run()
    assert found.keys() == expected.keys()
    for name, item in found.items():
        same(item, expected[name])
        num_cached += item.num_cached_tokens if item.prompt_logprobs is not None else 0
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
    kept = PromptEntryCache(4, 2)
    prompts = [Prompt(token_ids=[at, 1, 2, 3, 4, 5]) for at in (7, 8)]
    for prompt in prompts:
        scores = PromptLogprobs(kept, prompt, 1)
        assert scores.readable_tokens() == 0
        scores.extend(1, entries(prompt.token_ids[1:]))
    assert len(kept) == 4
    assert PromptLogprobs(kept, prompts[0], 1).readable_tokens() == 0  # its first block has gone
    again = PromptLogprobs(kept, prompts[1], 1)
    assert again.readable_tokens() == 5
    assert again.extend(5, entries([5])) == entries([1, 2, 3, 4, 5])
    other = PromptLogprobs(kept, Prompt(token_ids=[8, 1, 2, 4]), 0)
    assert other.readable_tokens() == 1
    assert PromptLogprobs(kept, prompts[1], 2).readable_tokens() == 0


def test_a_position_that_was_computed_before_is_passed_over() -> None:
    kept = PromptEntryCache(16, 2)
    scores = PromptLogprobs(kept, Prompt(token_ids=[1, 2, 3, 4, 5]), 1)
    assert scores.extend(1, entries([2, 3])) == entries([2, 3])
    assert scores.extend(1, entries([2, 3, 4])) == entries([4])
    assert scores.extend(4, entries([5])) == entries([5])
    assert scores.extend(1, entries([2])) == []
