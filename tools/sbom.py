"""Print the list of crates that the extension of a Linux wheel was built of, as CycloneDX.

    python tools/sbom.py dist > pyengine-kv.cdx.json

maturin writes it into each wheel. The folder that it was built in is left out of the names.
"""

import sys
import zipfile
from pathlib import Path


def sbom(folder: Path) -> str:
    """The text of the list in the first Linux wheel of a folder."""
    wheel = next(iter(sorted(folder.glob("*manylinux*.whl"))), None)
    if wheel is None:
        raise SystemExit(f"{folder} has no wheel for Linux: make wheels PLATFORMS=linux-x86_64")
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith(".cyclonedx.json")]
    root = f"{Path(__file__).resolve().parents[1]}/"
    return archive.read(name).decode().replace(f"file://{root}", "file://")


if __name__ == "__main__":
    print(sbom(Path(sys.argv[1])))
