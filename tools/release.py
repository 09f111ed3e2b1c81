"""Check that the sources are ready for a release: one version, and a part of the changelog.

python tools/release.py check v1.2.3
python tools/release.py notes v1.2.3
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
_HEADING = re.compile(r"## (?P<version>\d+\.\d+\.\d+) - \d{4}-\d\d-\d\d")


def versions(root: Path) -> dict[str, str]:
    """The version of the workspace, and the versions in its dependencies."""
    workspace = tomllib.loads((root / "Cargo.toml").read_text(encoding="utf-8"))["workspace"]
    found = {"workspace.package": workspace["package"]["version"]}
    for name, dependency in workspace["dependencies"].items():
        if "path" in dependency and "version" in dependency:
            found[f"workspace.dependencies.{name}"] = dependency["version"]
    return found


def notes(root: Path, version: str) -> str | None:
    """The changelog's part on a version; None without one."""
    text = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    for part in re.split(r"^(?=## )", text, flags=re.MULTILINE):
        heading, _, rest = part.partition("\n")
        found = _HEADING.fullmatch(heading)
        if found is not None and found["version"] == version:
            return rest.strip()
    return None


def problems(root: Path, tag: str) -> list[str]:
    """The reasons why the sources are not ready for the tag."""
    if re.fullmatch(r"v\d+\.\d+\.\d+", tag) is None:
        return [f"the tag is {tag!r}, not v and three numbers"]
    version = tag.removeprefix("v")
    wrong = [
        f"{place} of Cargo.toml has {found}, the tag {version}"
        for place, found in versions(root).items()
        if found != version
    ]
    if not notes(root, version):
        wrong.append(f"CHANGELOG.md has no part '## {version} - DATE'")
    return wrong


def main(command: str, tag: str) -> int:
    """Print the problems, or the notes."""
    wrong = problems(ROOT, tag)
    if command == "check":
        print("\n".join(wrong) or f"{tag}: ready")
        return int(bool(wrong))
    text = notes(ROOT, tag.removeprefix("v"))
    print(text or f"CHANGELOG.md says nothing of {tag}")
    return int(text is None)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
