"""docs/guides/engine.md: nothing that users call is left out."""

import inspect

import pytest

from pyengine import LLM, AsyncEngine, errors
from pyengine.engine.stats import EngineObserver
from pyengine.sampling_params import RequestOutputKind
from tests.support.docs import ROOT, table

DOCUMENT = "docs/guides/engine.md"
TEXT = (ROOT / DOCUMENT).read_text(encoding="utf-8")


def test_every_kind_of_output_is_explained() -> None:
    assert [row[0] for row in table(DOCUMENT, "kind")] == [kind.name for kind in RequestOutputKind]


def test_what_users_call_is_named() -> None:
    names = [*vars(AsyncEngine), "generate", "generate_iter", "chat", "stream", "stats", "observe"]
    public = [name for name in names if not name.startswith("_")]
    assert len(public) > 8
    assert not [name for name in public if name not in TEXT]
    parameters = inspect.signature(AsyncEngine.generate).parameters
    assert {"priority", "deadline", "request_id"} < set(parameters)
    assert not [name for name in ("priority", "deadline") if f"`{name}`" not in TEXT]
    hooks = [name for name in vars(EngineObserver) if name.startswith("on_")]
    assert hooks
    assert not [name for name in hooks if f"def {name}(" not in TEXT]
    assert not [name for name in ("generate_iter", "stream") if not hasattr(LLM, name)]


def test_errors_of_running_requests_are_named() -> None:
    named = " ".join(row[1] for row in table(DOCUMENT, "failure", "the error goes to"))
    for error in (
        errors.InvalidRequestError,
        errors.RequestFailedError,
        errors.DeviceMemoryError,
        errors.EngineDeadError,
    ):
        assert error.__name__ in named
    for error in (errors.QueueFullError, errors.EngineClosedError):
        assert error.__name__ in TEXT


@pytest.mark.parametrize("page", ["README.md", "docs/explanation/architecture.md"])
def test_other_pages_link_here(page: str) -> None:
    assert "engine.md)" in (ROOT / page).read_text(encoding="utf-8")
