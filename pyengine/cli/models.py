"""`pyengine pull` and `pyengine list`: models on this machine."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from pyengine.cli.backend import held_interrupt, libraries
from pyengine.cli.display import note, size_text, wrapped, write
from pyengine.cli.options import guarded
from pyengine.errors import ModelLoadError, PyEngineError


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this machine: the name that opens it, its bytes, why the engine refuses it."""

    name: str
    folder: str
    size: int
    refusal: str | None
    is_default: bool = False


def pull(
    model: Annotated[str, typer.Argument(help="Hub id, local folder or GGUF file.")],
    revision: Annotated[
        str | None,
        typer.Option(help="Branch, tag or commit; default: the newest.", show_envvar=False),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(
            help="Access token for gated models; default: the variable HF_TOKEN.",
            show_envvar=False,
        ),
    ] = None,
) -> None:
    """Download MODEL, and check that the engine can run it; status 1 if not."""
    with guarded():
        with held_interrupt(), libraries():
            from pyengine.models.loader import checked_source
        source = checked_source(model, revision=revision, token=token)
        size = source.path.stat().st_size if source.is_gguf else _size(source.path)
        write(f"{source.path}\n")
        note(f"{source.name}: {size_text(size)}; the engine can run it")


def list_models(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.", show_envvar=False)] = False,
) -> None:
    """Print the models on this machine, their sizes, and whether the engine can run them."""
    with guarded():
        with held_interrupt(), libraries():
            import pyengine.models.loader  # noqa: F401
        models = sorted([*_embedded(), *_of_the_hub()], key=lambda each: each.name)
        if as_json:
            write(json.dumps([asdict(each) for each in models], indent=2) + "\n")
            return
        if not models:
            note("no models: `pyengine pull MODEL`")
        width = max((len(each.name) for each in models), default=0)
        for each in models:
            state = "runs" if each.refusal is None else f"does not run: {each.refusal}"
            state += "; the default" if each.is_default else ""
            write(f"{each.name:<{width}}  {size_text(each.size):>10}  ")
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
            newest = max(repository.revisions, key=lambda each: each.last_modified)
            folder = newest.snapshot_path
            size = repository.size_on_disk
            yield LocalModel(repository.repo_id, str(folder), size, _refusal(folder))


def _refusal(folder: Path) -> str | None:
    from pyengine.models.loader import check_folder

    try:
        check_folder(folder)
    except PyEngineError as error:
        return " ".join(str(error).split())
    return None


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
