"""`make release-check`, `release-notes`, and what workflows and deploy/ repeat of the sources."""

import re
import tomllib
from pathlib import Path

import pytest

from tests.support.docs import ROOT
from tools.release import main, notes, problems, versions

CHANGELOG = """# Changelog

## Unreleased

- later

## 1.2.0 - 2026-01-02

- new

## 1.1.0 - 2025-01-01

- old

## 1.0.0 (unreleased)

- not yet
"""


def sources(folder: Path, version: str = "1.2.0") -> Path:
    (folder / "CHANGELOG.md").write_text(CHANGELOG)
    (folder / "Cargo.toml").write_text(
        '[workspace.package]\nversion = "1.2.0"\n[workspace.dependencies]\n'
        f'core = {{ path = "core", version = "{version}" }}\ntests = {{ path = "tests" }}\n'
    )
    return folder


def test_a_release_whose_versions_agree_is_ready(tmp_path: Path) -> None:
    assert problems(sources(tmp_path), "v1.2.0") == []
    assert notes(tmp_path, "1.2.0") == "- new"
    assert notes(tmp_path, "1.1.0") == "- old"
    assert notes(tmp_path, "1.0.0") is None


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    wrong = problems(sources(tmp_path, "1.1.0"), "v1.3.0")
    assert len(wrong) == 3
    assert wrong[0] == "workspace.package of Cargo.toml has 1.2.0, the tag 1.3.0"
    assert "dependencies.core of Cargo.toml has 1.1.0" in wrong[1]
    assert "CHANGELOG.md has no part '## 1.3.0 - DATE'" in wrong[2]
    assert problems(tmp_path, "1.2.0") == ["the tag is '1.2.0', not v and three numbers"]


def test_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("check", "v99.0.0") == 1
    assert "Cargo.toml" in capsys.readouterr().out
    assert main("notes", "v99.0.0") == 1


def test_each_version_has_highlights_and_details() -> None:
    parts = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ")[1:]
    for part in parts:
        highlights, *kinds = part.split("\n### ")
        assert len(re.findall(r"^- \*\*", highlights, re.M)) == highlights.count("\n- ") == 5
        assert {kind.partition("\n")[0] for kind in kinds} <= {
            *("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"),
        }
    details = (ROOT / "docs/reference/changes.md").read_text(encoding="utf-8")
    versions_there = [part.partition("\n")[0] for part in details.split("\n## ")[1:]]
    assert versions_there == [part.partition("\n")[0] for part in parts]


def test_the_crates_name_each_other_by_one_version() -> None:
    assert len(set(versions(ROOT).values())) == 1
    assert len(versions(ROOT)) > 5


def test_deploy_repeats_what_the_sources_say() -> None:
    dockerfile = (ROOT / "deploy/Dockerfile").read_text(encoding="utf-8")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (embedded,) = settings["dependency-groups"]["embedded"]
    assert f"ARG EMBEDDED_MODEL={embedded}\n" in dockerfile
    project = settings["project"]
    (torch,) = [r for r in project["optional-dependencies"]["torch"] if r.startswith("torch")]
    assert f"'{torch}'" in dockerfile
    version = versions(ROOT)["workspace.package"]
    kubernetes = (ROOT / "deploy/kubernetes/pyengine.yaml").read_text(encoding="utf-8")
    assert f"image: pyengine:{version}\n" in kubernetes


def test_workflows_call_targets_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z0-9-]+):.*## ", makefile, re.M)) | {"valgrind"}
    called = {
        target
        for file in (ROOT / ".github/workflows").glob("*.yml")
        for target in re.findall(
            r"(?:run: |sudo |^ +)make (?:--silent )?([a-z0-9-]+)", file.read_text("utf-8"), re.M
        )
    }
    assert {"test", "check", "wheels", "docs", "deny", "release-check", "release-notes"} <= called
    assert called <= targets
