"""Folders appear complete or not at all."""

import tempfile
import threading
from pathlib import Path

import pytest

from pyengine.errors import ModelLoadError
from pyengine.models.checkpoint_files import build_once, cache_root


def test_the_root_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("PYENGINE_CACHE", str(tmp_path / "mine"))
    assert cache_root() == tmp_path / "mine"
    monkeypatch.delenv("PYENGINE_CACHE")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "pyengine"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_root() == tmp_path / "home" / ".cache" / "pyengine"


def test_a_folder_is_built_once(tmp_path):
    calls = []

    def build(folder):
        calls.append(folder)
        (folder / "file").write_text("x")

    target = tmp_path / "deep" / "model"
    assert build_once(target, build) == build_once(target, build) == target
    assert len(calls) == 1
    assert (target / "file").read_text() == "x"
    assert [p.name for p in target.parent.iterdir()] == ["model"]


def test_a_build_that_fails_leaves_nothing(tmp_path):
    def build(folder):
        (folder / "half").write_text("x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_once(tmp_path / "model", build)
    assert list(tmp_path.iterdir()) == []


def test_the_first_of_two_builders_wins(tmp_path):
    target, both_inside = tmp_path / "model", threading.Barrier(2)
    results = []

    def build(folder):
        both_inside.wait(10)
        (folder / "who").write_text(folder.name)

    threads = [
        threading.Thread(target=lambda: results.append(build_once(target, build))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert results == [target, target]
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    assert len((target / "who").read_text()) > 0


def test_a_folder_that_another_builder_takes_for_abandoned_is_made_again(tmp_path, monkeypatch):
    made = []

    def mkdtemp(**place):
        made.append(Path(real(**place)))
        if len(made) == 1:
            made[0].rmdir()  # before it is locked
        return str(made[-1])

    real = tempfile.mkdtemp
    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    target = build_once(tmp_path / "model", lambda folder: (folder / "file").touch())
    assert [path.name for path in target.iterdir()] == ["file"]
    assert len(made) == 2


def test_a_cache_that_cannot_be_written_is_named_with_the_way_out(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelLoadError, match=r"file.* set PYENGINE_CACHE to a writable folder"):
        build_once(tmp_path / "file" / "model", lambda folder: None)
