"""docs/guides/coming-from-vllm.md names everything that a user of vLLM may look for."""

import dataclasses
import inspect
import re

import pytest

from pyengine import errors, outputs
from pyengine.async_engine import AsyncEngine
from pyengine.config import EngineSettings
from pyengine.llm import LLM
from pyengine.sampling_params import SamplingParams
from tests.support.docs import ROOT, table

DOCUMENT = "docs/guides/coming-from-vllm.md"
ABSENT = "missing"


def fields(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def public(kind: type) -> list[str]:
    return [name for name, _ in inspect.getmembers(kind, inspect.isfunction) if name[0] != "_"]


def rows(*header: str) -> list[list[str]]:
    found = table(DOCUMENT, *header)
    assert found, header
    return found


def there(found: list[list[str]]) -> list[str]:
    """The names in the first column that are not said to be missing here."""
    return [name for name, said, *_ in found if said != ABSENT]


def test_every_sampling_parameter_is_there_and_the_missing_ones_are() -> None:
    said = rows("field", "here")
    ours = fields(SamplingParams)
    assert len(ours) > 20
    assert there(said) == ours
    assert {kind for _, kind, _ in said} == {"same", "differs", ABSENT}
    assert not {name for name, kind, _ in said if kind == ABSENT} & set(ours)


def test_every_setting_is_there_and_the_missing_ones_are() -> None:
    said = rows("setting", "vLLM")
    ours = fields(EngineSettings)
    assert len(ours) > 20
    assert there(said) == ours
    missing = {name for name, kind, _ in said if kind == ABSENT}
    assert missing
    assert not missing & set(ours)


def test_every_method_of_llm_is_there_and_the_missing_ones_are() -> None:
    said = rows("method", "vLLM")
    ours = public(LLM)
    assert len(ours) > 8
    assert sorted(there(said)) == sorted(ours)
    assert not {name for name, kind, _ in said if kind == ABSENT} & set(ours)


def test_every_method_of_the_async_engine_is_there() -> None:
    said = re.findall(r"\w+", " ".join(map(" ".join, rows("AsyncEngine", "AsyncLLM"))))
    ours = public(AsyncEngine)
    assert len(ours) > 8
    assert set(ours) <= set(said)


@pytest.mark.parametrize(
    "kind", [outputs.RequestOutput, outputs.CompletionOutput, outputs.RequestMetrics]
)
def test_every_field_of_results_is_there(kind: type) -> None:
    said = [name for name, of, _ in rows("field", "of") if of == kind.__name__]
    properties = [name for name, item in vars(kind).items() if isinstance(item, property)]
    assert said == [*fields(kind), *properties]


def test_every_error_is_there() -> None:
    ours = [
        name
        for name, item in vars(errors).items()
        if inspect.isclass(item) and issubclass(item, errors.PyEngineError)
    ]
    said = [name for name, *_ in rows("error", "vLLM")]
    assert len(ours) > 8
    assert said == [name for name in ours if name != "PyEngineError"]


def test_numbers_are_those_of_the_code() -> None:
    text = (ROOT / DOCUMENT).read_text(encoding="utf-8")
    settings = EngineSettings()
    assert f"| `max_num_seqs` | same | {settings.max_num_seqs}; " in text
    assert f"| `max_num_batched_tokens` | same | {settings.max_num_batched_tokens:,}; " in text
    assert f"| `gpu_memory_utilization` | differs | {settings.gpu_memory_utilization} of " in text


@pytest.mark.parametrize("page", ["README.md", "docs/guides/engine.md"])
def test_other_pages_link_here(page: str) -> None:
    assert "coming-from-vllm.md)" in (ROOT / page).read_text(encoding="utf-8")
