"""`pyengine info`: what is installed, what it would run on, and why."""

import platform
from importlib.metadata import PackageNotFoundError, version

import typer

from pyengine.cli import options as opt
from pyengine.cli.backend import EngineOptions, factory_of
from pyengine.cli.guard import guarded
from pyengine.cli.rows import print_rows

PACKAGES = ("pyengine", "numpy", "torch", "transformers", "tokenizers", "safetensors", "gguf")


def info(
    context: typer.Context,
    *,
    model: opt.Model = None,
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
    attention_backend: opt.AttentionBackend = "auto",
    block_size: opt.BlockSize = None,
    kv_cache_dtype: opt.KvCacheDtype = "auto",
    num_blocks: opt.NumBlocks = None,
    layer_groups: opt.LayerGroups = True,
    tensor_parallel_size: opt.TensorParallelSize = 1,
) -> None:
    """Print versions, then open the model and print device, attention backend and why."""
    with guarded():
        versions = _versions()
        print_rows("versions", versions)
        engine = factory_of(context)(
            EngineOptions(
                model=model,
                device=device,
                dtype=dtype,
                attention_backend=attention_backend,
                block_size=block_size,
                kv_cache_dtype=kv_cache_dtype,
                num_blocks=num_blocks,
                layer_groups=layer_groups,
                tensor_parallel_size=tensor_parallel_size,
            )
        )
        rows = {key: value for key, value in engine.describe().items() if key not in versions}
        print_rows("engine", {"model_path": engine.model_path, **rows})


def _versions() -> dict[str, object]:
    found: dict[str, object] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
