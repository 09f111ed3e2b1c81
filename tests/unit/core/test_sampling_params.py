import copy
import dataclasses
import math
import pickle
import subprocess
import sys

import numpy as np
import pytest

from pyengine.core.errors import InvalidRequestError, PyEngineError
from pyengine.core.sampling_params import SamplingParams


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
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("min_tokens", -1),
        ("min_tokens", None),
        ("logprobs", -1),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", True),
        ("ignore_eos", "false"),
        ("detokenize", 1),
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
        ({"stop": b"a"}, "stop=97"),
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


def test_stops_are_read_as_tuples() -> None:
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=None).stop == ()
    assert SamplingParams(stop_token_ids=np.array([3, 4])).stop_token_ids == (3, 4)
    assert SamplingParams(stop_token_ids=5).stop_token_ids == (5,)


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


def test_copies_are_equal() -> None:
    params = SamplingParams(stop="a", stop_token_ids=[1], logit_bias={3: 1}, seed=7)
    assert pickle.loads(pickle.dumps(params)) == params
    assert copy.deepcopy(params) == params
    assert hash(copy.copy(params)) == hash(params)
    changed = dataclasses.replace(params, top_k=3)
    assert changed != params
    assert (changed.stop, changed.top_k) == (("a",), 3)


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
    ],
)
def test_a_vocabulary_has_an_end(settings: dict[str, object], named: str) -> None:
    params = SamplingParams(**settings)  # type: ignore[arg-type]
    params.check_vocabulary(11)
    with pytest.raises(InvalidRequestError, match=named):
        params.check_vocabulary(10)


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
        "import pyengine.core\n"
        "heavy = {'numpy', 'torch', 'transformers', 'pyengine._kv'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)\n"
    )
    import pyengine

    done = subprocess.run(
        [sys.executable, "-c", code, next(iter(pyengine.__path__))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
