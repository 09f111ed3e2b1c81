"""From settings to an engine: what requests get by default, and what it tells of itself."""

from dataclasses import dataclass
from typing import Any

import pytest

from pyengine.core.sampling_params import SamplingParams
from pyengine.core.settings import EngineSettings
from pyengine.engine import builder


@dataclass
class Loaded:
    """As much of a loaded model as the defaults are read from."""

    default_sampling: dict[str, Any]


def test_requests_without_parameters_take_those_of_the_model() -> None:
    loaded: Any = Loaded({"temperature": 0.6, "top_p": 0.9})
    params = builder.default_params(EngineSettings(), loaded)
    assert params == SamplingParams(temperature=0.6, top_p=0.9)
    assert builder.about_sampling(EngineSettings(), params) == "auto: temperature=0.6, top_p=0.9"


@pytest.mark.parametrize("value", ["none", "vllm"])
def test_or_our_own_if_that_was_asked_for(value: str) -> None:
    settings = EngineSettings(generation_config=value)
    loaded: Any = Loaded({"temperature": 0.6})
    params = builder.default_params(settings, loaded)
    assert params == SamplingParams()
    assert builder.about_sampling(settings, params) == f"{value}: the defaults of SamplingParams"
