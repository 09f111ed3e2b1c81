"""`pyengine pull` and `pyengine list`."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pyengine.cli.app import app
from pyengine.errors import ModelLoadError
from tests.support.checkpoints import save_tiny
from tests.unit.models.tiny_gguf import write_tiny_gguf


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an empty cache of the hub's client. The default model is not installed."""
    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))

    def missing() -> Path:
        raise ModelLoadError("not installed")

    monkeypatch.setattr("pyengine.models.source.embedded_gguf", missing)
    return folder


def downloaded(hub: Path, name: str, commit: str = "a" * 40) -> Path:
    """The folder in which the hub's client keeps a revision of a model."""
    repository = hub / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs/main").write_text(commit)
    (repository / "blobs").mkdir(exist_ok=True)
    folder = repository / "snapshots" / commit
    folder.mkdir(parents=True)
    return folder


def test_local_models_have_a_size_and_say_whether_they_run(hub: Path) -> None:
    save_tiny(downloaded(hub, "owner/good"))
    broken = downloaded(hub, "owner/broken")
    save_tiny(broken)
    (broken / "config.json").write_text('{"model_type": "mamba"}')
    (downloaded(hub, "owner/dataset").parents[1]).rename(hub / "datasets--owner--dataset")
    found = {each["name"]: each for each in json.loads(run("list", "--json").stdout)}
    assert found.keys() == {"owner/good", "owner/broken"}
    assert found["owner/good"]["refusal"] is None
    assert found["owner/good"]["size"] > 0 and not found["owner/good"]["is_default"]
    assert found["owner/broken"]["refusal"]
    shown = run("list").stdout
    assert "  runs\n" in shown and "does not run:" in shown


def test_gguf_files_of_the_hub_are_named_as_models_are(hub: Path) -> None:
    folder = downloaded(hub, "owner/good-GGUF")
    write_tiny_gguf(folder / "good-Q8_0.gguf", kind="Q8_0")
    (folder / "text.gguf").write_text("no model")
    found = {each["name"]: each for each in json.loads(run("list", "--json").stdout)}
    assert found.keys() == {"owner/good-GGUF:good-Q8_0.gguf", "owner/good-GGUF:text.gguf"}
    assert found["owner/good-GGUF:good-Q8_0.gguf"]["refusal"] is None
    assert "is not a GGUF file" in found["owner/good-GGUF:text.gguf"]["refusal"]


def test_pull_needs_a_name() -> None:
    result = run("pull")
    assert result.exit_code == 2 and "no model is named: `pyengine pull Qwen/" in result.stderr


def test_pull_downloads_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, kind="Q8_0")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    for words in (["owner/name:tiny.gguf"], ["-hf", "owner/name:tiny.gguf"]):
        result = run("pull", *words)
        assert (result.exit_code, result.stdout) == (0, f"{path}\n"), result.stderr
        assert result.stderr.startswith("looking for owner/name:tiny.gguf ...\n")


def test_the_default_model_is_the_file_in_its_wheel(
    hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = hub.parent / "default.gguf"
    file.write_bytes(bytes(10))
    monkeypatch.setattr("pyengine.models.source.embedded_gguf", lambda: file)
    shown = run("list").stdout
    assert "10 bytes  runs; the default\n" in shown and shown.count("the default") == 1
    found = {each["name"]: each["is_default"] for each in json.loads(run("list", "--json").stdout)}
    assert found == {str(file): True}


def test_no_models(hub: Path) -> None:
    result = run("list")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == "no models: `pyengine help models` names some\n"
    hub.rmdir()
    assert json.loads(run("list", "--json").stdout) == []


def test_pull_prints_the_folder_of_a_model_that_runs(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    result = run("pull", str(tmp_path))
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path}\n")
    assert "the engine can run it" in result.stderr


def test_pull_prints_a_gguf_file_that_runs(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, kind="Q8_0")
    result = run("pull", str(path))
    assert (result.exit_code, result.stdout) == (0, f"{path}\n")
    assert "the engine can run it" in result.stderr
    assert [*tmp_path.iterdir()] == [path]


def test_pull_fails_for_a_model_that_the_engine_cannot_run(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "bert"}))
    result = run("pull", str(tmp_path))
    assert result.exit_code == 1
    assert f"{tmp_path.name} is in {tmp_path}, but " in result.stderr


def test_without_the_network_a_sentence_says_so(hub: Path) -> None:
    result = run("pull", "owner/none")
    assert result.exit_code == 1
    assert "the model 'owner/none' is neither a local folder nor could it be" in result.stderr
    assert result.stderr.count("\n") == 2
    assert "HF_HUB_OFFLINE=1" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_path_that_is_not_there(hub: Path) -> None:
    result = run("pull", "./none.gguf")
    assert result.exit_code == 1
    assert "there is no model at './none.gguf'" in result.stderr
