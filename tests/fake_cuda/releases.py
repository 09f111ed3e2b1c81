"""The attention libraries that `make gpu-tests` installs: the oldest supported, and the newest."""

import os
import sys
from pathlib import Path

NEWEST = Path(sys.prefix) / "newest"
"""The newest flashinfer, which comes before the installed one on `PYTHONPATH`."""
FLASH_ATTN = {name: Path(sys.prefix) / "flash-attn" / name for name in ("oldest", "newest")}
"""The sources of flash-attn, whose kernels are not built."""


def with_newest() -> dict[str, str]:
    """An environment in which the newest releases are imported."""
    assert (NEWEST / "flashinfer").is_dir(), f"run these tests by `make gpu-tests`: no {NEWEST}"
    inherited = os.environ.get("PYTHONPATH")
    folders = [str(NEWEST), str(FLASH_ATTN["newest"]), *([inherited] if inherited else [])]
    return {"PYTHONPATH": os.pathsep.join(folders)}
