"""What the caller named as the model, resolved to a local folder."""

from dataclasses import dataclass
from pathlib import Path

from pyengine.core.errors import ModelLoadError
from pyengine.models import embedded
from pyengine.models.gguf import converted_gguf

_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model folder on this machine, and the name to call the model by."""

    folder: Path
    name: str


def resolve_source(model: str | Path | None) -> ModelSource:
    """Find, convert or download what `model` names.

    - `None`: the embedded default.
    - a `.gguf` file: converted once, then its folder.
    - a folder: as it is.
    - anything else of the form `name` or `owner/name`: a Hugging Face id.

    Raises `ModelLoadError` where nothing is found, with what was looked for.
    """
    if model is None:
        return ModelSource(embedded.embedded_model(), embedded.NAME)
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelLoadError(
                f"{path} is no model folder: it has no config.json; "
                "name the folder that holds config.json and the weights"
            )
        return ModelSource(path.resolve(), path.resolve().name)
    if path.is_file():
        return ModelSource(converted_gguf(path), path.stem)
    if isinstance(model, Path) or not _is_hub_id(model):
        raise ModelLoadError(
            f"there is no model at {str(model)!r}: neither a folder nor a .gguf file "
            f"(looked from {Path.cwd()}); give a path, a Hugging Face id, or nothing for the "
            f"default, {embedded.NAME}"
        )
    return ModelSource(_download(model), model)


def _is_hub_id(name: str) -> bool:
    parts = name.split("/")
    if len(parts) > 2 or name.endswith((".gguf", ".safetensors")):
        return False
    return all(part and not part.startswith((".", "~")) for part in parts)


def _download(name: str) -> Path:
    """The local snapshot of a Hugging Face model, downloaded if it is not there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelLoadError(
            f"the model {name!r} is neither a local folder nor could it be fetched from the "
            f"Hugging Face hub: {reason[0]}"
        ) from error
