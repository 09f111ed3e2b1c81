"""Print the requirements of one group of pyproject.toml, one a line: `engine`, `dev` or `build`.

The Makefile installs them before anything is built, so that pyproject.toml stays the only
place that lists them.
"""

import sys
import tomllib
from pathlib import Path


def main(group: str) -> None:
    """Print `build-system.requires`, or the base dependencies followed by those of an extra."""
    settings = tomllib.loads(Path("pyproject.toml").read_text())
    project = settings["project"]
    if group == "build":
        lines = settings["build-system"]["requires"]
    else:
        lines = project["dependencies"] + project["optional-dependencies"][group]
    print("\n".join(lines))


if __name__ == "__main__":
    main(sys.argv[1])
