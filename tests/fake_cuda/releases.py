"""The releases that `make gpu-tests` installs: of torch, and of attention libraries the oldest
supported and the newest.
"""

import os
import sys
from pathlib import Path

import torch

from pyengine.attention.needs import torch_version

NEWEST = Path(sys.prefix) / "newest"
"""The newest flashinfer, which comes before the installed one on `PYTHONPATH`."""
FLASH_ATTN = {name: Path(sys.prefix) / "flash-attn" / name for name in ("oldest", "newest")}
"""The sources of flash-attn, whose kernels are not built."""
_LEAST_TORCH = {"varlen": (2, 12), "cudnn": (2, 15)}


def torch_obstacle(backend: str) -> str | None:
    """The words with which `backend` refuses every model under this torch; None: it serves."""
    least = _LEAST_TORCH.get(backend)
    if least is None or torch_version(torch.__version__) >= least:
        return None
    return f"from torch {least[0]}.{least[1]} on"


def with_newest() -> dict[str, str]:
    """An environment in which the newest releases are imported."""
    assert (NEWEST / "flashinfer").is_dir(), f"run these tests by `make gpu-tests`: no {NEWEST}"
    inherited = os.environ.get("PYTHONPATH")
    folders = [str(NEWEST), str(FLASH_ATTN["newest"]), *([inherited] if inherited else [])]
    return {"PYTHONPATH": os.pathsep.join(folders)}
