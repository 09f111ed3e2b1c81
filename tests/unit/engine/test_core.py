"""The loop around a fake runner whose logits depend on exactly what the paged cache holds."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyengine.errors import InvalidRequestError
from pyengine.request.prompts import Prompt
from pyengine.sampling.state import sample_seed
from pyengine.sampling_params import SamplingParams
from tests.support.engines import EOS, GREEDY, Sink, add_request, make_bench
from tests.support.fake_runner import VOCAB_SIZE, Fault, Logits, continued, logits_of
from tests.support.tokenizers import Fast, byte_level


def greedy(**settings: object) -> SamplingParams:
    return SamplingParams(temperature=0, **{"ignore_eos": True, "max_tokens": 8, **settings})


def test_greedy_tokens_are_those_of_the_model() -> None:
    prompts = [[3, 4, 5, 6, 7], [3, 4, 5, 6, 7, 8, 9, 10, 11], [50]]
    outputs = make_bench().generate(prompts)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == continued(prompt, 8)
        assert output.finished
        assert output.outputs[0].finish_reason == "length"
        assert output.prompt_token_ids == prompt


def test_identical_prompts_end_up_on_one_physical_copy() -> None:
    """nano-vllm issue 219: two identical prompts in one batch."""
    bench = make_bench(block_size=4, in_flight_sharing=False)
    prompt = list(range(10, 20))
    bench.submit({"a": prompt, "b": prompt})
    bench.engine.step()
    sequences = [sequence.kv for sequence in bench.scheduler._running]
    first, second = (sequence.block_table for sequence in sequences)
    assert first[:2] == second[:2]
    assert first[2] != second[2]
    assert [bench.manager.refs(block) for block in first] == [2, 2, 1]
    assert bench.engine.stats().counters["merged_blocks"] == 2
    done = bench.run()
    assert done["a"].outputs[0].token_ids == done["b"].outputs[0].token_ids == continued(prompt, 8)
    bench.assert_all_free()


def test_identical_prompts_are_computed_once() -> None:
    """In-flight sharing: 32 times the same prompt costs one prefill and 31 tokens."""
    bench = make_bench(256, 4, max_num_seqs=32)
    prompt = list(range(10, 42))
    outputs = bench.generate([prompt] * 32)
    assert bench.runner.computed[0] == 32 + 31
    counters = bench.engine.stats().counters
    assert (counters["in_flight_blocks"], counters["merged_blocks"]) == (31 * 8, 31 * 1)
    for output in outputs:
        assert output.outputs[0].token_ids == continued(prompt, 8)
    bench.assert_all_free()


@pytest.mark.parametrize("sharing", [True, False])
def test_n_samples_compute_their_prompt_once(sharing: bool) -> None:
    """One prefill, one physical prompt, at most n - 1 copies of its last block."""
    bench = make_bench(64, 4, in_flight_sharing=sharing)
    prompt = list(range(10, 20))
    params = SamplingParams(n=8, seed=5, max_tokens=6, ignore_eos=True, logprobs=0)
    bench.submit({"a": prompt}, params)
    bench.engine.step()
    assert bench.runner.computed == [10]
    assert bench.manager.usage().active == 3
    output = bench.run()["a"]
    counters = bench.engine.stats().counters
    assert 0 < counters["copied_blocks"] <= 7
    assert sum(bench.runner.computed) == 10 + 8 * 5
    assert [each_output.index for each_output in output.outputs] == list(range(8))
    assert len({tuple(each_output.token_ids) for each_output in output.outputs}) > 4
    for index, each_output in enumerate(output.outputs):  # each is what its seed gives alone
        alone = make_bench(64, 4).generate(
            [prompt],
            SamplingParams(seed=sample_seed(5, index), max_tokens=6, ignore_eos=True),
        )
        assert each_output.token_ids == alone[0].outputs[0].token_ids
        assert each_output.logprobs is not None and len(each_output.logprobs) == 6
    bench.assert_all_free()


@pytest.mark.parametrize("groups", [(None,), (None, 6)])
@pytest.mark.parametrize("n", [1, 16])
def test_the_counters_have_what_samples_share(n: int, groups: tuple[int | None, ...]) -> None:
    bench = make_bench(256, 4, groups=groups)
    prompt = [*range(10, 30), 7]
    (output,) = bench.generate([prompt], SamplingParams(n=n, seed=5, max_tokens=3, ignore_eos=True))
    counters = bench.engine.stats().counters
    assert len(output.outputs) == n
    assert counters["forked_tokens"] == (n - 1) * 21
    # The last, partial block is copied. A window of 6 sees 2 more.
    assert counters["forked_blocks"] == (n - 1) * (5 if groups == (None,) else 5 + 2)
    assert counters["cached_tokens"] == 0
    assert counters["prompt_tokens"] == 21


def test_n_samples_under_pressure_end_and_abort() -> None:
    bench = make_bench(12, 4, max_num_batched_tokens=16, max_num_seqs=8)
    params = SamplingParams(n=4, seed=1, max_tokens=12, ignore_eos=True)
    bench.submit({"a": list(range(10)), "b": list(range(20))}, params)
    bench.submit({"c": list(range(10))}, params)
    bench.engine.step()
    assert bench.abort(["b"])[0].outputs[3].finish_reason == "abort"
    done = bench.run()
    assert bench.scheduler.num_preemptions > 0
    assert [len(output.token_ids) for output in done["a"].outputs] == [12] * 4
    assert [output.token_ids for output in done["a"].outputs] == [
        output.token_ids for output in done["c"].outputs
    ]
    bench.assert_all_free()


def test_samples_that_end_with_their_first_token_are_not_forked() -> None:
    bench = make_bench()
    params = SamplingParams(n=3, max_tokens=1, seed=0)
    output = bench.generate([[1, 2, 3]], params)[0]
    assert [len(each_output.token_ids) for each_output in output.outputs] == [1, 1, 1]
    assert len(bench.runner.computed) == 1
    bench.assert_all_free()


def test_a_prompt_sent_again_computes_one_token() -> None:
    bench = make_bench(block_size=4)
    prompt = list(range(10, 22))
    bench.generate([prompt], greedy(max_tokens=1))
    before = sum(bench.runner.computed)
    output = bench.generate([prompt], greedy(max_tokens=1))[0]
    assert sum(bench.runner.computed) - before == 1
    assert output.num_cached_tokens == 11
    assert output.outputs[0].token_ids == continued(prompt, 1)


@pytest.mark.parametrize("hash_bits", [0, 1, 4])
def test_hash_collisions_cost_names_only(hash_bits: int) -> None:
    bench = make_bench(48, 4, hash_bits=hash_bits)
    prompts = [[seed + i for i in range(12)] for seed in (0, 20, 40, 0, 20)]
    outputs = bench.generate(prompts)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == continued(prompt, 8)
    bench.assert_all_free()


def test_eos_ends_a_request_and_keeps_its_token() -> None:
    bench = make_bench()
    params = greedy(ignore_eos=False, logit_bias={EOS: 100.0})
    output = bench.generate([[5, 6]], params)[0].outputs[0]
    assert (output.token_ids, output.finish_reason, output.stop_reason) == ([EOS], "stop", None)


def test_stop_token_ids_and_min_tokens() -> None:
    tokens = continued([5, 6], 8)
    stop = tokens[3]
    first = tokens.index(stop)
    output = make_bench().generate([[5, 6]], greedy(stop_token_ids=[stop]))[0].outputs[0]
    assert output.token_ids == tokens[: first + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    output = make_bench().generate([[5, 6]], greedy(stop_token_ids=[stop], min_tokens=6))[0]
    assert len(output.outputs[0].token_ids) >= 6
    assert stop not in output.outputs[0].token_ids[:6]


def test_length_is_capped_by_the_pool_and_the_model() -> None:
    bench = make_bench(num_blocks=4, block_size=4)
    output = bench.generate([[1] * 10], greedy(max_tokens=None))[0].outputs[0]
    assert len(output.token_ids) == 6
    assert output.finish_reason == "length"
    bench.assert_all_free()


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("max_tokens", "num_tokens", "stop_reason"),
    [(5, 5, None), (6, 6, None), (7, 6, "max_model_len"), (None, 6, "max_model_len")],
)
def test_an_answer_that_the_context_cut_says_so(
    max_tokens: int | None, num_tokens: int, stop_reason: str | None, streams: bool
) -> None:
    """The reason is `max_tokens` only where all of them came."""
    bench, sink = make_bench(max_model_len=16), Sink(streams)
    request = add_request(
        bench, "one", Prompt(token_ids=[1] * 10), greedy(max_tokens=max_tokens), sink=sink
    )
    bench.requests["one"] = request
    whole = bench.run()["one"].outputs[0]
    for output in (whole, sink.items[-1].outputs[0]):
        assert (output.finish_reason, output.stop_reason) == ("length", stop_reason)
    assert len(whole.token_ids) == num_tokens


def log_softmax(logits: Logits) -> Logits:
    return np.asarray(logits - np.logaddexp.reduce(logits))


def test_logprobs_are_the_models() -> None:
    output = make_bench().generate([[5, 6, 7]], greedy(logprobs=2, max_tokens=3))[0].outputs[0]
    assert output.logprobs is not None
    context = [5, 6, 7]
    total = 0.0
    for token, entry in zip(output.token_ids, output.logprobs, strict=True):
        expected = log_softmax(logits_of(context))
        assert entry[token].logprob == pytest.approx(float(expected[token]), abs=1e-5)
        assert (entry[token].rank, len(entry)) == (1, 2)
        total += entry[token].logprob
        context.append(token)
    assert output.cumulative_logprob == pytest.approx(total)


@pytest.mark.parametrize("budget", [5, 64])
def test_prompt_logprobs_through_chunks_and_cache(budget: int) -> None:
    """Also when the prompt is in the cache already, and when it is computed in chunks."""
    bench = make_bench(max_num_batched_tokens=budget, max_num_seqs=4)
    prompt = [(7 * i) % VOCAB_SIZE for i in range(14)]
    bench.generate([prompt])
    params = greedy(prompt_logprobs=1, max_tokens=2)
    bench.submit({"a": prompt, "b": prompt[::-1]}, params)
    bench.submit({"c": prompt})
    done = bench.run()
    assert done["a"].num_cached_tokens == 0
    for name, tokens in (("a", prompt), ("b", prompt[::-1])):
        entries = done[name].prompt_logprobs
        assert entries is not None
        assert entries[0] is None
        assert len(entries) == len(tokens)
        for position in range(1, len(tokens)):
            entry = entries[position]
            assert entry is not None
            expected = log_softmax(logits_of(tokens[:position]))[tokens[position]]
            assert entry[tokens[position]].logprob == pytest.approx(float(expected), abs=1e-5)
    assert done["c"].prompt_logprobs is None


def test_seeds_are_the_requests_own() -> None:
    def drawn(names: list[int], engine_seed: int) -> dict[str, list[int]]:
        bench = make_bench(seed=engine_seed)
        for name in names:
            params = SamplingParams(seed=name, max_tokens=6, ignore_eos=True)
            bench.submit({str(name): [9, 9, 9]}, params)
        return {name: output.outputs[0].token_ids for name, output in bench.run().items()}

    together, alone = drawn([1, 2, 3], 0), drawn([2], 5)
    assert together["2"] == alone["2"]
    assert len({tuple(tokens) for tokens in together.values()}) == 3


def test_samples_of_neighbouring_seeds_have_nothing_in_common() -> None:
    bench = make_bench(256, 4)
    params = [SamplingParams(n=4, seed=seed, max_tokens=8, ignore_eos=True) for seed in (1, 2, 3)]
    found = [bench.generate([[1, 2, 3]], param)[0].outputs for param in params]
    answers = [tuple(value.token_ids) for several in found for value in several]
    assert len(set(answers)) == 12
    for number in (1, 2, 3):  # the first ones are the same, however many there are
        fewer = replace(params[0], n=number)
        again = bench.generate([[1, 2, 3]], fewer)[0].outputs
        assert [tuple(item.token_ids) for item in again] == answers[:number]


def test_without_a_seed_the_engines_seed_decides() -> None:
    def drawn(seed: int) -> list[int]:
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        return make_bench(seed=seed).generate([[9, 9]], params)[0].outputs[0].token_ids

    assert drawn(1) == drawn(1) != drawn(2)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], GREEDY, "prompt is empty"),
        ([1] * 64, GREEDY, r"64 tokens; .* at most 63 fit \(the KV pool holds 16 blocks of 4"),
        ([1, VOCAB_SIZE], GREEDY, "token id 97 at position 1 .* vocabulary of 97"),
        ([-1], GREEDY, "token id -1 at position 0"),
        ([1], greedy(stop_token_ids=[97]), "stop_token_ids"),
        ([1], greedy(logit_bias={500: 1.0}), "logit_bias.*500"),
        ([1], greedy(stop=["x"]), "needs a tokenizer"),
        ([1], SamplingParams(n=33), "n=33 .* max_num_seqs=32"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(
    prompt: list[int], params: SamplingParams, message: str
) -> None:
    bench = make_bench(num_blocks=16, block_size=4)
    before = bench.manager.usage()
    with pytest.raises(InvalidRequestError, match=message):
        add_request(bench, "a", Prompt(token_ids=prompt), params)
    assert bench.manager.usage() == before
    assert not bench.engine.has_work
    assert bench.generate([[1, 2]])[0].outputs[0].token_ids == continued([1, 2], 8)


@pytest.mark.parametrize("error", [RuntimeError("once"), KeyboardInterrupt()])
@pytest.mark.parametrize("at", [0, 1, 4])
def test_a_step_that_fails_once_changes_no_request(error: BaseException, at: int) -> None:
    bench = make_bench(24, 4, max_num_batched_tokens=16, max_num_seqs=8)
    prompts = {"a": list(range(20)), "b": list(range(30, 45)), "c": list(range(20))}
    bench.submit(prompts)
    bench.runner.fault = Fault(at, error)
    if not isinstance(error, Exception):
        with pytest.raises(KeyboardInterrupt):
            bench.run()
        bench.manager.check()
    done = bench.run()  # the step is simply run again
    assert bench.runner.fault is None
    for name, prompt in prompts.items():
        assert done[name].outputs[0].token_ids == continued(prompt, 8)
    bench.assert_all_free()


def test_abort_at_any_moment_leaves_nothing_behind() -> None:
    bench = make_bench(24, 4, max_num_batched_tokens=16, max_num_seqs=8)
    bench.submit({"a": list(range(20)), "b": list(range(30, 45)), "c": [1]})
    bench.engine.step()
    aborted = bench.abort(["b", "c", "unknown"])
    assert [output.outputs[0].finish_reason for output in aborted] == ["abort", "abort"]
    assert bench.run()["a"].outputs[0].token_ids == continued(list(range(20)), 8)
    assert bench.abort(["a", "b"]) == []
    bench.assert_all_free()


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 24).map(lambda n: [i % 5 for i in range(n)]), min_size=1),
    num_blocks=st.integers(8, 40),
    block_size=st.sampled_from([1, 2, 4, 8]),
    budget=st.integers(8, 48),
    caching=st.booleans(),
    sharing=st.booleans(),
    hash_bits=st.sampled_from([128, 128, 2]),
)
def test_any_batch_gives_the_models_tokens(
    prompts: list[list[int]],
    num_blocks: int,
    block_size: int,
    budget: int,
    caching: bool,
    sharing: bool,
    hash_bits: int,
) -> None:
    bench = make_bench(
        num_blocks,
        block_size,
        max_num_batched_tokens=budget,
        max_num_seqs=8,
        prefix_caching=caching,
        in_flight_sharing=sharing,
        hash_bits=hash_bits,
    )
    pool_tokens = num_blocks * block_size
    served = [prompt for prompt in prompts if len(prompt) < pool_tokens]
    for prompt, output in zip(served, bench.generate(served), strict=True):
        length = min(8, pool_tokens - len(prompt))
        assert output.outputs[0].token_ids == continued(prompt, length)
    bench.assert_all_free()


def test_a_prompt_is_cut_if_asked() -> None:
    bench = make_bench(max_model_len=20)
    prompt = list(range(3, 40))
    for asked, kept in ((5, prompt[-5:]), (-1, prompt[-19:])):
        params = greedy(truncate_prompt_tokens=asked, max_tokens=1)
        (output,) = bench.generate([prompt], params)
        assert output.prompt_token_ids == kept
        assert output.outputs[0].token_ids == continued(kept, 1)
    with pytest.raises(InvalidRequestError, match="the prompt has 30 tokens"):
        bench.generate([prompt], greedy(truncate_prompt_tokens=30))


def test_bad_words_and_allowed_tokens_hold_in_the_whole_engine() -> None:
    tokenizer = Fast(byte_level(VOCAB_SIZE))
    bench = make_bench(tokenizer=tokenizer)
    allowed = tokenizer.encode("ab")
    params = greedy(allowed_token_ids=allowed, bad_words=["aa", "bb"], max_tokens=30)
    (output,) = bench.generate([tokenizer.encode("x")], params)
    assert output.outputs[0].text in ("ab" * 15, "ba" * 15)
    with pytest.raises(InvalidRequestError, match=r"bad_words=.* needs a tokenizer"):
        make_bench().generate([[3]], greedy(bad_words="a"))


def test_an_id_in_use_is_refused_before_anything_is_taken_over() -> None:
    bench = make_bench()
    bench.submit({"a": [1, 2, 3]})
    first = bench.requests["a"]
    bench.engine.step()
    with pytest.raises(InvalidRequestError, match="request id 'a' is in use"):
        add_request(bench, "a", Prompt(token_ids=[9, 9]), GREEDY)
    assert bench.engine.unfinished == [first]
    assert bench.run()["a"].outputs[0].token_ids == continued([1, 2, 3], 8)
    bench.assert_all_free()


def test_samples_have_no_ids_that_a_request_could_have() -> None:
    bench = make_bench()
    two = SamplingParams(n=2, temperature=0, ignore_eos=True, max_tokens=8)
    bench.submit({"a": [1, 2, 3]}, two)
    bench.submit({"a#1": [4, 5]})
    done = bench.run()
    assert [output.token_ids for output in done["a"].outputs] == [continued([1, 2, 3], 8)] * 2
    assert done["a#1"].outputs[0].token_ids == continued([4, 5], 8)
    bench.assert_all_free()
