"""Callables of a request: logits processors, stop conditions; and the limit of its thinking.

The oracle is a loop over the fake model without engine: it computes a row of logits, calls the
callable, and samples one token.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pyengine.errors import HookError, InvalidRequestError, RequestFailedError
from pyengine.request.prompts import Prompt
from pyengine.request.thinking import thinking_markers
from pyengine.sampling.sampler import sample
from pyengine.sampling.state import SamplingState, sample_seed
from pyengine.sampling.thinking_budget import ThinkingBudget, ThinkingMarkers
from pyengine.sampling_params import SamplingParams, StructuredOutputs
from tests.support import tokenizers
from tests.support.drafters import MixedDrafter, speculate
from tests.support.engines import Bench, Sink, add_request, make_bench
from tests.support.fake_runner import VOCAB_SIZE, Fault, continued, logits_of

BEGIN, END = 40, 41
PROMPTS = {str(at): [at, 7, 9, at] for at in range(8)}


class Marked:
    """A tokenizer whose model marks its thinking."""

    def __init__(self, begin: Sequence[int] = (BEGIN,), end: Sequence[int] = (END,)) -> None:
        self.marks = {"<think>": [*begin], "</think>": [*end]}
        self.chat_template = "{{ '<think></think>' }}"

    def encode(self, text: str, **_: Any) -> list[int]:
        return self.marks.get(text, [0])

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return next((text for text, ids in self.marks.items() if ids == token_ids), "?")


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "ignore_eos": True, "max_tokens": 12, **fields})


def alternate(output: list[int], logits: Any) -> Any:
    """Only even tokens after odd ones, and odd ones after even ones: depends on the output."""
    allowed = np.arange(len(logits)) % 2 != (output[-1] if output else 0) % 2
    return np.where(allowed, logits, -np.inf)


def not_in_prompt(prompt: list[int], output: list[int], logits: Any) -> None:
    """Change in place."""
    logits[[*prompt, *output]] = -np.inf


def expected(
    prompt: list[int], wanted: SamplingParams, processors: Sequence[Callable[..., Any]], seed: int
) -> list[int]:
    output: list[int] = []
    free = replace(wanted, logits_processors=(), n=1)
    for position in range(wanted.max_tokens or 0):
        row: Any = logits_of([*prompt, *output]).copy()
        for processor in processors:
            arguments = (output, row) if processor is alternate else (prompt, output, row)
            changed = processor(*map(list, arguments[:-1]), row)
            row = row if changed is None else changed
        state = SamplingState(free, prompt, seed=seed, vocab_size=VOCAB_SIZE)
        for token in output:
            state.append(token)
        output.append(int(sample(row[None], [state], [position]).wait().token_ids[0]))
    return output


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("chain", [(alternate,), (not_in_prompt,), (alternate, not_in_prompt)])
def test_a_processor_changes_each_token_of_its_request_alone(
    depth: int, temperature: int, chain: tuple[Callable[..., Any], ...]
) -> None:
    engine = make_bench(depth=depth)
    wanted = params(
        logits_processors=chain,
        temperature=temperature,
        seed=3,
        repetition_penalty=1.3,
        logit_bias={5: 2.0},
    )
    engine.submit({"free": [1, 2]}, params())
    engine.submit({"bound": [1, 2]}, wanted)
    engine.submit({"other": [3]}, params(logits_processors=[alternate]))
    done = engine.run()
    assert done["free"].outputs[0].token_ids == continued([1, 2], 12)
    assert done["bound"].outputs[0].token_ids == expected([1, 2], wanted, chain, seed=3)
    assert done["other"].outputs[0].token_ids == expected([3], params(), [alternate], seed=0)
    engine.assert_all_free()


@pytest.mark.parametrize("depth", [1, 2])
def test_each_of_several_samples_is_processed_by_its_own_output(depth: int) -> None:
    engine = make_bench(depth=depth)
    wanted = params(n=4, temperature=1, seed=3, logits_processors=[alternate])
    (output,) = engine.generate([[1, 2, 3]], wanted)
    for sample_output in output.outputs:
        seed = sample_seed(3, sample_output.index)
        assert sample_output.token_ids == expected([1, 2, 3], wanted, [alternate], seed)
    assert len({tuple(item.token_ids) for item in output.outputs}) == 4


@pytest.mark.parametrize("depth", [1, 2])
def test_a_processor_is_called_once_for_each_token_of_a_preempted_request(depth: int) -> None:
    calls: list[tuple[int, ...]] = []

    def spy(prompt: list[int], output: list[int], logits: Any) -> Any:
        calls.append((*prompt, -1, *output))
        return logits

    engine = make_bench(num_blocks=24, depth=depth)
    engine.submit(PROMPTS, params(max_tokens=30, logits_processors=[spy]))
    done = engine.run()
    assert engine.scheduler.num_preemptions > 0
    for name, prompt in PROMPTS.items():
        assert done[name].outputs[0].token_ids == continued(prompt, 30)
    assert len(calls) == len(set(calls)) == 8 * 30


def test_drafts_are_not_used_for_a_request_with_processors() -> None:
    engine = make_bench(num_blocks=200)
    speculate(engine.engine, MixedDrafter(1))
    drafted: list[int] = []

    def count(output: list[int], logits: Any) -> Any:
        drafted.append(len(output))
        return alternate(output, logits)

    engine.submit({"bound": [1, 2]}, params(logits_processors=[count]))
    engine.submit({"free": [5, 6]}, params(max_tokens=30))
    steps = [engine.engine.step() for _ in range(12)]
    assert sum(step.num_drafted for step in steps) > 0
    assert drafted == [*range(12)]
    assert engine.output("bound").outputs[0].token_ids == expected([1, 2], params(), [alternate], 0)


def test_the_limits_of_other_settings_hold_after_a_processor() -> None:
    def shout(output: list[int], logits: Any) -> Any:
        return np.where(np.arange(len(logits)) == 50, np.inf, logits)

    engine = make_bench()
    wanted = params(logits_processors=[shout])
    (free,) = engine.generate([[1]], wanted)
    assert free.outputs[0].token_ids == [50] * 12
    (drawn,) = engine.generate([[1]], replace(wanted, temperature=1, top_p=0.9, seed=1))
    assert drawn.outputs[0].token_ids == [50] * 12
    (bound,) = engine.generate([[1]], replace(wanted, allowed_token_ids=[7, 8]))
    assert set(bound.outputs[0].token_ids) <= {7, 8}


def test_log_probabilities_are_those_of_the_model() -> None:
    engine = make_bench()
    (free,) = engine.generate([[1, 2]], params(logprobs=2, max_tokens=1))
    wanted = params(logprobs=2, max_tokens=1, logits_processors=[not_in_prompt])
    (bound,) = engine.generate([[1, 2]], wanted)
    assert free.outputs[0].logprobs is not None
    assert bound.outputs[0].logprobs is not None
    for token, entry in free.outputs[0].logprobs[0].items():
        assert bound.outputs[0].logprobs[0].get(token, entry) == entry


class Late:
    """Fails at its fifth token, in one of several ways."""

    def __init__(self, result: Any) -> None:
        self.result = result

    def __call__(self, output: list[int], logits: Any) -> Any:
        if len(output) < 5:
            return logits
        if isinstance(self.result, Exception):
            raise self.result
        return self.result(logits)


FAILURES: dict[str, Any] = {
    "bad luck": ValueError("bad luck"),
    "shape": lambda logits: logits[:-1],
    "a list": lambda logits: [1.0],
    "NaN": lambda logits: np.full_like(logits, np.nan),
    "minus infinity": lambda logits: np.full_like(logits, -np.inf),
}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("reason", FAILURES)
def test_an_error_of_a_processor_ends_its_request_alone(
    reason: str, temperature: int, depth: int
) -> None:
    engine = make_bench(depth=depth)
    late = Late(FAILURES[reason])
    sink = Sink(streams=False)
    wanted = params(
        logits_processors=[alternate, late], n=2, temperature=temperature, seed=1, max_tokens=9
    )
    add_request(engine, "late", Prompt(token_ids=[1, 2]), wanted, sink=sink)
    engine.submit(PROMPTS, params(logits_processors=[alternate]))
    engine.submit({"free": [1, 2]}, params(temperature=1, seed=9))
    done = engine.run()
    assert isinstance(sink.error, HookError)
    assert isinstance(sink.error, RequestFailedError)
    assert "Late" in str(sink.error)
    assert reason in str(sink.error)
    (output,) = sink.error.outputs
    assert output.outputs[0].finish_reason == "error"
    assert [len(item.token_ids) for item in output.outputs] == [5, 5]
    for name, prompt in PROMPTS.items():
        assert done[name].outputs[0].token_ids == expected(prompt, params(), [alternate], 0)
    free = params(temperature=1, seed=9)
    assert done["free"].outputs[0].token_ids == expected([1, 2], free, [], 9)
    engine.assert_all_free()


@pytest.mark.parametrize("at", range(1, 6))
@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_that_fails_is_done_again_with_the_same_tokens(depth: int, at: int) -> None:
    engine = make_bench(depth=depth, tokenizer=Marked())
    engine.runner.fault = Fault(at, RuntimeError("once"))
    engine.submit({"processor": [1, 2]}, params(logits_processors=[alternate]))
    engine.submit({"budget": [1, BEGIN]}, params(thinking_token_budget=2))
    done = engine.run()
    assert done["processor"].outputs[0].token_ids == expected([1, 2], params(), [alternate], 0)
    assert done["budget"].outputs[0].token_ids[2] == END
    assert engine.runner.fault is None


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"logits_processors": [3]}, "logits_processors=3"),
        ({"logits_processors": lambda: None}, "logits_processors"),
        ({"logits_processors": "nothing"}, "logits_processors='nothing'"),
        ({"stop_when": "never"}, "stop_when='never'"),
        ({"stop_when": lambda: True}, "stop_when"),
        ({"thinking_token_budget": -2}, "thinking_token_budget=-2"),
        ({"thinking_token_budget": 1.5}, r"thinking_token_budget=1\.5"),
        (
            {"thinking_token_budget": 1, "structured_outputs": StructuredOutputs(regex="a")},
            "thinking_token_budget=1",
        ),
    ],
)
def test_what_is_no_hook_is_refused_by_name(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        SamplingParams(**fields)


def bench(**settings: Any) -> Bench:
    return make_bench(**{"num_blocks": 200, "tokenizer": tokenizers.characters(), **settings})


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("streams", [False, True])
def test_a_condition_ends_its_sequence(depth: int, streams: bool) -> None:
    seen: list[tuple[list[int], str]] = []

    def enough(output: list[int], text: str) -> bool | str:
        seen.append((output, text))
        return len(output) == 5 and "five"

    engine = bench(depth=depth)
    sink = Sink(streams)
    add_request(engine, "bound", Prompt(token_ids=[1, 2]), params(stop_when=enough), sink=sink)
    engine.submit({"free": [1, 2]}, params())
    done = engine.run()
    free = done["free"].outputs[0]
    (last,) = sink.items[-1].outputs
    assert (last.finish_reason, last.stop_reason) == ("stop", "five")
    text = "".join(item.outputs[0].text for item in sink.items)
    tokens = [token for item in sink.items for token in item.outputs[0].token_ids]
    assert tokens == free.token_ids[:5]
    assert text == seen[-1][1] == free.text[: len(text)]
    assert [output for output, _ in seen] == [tokens[:count] for count in range(1, 6)]
    engine.assert_all_free()


def test_a_condition_that_is_true_gives_its_name() -> None:
    def long_enough(output: list[int], text: str) -> bool:
        return len(output) >= 3

    engine = bench()
    wanted = params(stop_when=long_enough, min_tokens=5, n=3, temperature=1, seed=1)
    (output,) = engine.generate([[1, 2]], wanted)
    for item in output.outputs:
        assert (item.finish_reason, item.stop_reason) == ("stop", "long_enough")
        assert len(item.token_ids) == 6
    (without_text,) = engine.generate([[1]], params(stop_when=long_enough, detokenize=False))
    assert without_text.outputs[0].stop_reason == "long_enough"
    engine.assert_all_free()


def test_each_sample_ends_by_its_own_output() -> None:
    engine = bench(num_blocks=40)
    wanted = params(n=4, temperature=1, seed=5, max_tokens=40)
    (whole,) = engine.generate([[1, 2]], wanted)
    stop = replace(wanted, stop_when=lambda output, text: output[-1] % 5 == 0)
    (cut,) = engine.generate([[1, 2]], stop)
    for before, after in zip(whole.outputs, cut.outputs, strict=True):
        ends = [at for at, token in enumerate(before.token_ids, 1) if token % 5 == 0]
        assert after.token_ids == before.token_ids[: (ends or [40])[0]]
    assert len({len(item.token_ids) for item in cut.outputs}) > 1


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("answer", [3, ValueError("bad luck")])
def test_an_error_of_a_condition_ends_its_request_alone(depth: int, at: int, answer: Any) -> None:
    def late(output: list[int], text: str) -> Any:
        if len(output) < at:
            return False
        if isinstance(answer, Exception):
            raise answer
        return answer

    engine = bench(depth=depth)
    sink = Sink(streams=True)
    wanted = params(stop_when=late, n=2, temperature=1, seed=1)
    add_request(engine, "late", Prompt(token_ids=[1, 2]), wanted, sink=sink)
    engine.submit(PROMPTS, params(stop_when=lambda output, text: len(output) == 7))
    done = engine.run()
    assert isinstance(sink.error, HookError)
    assert "stop_when=late" in str(sink.error)
    for name, prompt in PROMPTS.items():
        assert done[name].outputs[0].token_ids == continued(prompt, 7)
    engine.assert_all_free()


def test_a_condition_ends_a_sequence_with_drafts_at_the_same_token() -> None:
    engine = bench()
    speculate(engine.engine, MixedDrafter(1))
    wanted = params(max_tokens=40, stop_when=lambda output, text: len(output) == 9)
    engine.submit(PROMPTS, wanted)
    done = engine.run()
    for name, prompt in PROMPTS.items():
        assert done[name].outputs[0].token_ids == continued(prompt, 9)


def limited(
    prompt: list[int], wanted: SamplingParams, markers: ThinkingMarkers, seed: int
) -> list[int]:
    """The oracle: a processor that reads the whole text for each token."""

    def force(prompt: list[int], output: list[int], logits: Any) -> Any:
        inside, count, forcing = False, 0, 0
        tokens = [*prompt, *output]
        for at in range(len(tokens)):
            until = tuple(tokens[: at + 1])
            if until[-len(markers.end) :] == markers.end:
                inside, forcing = False, 0
                count = count if at >= len(prompt) else 0
            elif until[-len(markers.begin) :] == markers.begin and not inside:
                inside = True
            elif inside:
                count += 1
                if forcing:
                    forcing += 1
            is_spent = inside and count >= (wanted.thinking_token_budget or 0)
            if is_spent and not forcing and at >= len(prompt) - 1:
                forcing = 1
        if not forcing:
            return logits
        row = np.full_like(logits, -np.inf)
        row[markers.end[forcing - 1]] = 0
        return row

    free = replace(wanted, thinking_token_budget=None)
    return expected(prompt, free, [force], seed)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("end", [(END,), (END, 42, 43)])
@pytest.mark.parametrize("budget", [0, 1, 4, 100, -1])
@pytest.mark.parametrize("temperature", [0, 1])
def test_the_end_of_thinking_is_forced_after_the_budget(
    depth: int, end: tuple[int, ...], budget: int, temperature: int
) -> None:
    engine = make_bench(depth=depth, tokenizer=Marked(end=end))
    markers = ThinkingMarkers((BEGIN,), end)
    often = {BEGIN: 3.0}  # the answer begins to think, perhaps again
    wanted = params(
        thinking_token_budget=budget,
        temperature=temperature,
        seed=4,
        max_tokens=24,
        logit_bias=often,
    )
    free = params(max_tokens=24)
    prompts = {"begun": [1, BEGIN], "within": [1, BEGIN, 3, 4], "plain": [1, 2]}
    prompts["ended"] = [1, BEGIN, *end]
    engine.submit(prompts, wanted)
    engine.submit({"free": [1, BEGIN]}, free)
    done = engine.run()
    for name, prompt in prompts.items():
        output = done[name].outputs[0].token_ids
        if budget < 0:
            assert output == expected(prompt, replace(wanted, thinking_token_budget=None), [], 4)
        else:
            assert output == limited(prompt, wanted, markers, 4)
    if budget == 0:
        assert tuple(done["begun"].outputs[0].token_ids[: len(end)]) == end
    if budget == 4:
        assert tuple(done["within"].outputs[0].token_ids[2 : 2 + len(end)]) == end
    assert done["free"].outputs[0].token_ids == continued([1, BEGIN], 24)
    engine.assert_all_free()


@pytest.mark.parametrize("depth", [1, 2])
def test_samples_and_preempted_requests_keep_their_budgets(depth: int) -> None:
    engine = make_bench(num_blocks=24, depth=depth, tokenizer=Marked())
    markers = ThinkingMarkers((BEGIN,), (END,))
    wanted = params(thinking_token_budget=6, n=2, temperature=1, seed=4, max_tokens=20)
    prompts = {name: [*prompt, BEGIN] for name, prompt in PROMPTS.items()}
    engine.submit(prompts, wanted)
    done = engine.run()
    assert engine.scheduler.num_preemptions > 0
    for name, prompt in prompts.items():
        for item in done[name].outputs:
            seed = sample_seed(4, item.index)
            assert item.token_ids == limited(prompt, wanted, markers, seed)


def test_a_budget_is_exact_with_drafts() -> None:
    engine = make_bench(num_blocks=200, tokenizer=Marked())
    speculate(engine.engine, MixedDrafter(1))
    wanted = params(thinking_token_budget=5, max_tokens=20)
    prompts = {name: [*prompt, BEGIN] for name, prompt in PROMPTS.items()}
    engine.submit(prompts, wanted)
    steps: list[Any] = []
    outputs: dict[str, Any] = {}
    while engine.engine.has_work:
        steps.append(engine.engine.step())
        outputs |= engine.take_finished()
    assert sum(step.num_drafted for step in steps) > 0
    for name, prompt in prompts.items():
        assert outputs[name].outputs[0].token_ids == limited(
            prompt, wanted, ThinkingMarkers((BEGIN,), (END,)), 0
        )


def test_a_marker_that_has_begun_is_completed() -> None:
    budget = ThinkingBudget(1, ThinkingMarkers((1,), (2, 3, 4)), [1])
    forced = []
    for token in (2, 3, 4):
        forced.append(budget.forced)
        budget.append(token)
    assert [*forced, budget.forced] == [None, 3, 4, None]


def test_a_model_without_markers_is_refused() -> None:
    for tokenizer in (None, tokenizers.characters()):
        engine = make_bench(tokenizer=tokenizer)
        with pytest.raises(InvalidRequestError, match="thinking_token_budget needs a model"):
            engine.submit({"x": [1]}, params(thinking_token_budget=3))
        engine.submit({"free": [1]}, params(thinking_token_budget=-1))
    assert thinking_markers(Marked()) == ThinkingMarkers((BEGIN,), (END,))
