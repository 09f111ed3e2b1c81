"""`pyengine pull` and `pyengine list`: models on this machine."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from pyengine.cli.backend import libraries
from pyengine.cli.display import size_text, wrapped
from pyengine.cli.options import Json, ModelArgument, ModelOption, guarded, named_model
from pyengine.cli.terminal import note, write
from pyengine.errors import InvalidRequestError, ModelLoadError, PyEngineError

MODELS = (
    ("Qwen/Qwen3-0.6B-GGUF:Qwen3-0.6B-Q8_0.gguf", "0.6 GB", "2 GB"),
    ("Qwen/Qwen3-4B-GGUF:Qwen3-4B-Q4_K_M.gguf", "2.5 GB", "5 GB"),
    ("Qwen/Qwen3-8B-GGUF:Qwen3-8B-Q4_K_M.gguf", "5.0 GB", "8 GB"),
)
"""Models to start with: their size and the memory that they need."""


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this machine: the name that opens it, its bytes, why the engine refuses it."""

    name: str
    folder: str
    size: int
    refusal: str | None
    is_default: bool = False


def pull(
    context: typer.Context,
    argument: ModelArgument = None,
    model: ModelOption = None,
    revision: Annotated[
        str | None,
        typer.Option(help="Branch, tag or commit; default: the newest."),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(help="Access token for gated models; default: the variable HF_TOKEN."),
    ] = None,
) -> None:
    """Download a model, and check that the engine can run it; status 1 if not."""
    with guarded():
        named = named_model(context, argument, model)
        if named is None:
            raise InvalidRequestError(f"no model is named: `pyengine pull {MODELS[0][0]}`")
        with libraries():
            note(f"looking for {named} ...", dim=True)
            from pyengine.models.loader import checked_source
        source = checked_source(named, revision=revision, token=token)
        size = source.path.stat().st_size if source.is_gguf else _size(source.path)
        write(f"{source.path}\n")
        note(f"{source.name}: {size_text(size)}; the engine can run it")


def list_models(as_json: Json = False) -> None:
    """Print the models on this machine, their sizes, and whether the engine can run them."""
    with guarded():
        with libraries():
            import pyengine.models.loader  # noqa: F401
        models = sorted([*_embedded(), *_of_the_hub()], key=lambda model: model.name)
        if as_json:
            write(json.dumps([*map(asdict, models)], indent=2) + "\n")
            return
        if not models:
            note("no models: `pyengine help models` names some")
        width = max((len(model.name) for model in models), default=0)
        for model in models:
            state = "runs" if model.refusal is None else f"does not run: {model.refusal}"
            state += "; the default" if model.is_default else ""
            write(f"{model.name:<{width}}  {size_text(model.size):>10}  ")
            write(wrapped(state, indent=4) + "\n")


def _embedded() -> Iterator[LocalModel]:
    """The default model, if its wheel is installed."""
    from pyengine.models.source import embedded_gguf

    with suppress(ModelLoadError):
        file = embedded_gguf()
        yield LocalModel(str(file), str(file), file.stat().st_size, None, is_default=True)


def _of_the_hub() -> Iterator[LocalModel]:
    """Models in the cache of the hub's client; each in its newest revision."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return
    for repository in repositories:
        if repository.repo_type == "model" and repository.revisions:
            newest = max(repository.revisions, key=lambda revision: revision.last_modified)
            folder, name = newest.snapshot_path, repository.repo_id
            files = sorted(folder.rglob("*.gguf"))
            for path in files:
                size, inner = path.stat().st_size, path.relative_to(folder)
                yield LocalModel(f"{name}:{inner}", str(path), size, _refusal(path))
            if not files or (folder / "config.json").exists():
                yield LocalModel(name, str(folder), repository.size_on_disk, _refusal(folder))


def _refusal(path: Path) -> str | None:
    from pyengine.models.loader import check_folder, checked_source

    try:
        if path.is_dir():
            check_folder(path)
        else:
            checked_source(path)
    except PyEngineError as error:
        return " ".join(str(error).split())
    return None


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
