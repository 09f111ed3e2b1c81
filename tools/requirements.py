"""Print the requirements of one extra or group of pyproject.toml, one a line, or those of `build`.

The Makefile installs them before it builds anything, so that only pyproject.toml lists them.
"""

import sys
import tomllib
from pathlib import Path


def main(group: str) -> None:
    """Print `build-system.requires`, a dependency group, or the base dependencies and an extra."""
    settings = tomllib.loads(Path("pyproject.toml").read_text())
    project = settings["project"]
    if group == "build":
        lines = settings["build-system"]["requires"]
    elif group in settings["dependency-groups"]:
        lines = settings["dependency-groups"][group]
    else:
        lines = project["dependencies"] + project["optional-dependencies"][group]
    print("\n".join(lines))


if __name__ == "__main__":
    main(sys.argv[1])
