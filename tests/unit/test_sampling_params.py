import copy
import dataclasses
import math
import pickle
import re
from fractions import Fraction

import numpy as np
import pytest

from pyengine.errors import InvalidRequestError, PyEngineError
from pyengine.sampling_params import (
    MAX_LOGPROB_ENTRIES,
    MAX_SAMPLES,
    RequestOutputKind,
    SamplingParams,
)
from tests.support.processes import run_python


def test_the_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    assert dataclasses.asdict(params) == {
        "n": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": None,
        "seed": None,
        "stop": (),
        "stop_token_ids": (),
        "include_stop_str_in_output": False,
        "ignore_eos": False,
        "max_tokens": 16,
        "min_tokens": 0,
        "logprobs": None,
        "prompt_logprobs": None,
        "detokenize": True,
        "skip_special_tokens": True,
        "output_kind": RequestOutputKind.CUMULATIVE,
        "bad_words": (),
        "allowed_token_ids": None,
        "truncate_prompt_tokens": None,
        "structured_outputs": None,
        "logits_processors": (),
        "stop_when": None,
        "thinking_token_budget": None,
        "speculate": True,
        "cache_priority": 0,
        "return_hidden_states": None,
    }
    assert not params.is_greedy
    assert not params.has_penalties


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("temperature", None),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("top_k", -2),
        ("top_k", 1.0),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", math.inf),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("seed", 0.5),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("min_tokens", -1),
        ("min_tokens", None),
        ("logprobs", -2),
        ("prompt_logprobs", -2),
        ("prompt_logprobs", True),
        ("ignore_eos", "false"),
        ("detokenize", 1),
        ("n", 0),
        ("n", MAX_SAMPLES + 1),
        ("n", "2"),
        ("max_tokens", 2**63),
        ("min_tokens", 2**63),
        ("logprobs", 2**31),
        ("repetition_penalty", 1e-300),
        ("repetition_penalty", 1e39),
        ("temperature", 1j),
        ("temperature", [1.0]),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("output_kind", 1),
        ("output_kind", None),
    ],
)
def test_a_value_out_of_range_is_named_with_the_range(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    message = str(caught.value)
    assert message.startswith(f"{field}={value!r} is not allowed: it must be ")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"stop": ""}, "stop=''"),
        ({"stop": ["a", ""]}, "stop=''"),
        ({"stop": 3}, "stop=3"),
        ({"stop": b"a"}, "stop=b'a'"),
        ({"stop": {"a": 1}}, "stop={'a': 1}"),
        ({"stop": "\ud800"}, r"stop='\\ud800' .* UTF-8"),
        ({"stop": np.array(5)}, r"stop=array\(5\)"),
        ({"stop_token_ids": b"ab"}, "stop_token_ids=b'ab'"),
        ({"stop_token_ids": 2**63}, "stop_token_ids=9223372036854775808"),
        ({"stop_token_ids": (at // at for at in (1, 0))}, "ZeroDivisionError"),
        ({"bad_words": [""]}, "bad_words=''"),
        ({"bad_words": ["  "]}, "bad_words='  '"),
        ({"bad_words": [1]}, "bad_words=1"),
        ({"bad_words": ["a\udfff"]}, "bad_words='a.udfff'"),
        ({"allowed_token_ids": []}, r"allowed_token_ids=\[\] .* at least one"),
        ({"allowed_token_ids": ["5"]}, "allowed_token_ids='5'"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids=-1"),
        ({"allowed_token_ids": 5.0}, "allowed_token_ids=5.0"),
        ({"logit_bias": {2: 1e39}}, r"logit_bias\[2\]=1e\+39 .* float32"),
        ({"logit_bias": {2: -3.5e38}}, r"logit_bias\[2\]=-3.5e\+38 .* float32"),
        ({"logit_bias": {2: 10**400}}, r"logit_bias\[2\]=an integer of 1329 bits .* float32"),
        ({"logit_bias": {2**63: 1.0}}, r"logit_bias=9223372036854775808"),
        ({"temperature": 10**5000}, "temperature=an integer of 16610 bits"),
        ({"temperature": Fraction(10**400)}, "temperature=Fraction"),
        ({"stop_token_ids": [-1]}, "stop_token_ids=-1"),
        ({"stop_token_ids": "5"}, "stop_token_ids='5'"),
        ({"stop_token_ids": [True]}, "stop_token_ids=True"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias=-1"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias='5'"),
        ({"logit_bias": {5: math.nan}}, r"logit_bias\[5\]=nan"),
        ({"logit_bias": {5: "x"}}, r"logit_bias\[5\]='x'"),
        ({"logit_bias": [5]}, r"logit_bias=\[5\]"),
        ({"min_tokens": 17}, "min_tokens=17 is not allowed: it must be at most max_tokens=16"),
        ({"stop": "a", "detokenize": False}, "set detokenize=True, or use stop_token_ids"),
    ],
)
def test_items_and_combinations_are_checked(settings: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        SamplingParams(**settings)  # type: ignore[arg-type]


def test_the_edges_of_the_ranges_are_allowed() -> None:
    SamplingParams(
        temperature=0,
        top_p=1e-9,
        top_k=-1,
        min_p=1,
        repetition_penalty=1e-3,
        presence_penalty=-2,
        frequency_penalty=2,
        seed=-(2**63),
        max_tokens=1,
        min_tokens=1,
        logprobs=0,
        prompt_logprobs=0,
    )
    SamplingParams(seed=2**64 - 1, max_tokens=None, min_tokens=10**6)
    SamplingParams(max_tokens=2**63 - 1, min_tokens=2**63 - 1, n=MAX_SAMPLES)
    SamplingParams(logprobs=-1, prompt_logprobs=-1, truncate_prompt_tokens=-1)
    SamplingParams(logit_bias={0: 3.4e38, 1: -3.4e38})


def test_stops_are_read_as_tuples() -> None:
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=None).stop == ()
    assert SamplingParams(stop_token_ids=np.array([3, 4])).stop_token_ids == (3, 4)
    assert SamplingParams(stop_token_ids=5).stop_token_ids == (5,)


def test_a_top_k_beyond_any_vocabulary_means_all_of_it() -> None:
    assert SamplingParams(top_k=2**63).top_k == 2**63
    SamplingParams(top_k=10**5000).check_vocabulary(10)


def test_words_and_ids_are_read_as_tuples() -> None:
    params = SamplingParams(bad_words=["a", " b"], allowed_token_ids=np.array([3, 4, 3]))
    assert params.bad_words == ("a", " b")
    assert params.allowed_token_ids == (3, 4, 3)
    assert SamplingParams(bad_words="a").bad_words == ("a",)
    assert SamplingParams(allowed_token_ids=None).allowed_token_ids is None
    assert type(SamplingParams(stop=np.array(["a"])).stop[0]) is str


def test_a_message_stays_short() -> None:
    for settings in (
        {"stop_token_ids": "5" * 10**6},
        {"logit_bias": list(range(10**6))},
        {"top_p": "x" * 10**6},
        {"stop": ["a"] * 10**5, "detokenize": False},
    ):
        with pytest.raises(InvalidRequestError) as caught:
            SamplingParams(**settings)  # type: ignore[arg-type]
        assert len(str(caught.value)) < 300


def test_a_value_that_cannot_be_shown_is_refused_all_the_same() -> None:
    class Rude:
        def __repr__(self) -> str:
            raise RuntimeError

    with pytest.raises(InvalidRequestError, match=r"top_p=<.*Rude.*> is not allowed"):
        SamplingParams(top_p=Rude())  # type: ignore[arg-type]


def test_many_stop_strings_and_biases_cost_little() -> None:
    stop = [f"{number:x}" for number in range(10**5)]
    bias = dict.fromkeys(range(10**5), 1.0)
    params = SamplingParams(stop=stop, logit_bias=bias, stop_token_ids=range(10**5))
    params.check_vocabulary(10**5)
    assert (len(params.stop), len(params.stop_token_ids)) == (10**5, 10**5)


FIELDS = [field.name for field in dataclasses.fields(SamplingParams)]


@pytest.mark.parametrize("name", FIELDS)
def test_no_type_escapes_as_another_error(name: str) -> None:
    values = [
        None, True, 0, -1, 3, 10**30, -(10**30), 0.5, math.nan, -math.inf, 1j, "a", "", "\ud800",
        b"a", [], [None], ["a"], [1], [[1]], (), {}, {1: 2}, {"a": "b"}, {1: None}, {None: 1},
        set(), object(), int, np.float32(1), np.int64(-5), np.array([1.5]), np.array(1),
        np.array([[1]]), Fraction(1, 3), iter([object()]), range(3), RequestOutputKind.DELTA,
        SamplingParams(),
    ]  # fmt: skip
    for value in values:
        try:
            params = SamplingParams(**{name: value})
        except InvalidRequestError as error:
            assert name in str(error)
            continue
        params.check_vocabulary(2**62)
        assert pickle.loads(pickle.dumps(params)) == params
        assert dataclasses.replace(params) == params
        hash(params)


def test_numbers_become_plain_python_numbers() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        seed=np.uint64(2**63),  # type: ignore[arg-type]
        top_p=1,
    )
    assert type(params.temperature) is float
    assert type(params.seed) is int
    assert type(params.top_p) is float


def test_frozen_means_frozen() -> None:
    bias = {1: 2.0}
    stop = ["a"]
    params = SamplingParams(logit_bias=bias, stop=stop)
    bias[2] = 3.0
    stop.append("b")
    assert params.logit_bias == {1: 2.0}
    assert params.stop == ("a",)
    for field in ("temperature", "stop"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(params, field, "b")
    with pytest.raises(TypeError):
        SamplingParams(0.5)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("temprature", "'temprature': did you mean temperature?"),
        ("max_token", "'max_token': did you mean max_tokens?"),
        ("zzz", "'zzz': known are n, temperature, top_p"),
    ],
)
def test_a_name_that_is_none_is_refused_with_the_nearest(name: str, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"no sampling parameter {re.escape(words)}"):
        SamplingParams(**{"top_p": 0.5, name: 1})


def test_copies_are_equal() -> None:
    params = SamplingParams(
        stop="a",
        stop_token_ids=[1],
        logit_bias={3: 1},
        seed=7,
        bad_words=["no"],
        allowed_token_ids=[1, 2],
        output_kind=RequestOutputKind.DELTA,
    )
    assert pickle.loads(pickle.dumps(params)) == params
    assert copy.deepcopy(params) == params
    assert hash(copy.copy(params)) == hash(params)
    changed = dataclasses.replace(params, top_k=3)
    assert changed != params
    assert (changed.stop, changed.top_k) == (("a",), 3)
    assert dataclasses.replace(changed, top_k=0) == params
    with pytest.raises(InvalidRequestError, match="top_p=2"):
        dataclasses.replace(params, top_p=2)


def test_greedy_and_penalties() -> None:
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(repetition_penalty=1.1).has_penalties
    assert SamplingParams(presence_penalty=0.1).has_penalties
    assert SamplingParams(frequency_penalty=-0.1).has_penalties


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"stop_token_ids": [9, 10]}, "stop_token_ids=10 .* 0 to 9"),
        ({"logit_bias": {10: 1.0}}, "logit_bias=10 .* 0 to 9"),
        ({"logprobs": 11}, "logprobs=11 .* size, 10"),
        ({"prompt_logprobs": 11}, "prompt_logprobs=11 .* size, 10"),
        ({"allowed_token_ids": [3, 10, 4]}, "allowed_token_ids=10 .* 0 to 9"),
    ],
)
def test_a_vocabulary_has_an_end(settings: dict[str, object], named: str) -> None:
    params = SamplingParams(**settings)  # type: ignore[arg-type]
    params.check_vocabulary(11)
    with pytest.raises(InvalidRequestError, match=named):
        params.check_vocabulary(10)


def test_minus_one_asks_for_the_whole_vocabulary() -> None:
    params = SamplingParams(logprobs=-1, prompt_logprobs=3)
    params.check_vocabulary(10)
    assert (params.num_logprobs(10), params.num_prompt_logprobs(10)) == (10, 3)
    assert SamplingParams(prompt_logprobs=-1).num_prompt_logprobs(7) == 7
    assert SamplingParams().num_logprobs(10) is None
    assert SamplingParams().num_prompt_logprobs(10) is None


def test_twenty_logprobs_are_always_allowed_and_more_within_a_total() -> None:
    SamplingParams(logprobs=20, prompt_logprobs=20, n=9).check_sizes(10**6, 10**6, 50_000)
    whole = SamplingParams(prompt_logprobs=-1)
    whole.check_sizes(MAX_LOGPROB_ENTRIES // 50_000, 10**6, 50_000)
    with pytest.raises(
        InvalidRequestError, match=r"prompt_logprobs=-1 .* most 4096 for 2048 tokens"
    ):
        whole.check_sizes(2048, 16, 50_000)
    several = SamplingParams(logprobs=1000, n=10)
    several.check_sizes(10**6, MAX_LOGPROB_ENTRIES // 10_000, 50_000)
    with pytest.raises(InvalidRequestError, match=r"logprobs=1000 .* 10 x 839 tokens"):
        several.check_sizes(1, 839, 50_000)


def test_a_prompt_is_cut_from_the_left() -> None:
    ids = list(range(10))
    assert SamplingParams().truncated(ids, 5) is ids
    assert SamplingParams(truncate_prompt_tokens=3).truncated(ids, 5) == [7, 8, 9]
    assert SamplingParams(truncate_prompt_tokens=10**30).truncated(ids, 5) is ids
    assert SamplingParams(truncate_prompt_tokens=-1).truncated(ids, 4) == [6, 7, 8, 9]
    assert SamplingParams(truncate_prompt_tokens=-1).truncated(ids, 10) is ids


def test_errors_can_be_caught_as_ours_and_as_value_errors() -> None:
    for kind in (PyEngineError, ValueError):
        with pytest.raises(kind):
            SamplingParams(top_p=0)


def test_plain_data_imports_nothing_heavy() -> None:
    code = (
        "import sys, types\n"
        "package = types.ModuleType('pyengine')\n"
        "package.__path__ = [sys.argv[1]]\n"
        "sys.modules['pyengine'] = package\n"
        "import pyengine.sampling_params, pyengine.outputs, pyengine.config\n"
        "heavy = {'numpy', 'torch', 'transformers', 'pyengine._kv'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)\n"
    )
    import pyengine

    run_python(code, next(iter(pyengine.__path__)))
