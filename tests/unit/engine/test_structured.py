"""Answers of a given form: whatever else is asked, whoever else is there; they fail alone."""

import json
import re
from collections.abc import Iterator
from functools import cache
from random import Random
from typing import Any

import jsonschema
import pytest

from pyengine.errors import InvalidRequestError
from pyengine.outputs import RequestOutput
from pyengine.sampling import token_masks
from pyengine.sampling.state import sample_seed
from pyengine.sampling_params import SamplingParams, StructuredOutputs
from tests.support import tokenizers
from tests.support.engines import EOS, Bench, Sink, make_bench
from tests.support.fake_runner import Fault, continued
from tests.support.schemas import drawn_schema

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
DIGITS = StructuredOutputs(regex="[0-9]{3,5}")
ONE_OF = StructuredOutputs(choice=["yes", "no", "nothing"])


@cache
def tokenizer() -> Any:
    return tokenizers.characters()


def ids(text: str) -> list[int]:
    found: list[int] = tokenizer().encode(text)
    return found


def bench(**settings: Any) -> Bench:
    return make_bench(**{"num_blocks": 400, "tokenizer": tokenizer(), **settings})


def asked(form: StructuredOutputs, **params: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0, "max_tokens": 200, "structured_outputs": form, **params}
    )


def text_of(output: RequestOutput, index: int = 0) -> str:
    return output.outputs[index].text


@pytest.mark.parametrize("depth", [1, 2])
def test_every_form_is_kept_to_and_others_notice_nothing(depth: int) -> None:
    engine = bench(depth=depth)
    forms = {
        "json": StructuredOutputs(json=SCHEMA),
        "object": StructuredOutputs(json_object=True),
        "regex": DIGITS,
        "choice": ONE_OF,
        "lark": StructuredOutputs(grammar='start: "(" start ")" | "x"'),
        "gbnf": StructuredOutputs(grammar='root ::= "<" root ">" | "y"'),
    }
    nearer = {ids('"')[0]: 4.0, ids("}")[0]: 4.0, ids(")")[0]: 3.0}
    for name, form in forms.items():
        engine.submit({name: [5, 6, 7]}, asked(form, logit_bias=nearer))
        engine.submit({f"{name}, free": [5, 6, 7]}, SamplingParams(temperature=0, ignore_eos=True))
    done = engine.run()
    jsonschema.validate(json.loads(text_of(done["json"])), SCHEMA)
    assert isinstance(json.loads(text_of(done["object"])), dict)
    assert re.fullmatch("[0-9]{3,5}", text_of(done["regex"]))
    assert text_of(done["choice"]) in ("yes", "no", "nothing")
    for name, left, right in [("lark", "(x", ")"), ("gbnf", "<y", ">")]:
        found = text_of(done[name])
        levels = len(found) // 2
        assert found == left[0] * levels + left[1] + right * levels
    for name in forms:
        assert done[name].outputs[0].finish_reason == "stop"
        assert done[name].outputs[0].stop_reason is None
        assert done[f"{name}, free"].outputs[0].token_ids == continued([5, 6, 7], 16)
    engine.assert_all_free()


def test_the_likeliest_of_the_allowed_tokens_is_taken() -> None:
    engine = bench()
    (free,) = engine.generate([[1, 2]], SamplingParams(temperature=0, ignore_eos=True))
    form = StructuredOutputs(grammar="start: /(.|\\n)*/")
    (bound,) = engine.generate([[1, 2]], asked(form, max_tokens=16))
    until = free.outputs[0].token_ids.index(EOS) if EOS in free.outputs[0].token_ids else 16
    assert bound.outputs[0].token_ids[:until] == free.outputs[0].token_ids[:until]


@pytest.mark.parametrize("depth", [1, 2])
def test_each_of_several_samples_has_its_own_place(depth: int) -> None:
    engine = bench(depth=depth)
    params = asked(StructuredOutputs(json=SCHEMA), n=4, temperature=1.5, seed=3, max_tokens=80)
    (several,) = engine.generate([[1, 2, 3]], params)
    for index, output in enumerate(several.outputs):
        alone = asked(
            StructuredOutputs(json=SCHEMA),
            temperature=1.5,
            seed=sample_seed(3, index),
            max_tokens=80,
        )
        (expected,) = engine.generate([[1, 2, 3]], alone)
        assert output.token_ids == expected.outputs[0].token_ids
        assert output.finish_reason == expected.outputs[0].finish_reason
    assert len({output.text for output in several.outputs}) == 4


@pytest.mark.parametrize("depth", [1, 2])
def test_whoever_is_preempted_goes_on_where_it_was(depth: int) -> None:
    params = asked(StructuredOutputs(json=SCHEMA), temperature=1, seed=5, max_tokens=40)
    prompts = {str(at): [at, 7, 9, at] for at in range(8)}
    wide, narrow = bench(), bench(num_blocks=24, depth=depth)
    for engine in (wide, narrow):
        engine.submit(prompts, params)
    expected, found = wide.run(), narrow.run()
    assert narrow.scheduler.num_preemptions > 0
    assert wide.scheduler.num_preemptions == 0
    for name in prompts:
        assert found[name].outputs == expected[name].outputs


@pytest.mark.parametrize("at", range(1, 6))
@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_that_fails_is_done_again_with_the_same_tokens(depth: int, at: int) -> None:
    params = asked(StructuredOutputs(json=SCHEMA), temperature=1, seed=5, max_tokens=30)
    (expected,) = bench().generate([[1, 2, 3]], params)
    engine = bench(depth=depth)
    engine.runner.fault = Fault(at, RuntimeError("once"))
    (found,) = engine.generate([[1, 2, 3]], params)
    assert engine.runner.fault is None
    assert found.outputs == expected.outputs


def test_whatever_else_is_asked_is_done_too() -> None:
    engine = bench()
    plain = asked(DIGITS, logprobs=2, min_tokens=2, ignore_eos=True)
    (output,) = engine.generate([[4, 5]], plain)
    first = output.outputs[0]
    assert re.fullmatch("[0-9]{3,5}", first.text)
    assert first.finish_reason == "stop"
    assert first.logprobs is not None
    assert len(first.logprobs) == len(first.token_ids)
    (free,) = engine.generate([[4, 5]], SamplingParams(temperature=0, logprobs=2, max_tokens=1))
    raw = free.outputs[0].logprobs
    assert raw is not None
    best = next(iter(raw[0]))
    assert first.logprobs[0][best] == raw[0][best]  # those of the model, whatever is allowed
    biased = asked(DIGITS, logit_bias={ids("7")[0]: 100.0})
    assert set(text_of(engine.generate([[4, 5]], biased)[0])) <= {"7"}
    allowed = asked(DIGITS, allowed_token_ids=[*ids("13"), EOS])
    assert set(text_of(engine.generate([[4, 5]], allowed)[0])) <= {"1", "3"}
    word = asked(ONE_OF, logit_bias={ids("y")[0]: 100.0})
    stopped = engine.generate([[4, 5]], asked(ONE_OF, logit_bias=word.logit_bias, stop=["e"]))[0]
    assert (text_of(stopped), stopped.outputs[0].stop_reason) == ("y", "e")
    by_token = asked(ONE_OF, logit_bias=word.logit_bias, stop_token_ids=ids("e"))
    stopped = engine.generate([[4, 5]], by_token)[0]
    assert (text_of(stopped), stopped.outputs[0].stop_reason) == ("y", ids("e")[0])
    cut = engine.generate([[4, 5]], asked(ONE_OF, max_tokens=1))[0]
    assert cut.outputs[0].finish_reason == "length"
    penalised = asked(DIGITS, repetition_penalty=1.5, presence_penalty=1, bad_words=["1"])
    assert re.fullmatch("[02-9]{3,5}", text_of(engine.generate([[4, 5]], penalised)[0]))


def test_the_answer_ends_with_its_form_however_many_tokens_were_wanted() -> None:
    (output,) = bench().generate([[4, 5]], asked(ONE_OF, min_tokens=50, ignore_eos=True))
    assert text_of(output) in ("yes", "no", "nothing")
    assert output.outputs[0].finish_reason == "stop"


def test_a_stream_gives_the_whole_text() -> None:
    engine = bench()
    engine.submit({"a": [4, 5]}, asked(StructuredOutputs(choice=["yes"])))
    sink = Sink()
    engine.requests["a"].sink = sink
    engine.run()
    assert "".join(item.outputs[0].text for item in sink.items) == "yes"
    assert sink.items[-1].finished


@pytest.mark.parametrize("depth", [1, 2])
def test_a_combination_that_leaves_no_token_fails_alone(depth: int) -> None:
    engine = bench(depth=depth)
    engine.submit({"free": [5, 6]}, SamplingParams(temperature=0, ignore_eos=True))
    engine.submit({"none": [5, 6]}, asked(ONE_OF, allowed_token_ids=ids("xz")))
    engine.submit({"later": [5, 6]}, asked(ONE_OF, allowed_token_ids=ids("nx")))
    engine.submit({"some": [5, 6]}, asked(ONE_OF, allowed_token_ids=ids("noyes")))
    done = engine.run()
    for name, length in [("none", 0), ("later", 1)]:
        assert done[name].outputs[0].finish_reason == "error"
        assert len(done[name].outputs[0].token_ids) == length
        assert "structured_outputs together leave no token" in str(done[name].error)
    assert done["free"].outputs[0].token_ids == continued([5, 6], 16)
    assert text_of(done["some"]) in ("yes", "no")
    engine.assert_all_free()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_grammar_that_becomes_too_complex_fails_alone(depth: int) -> None:
    engine = bench(depth=depth)
    bomb = StructuredOutputs(grammar='start: x{1000}\nx: y{1000}\ny: z{1000}\nz: "a"')
    engine.submit({"bomb": [5, 6]}, asked(bomb))
    engine.submit({"free": [5, 6]}, SamplingParams(temperature=0, ignore_eos=True))
    engine.submit({"form": [5, 6]}, asked(ONE_OF))
    done = engine.run()
    assert done["bomb"].outputs[0].finish_reason == "error"
    assert str(done["bomb"].error).startswith("StructuredOutputError: ")
    assert done["free"].outputs[0].token_ids == continued([5, 6], 16)
    assert text_of(done["form"]) in ("yes", "no", "nothing")
    if depth == 1:  # else an attempt to plan ahead counts as one
        assert engine.engine.stats().counters["rolled_back_steps"] == 0
    engine.assert_all_free()


def test_whoever_takes_too_much_time_for_its_masks_fails_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = bench()
    engine.generate([[1, 2]], asked(DIGITS))  # is compiled
    monkeypatch.setattr(token_masks, "_FREE_SECONDS", -1.0)
    engine.submit({"slow": [5, 6]}, asked(DIGITS))
    engine.submit({"free": [5, 6]}, SamplingParams(temperature=0, ignore_eos=True))
    done = engine.run()
    assert "1 tokens took" in str(done["slow"].error)
    assert done["free"].outputs[0].token_ids == continued([5, 6], 16)


def answers(random: Random, count: int) -> Iterator[tuple[dict[str, Any], str]]:
    """Random schemas, each with an answer that ended by itself; none for those that are refused."""
    engine = bench(num_blocks=4096, max_model_len=700)
    nearer = dict.fromkeys(ids('"]}'), 5.0)
    schemas = [drawn_schema(random) for _ in range(count)]
    refused = 0
    for at, schema in enumerate(schemas):
        form = StructuredOutputs(json=schema)
        params = asked(form, temperature=1, seed=at, max_tokens=600, logit_bias=nearer)
        try:
            engine.submit({str(at): [at % 90, 3]}, params)
        except InvalidRequestError as error:
            assert "structured_outputs.json cannot be served: " in str(error)
            refused += 1
    assert refused < count // 3
    for name, output in engine.run().items():
        assert output.outputs[0].finish_reason == "stop", (schemas[int(name)], output.error)
        yield schemas[int(name)], text_of(output)


@pytest.mark.parametrize(
    "count", [40, pytest.param(500, marks=[pytest.mark.soak, pytest.mark.slow])]
)
def test_answers_are_valid_by_their_schemas(count: int) -> None:
    kind = jsonschema.Draft202012Validator
    seen = 0
    for schema, text in answers(Random(count), count):
        kind(schema, format_checker=kind.FORMAT_CHECKER).validate(json.loads(text))
        seen += 1
    assert seen > count // 2
