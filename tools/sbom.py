"""Print the crates of the extension in a Linux wheel, as CycloneDX.

    python tools/sbom.py dist > pyengine-kv.cdx.json

maturin writes the list into each wheel. Names are printed without the build folder.
"""

import sys
import zipfile
from pathlib import Path


def sbom(folder: Path) -> str:
    """The list in the first Linux wheel of a folder."""
    wheel = next(iter(sorted(folder.glob("*manylinux*.whl"))), None)
    if wheel is None:
        raise SystemExit(f"{folder} has no wheel for Linux: make wheels PLATFORMS=linux-x86_64")
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith(".cyclonedx.json")]
    root = f"{Path(__file__).resolve().parents[1]}/"
    return archive.read(name).decode().replace(f"file://{root}", "file://")


if __name__ == "__main__":
    print(sbom(Path(sys.argv[1])))
