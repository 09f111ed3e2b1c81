"""The modules of flashinfer that a run needs, and their compilation without a GPU.

    python -m benches.gpu.first_run.modules FOLDER [NAME ...]

It needs flashinfer, torch, nvcc (CUDA_HOME), ninja and g++. Each module becomes
FOLDER/MODULE/MODULE.so: the layout in which flashinfer looks for prebuilt modules.
"""

import os
import shutil
import sys
from importlib import import_module
from pathlib import Path
from time import monotonic
from typing import Any

ARCHITECTURE = "9.0a"
"""Hopper: H100 and H200."""
PREBUILT = ("fa2-128", "cascade", "fa2-128-window")
"""Llama-3.1-8B and Qwen3-0.6B need the first two, layers with a sliding window the last."""


def spec(name: str) -> Any:
    """flashinfer's build specification for `cascade` or `KIND-HEAD_DIM[-window][-cap]`."""
    import torch

    attention: Any = import_module("flashinfer.jit.attention")
    cascade: Any = import_module("flashinfer.jit.cascade")

    if name == "cascade":
        return cascade.gen_cascade_module()
    kind, head_dim, *options = name.split("-")
    dtypes = [torch.bfloat16] * 3
    sizes = [int(head_dim)] * 2
    has_window, has_cap = "window" in options, "cap" in options
    return attention.gen_batch_prefill_module(
        kind, *dtypes, torch.int32, *sizes, 0, has_window, has_cap, False
    )


def build(name: str, folder: Path) -> Path:
    """Compile a module into `folder`; return the path of the library."""
    module = spec(name)
    target = folder / module.name / f"{module.name}.so"
    if not target.exists():
        module.build(verbose=False)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(module.jit_library_path, target)
    return target


def main(folder: str, *names: str) -> None:
    """Compile modules for Hopper; print the size of each."""
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = ARCHITECTURE
    import torch

    torch.cuda.get_device_capability = lambda *_: (9, 0)  # flashinfer asks on import
    for name in names or PREBUILT:
        begin = monotonic()
        size = build(name, Path(folder)).stat().st_size
        print(f"{name}: {size >> 10} KiB, {monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
