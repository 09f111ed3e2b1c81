"""A suite with few-shot prompts and log-probabilities, twice, with the real model."""

import pytest

from pyengine import LLM, RequestOutput, SamplingParams

SHOTS = "".join(
    f"Question: What is {at} plus {at * 7 % 13}?\nAnswer: {at + at * 7 % 13}\n\n"
    for at in range(1, 17)
)
SUITE = [f"{SHOTS}Question: What is {at} plus {at}?\nAnswer: {2 * at}" for at in range(40, 44)]
PARAMS = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)


def close(found: RequestOutput, expected: RequestOutput) -> None:
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    assert found.prompt_logprobs is not None and expected.prompt_logprobs is not None
    assert found.prompt_logprobs[0] is None and expected.prompt_logprobs[0] is None
    for each_logprob, other in zip(
        found.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True
    ):
        assert each_logprob is not None and other is not None
        assert each_logprob.keys() == other.keys()
        for token, logprob in each_logprob.items():
            assert logprob.logprob == pytest.approx(other[token].logprob, abs=1e-4)
            assert logprob.rank == other[token].rank
            assert logprob.decoded_token == other[token].decoded_token


@pytest.mark.slow
def test_the_second_run_of_a_suite_computes_next_to_nothing() -> None:
    with LLM(
        dtype="float32", enable_prefix_caching=False, num_blocks=512, max_model_len=2048
    ) as plain:
        expected = plain.generate(SUITE, PARAMS, use_tqdm=False)
    with LLM(dtype="float32", num_blocks=512, max_model_len=2048) as llm:
        first = llm.generate(SUITE, PARAMS, use_tqdm=False)
        before = llm.stats().counters["computed_tokens"]
        second = llm.generate(SUITE, PARAMS, use_tqdm=False)
        computed = llm.stats().counters["computed_tokens"] - before
    total = sum(len(item.prompt_token_ids) for item in second)
    assert computed < 0.05 * total
    for item, other, alone in zip(first, second, expected, strict=True):
        close(item, alone)
        close(other, alone)
