"""Folders of small models, saved once for all tests of a run."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.without_torch import MISSING

if TYPE_CHECKING:  # it imports the engine
    from tests.unit.models.decoder.tiny_models import Folders, Tiny


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> "Callable[[Tiny], tuple[Path, Any]]":
    """The folder of a model, and the model of transformers."""
    from tests.unit.models.decoder.tiny_models import save

    known: dict[str, tuple[Path, Any]] = {}

    def folder_of(tiny: "Tiny") -> tuple[Path, Any]:
        if tiny.name not in known:
            folder = tmp_path_factory.mktemp(tiny.name)
            known[tiny.name] = folder, save(tiny, folder)
        return known[tiny.name]

    return folder_of


@pytest.fixture(scope="session")
def saved_folder(
    saved: "Callable[[Tiny], tuple[Path, Any]]", tmp_path_factory: pytest.TempPathFactory
) -> "Folders":
    """The folder of a model, written without torch where that is not installed."""
    from tests.unit.models.decoder.tiny_models import save_without_torch

    known: dict[str, Path] = {}

    def folder_of(tiny: "Tiny") -> Path:
        if not MISSING:
            return saved(tiny)[0]
        if tiny.name not in known:
            known[tiny.name] = tmp_path_factory.mktemp(tiny.name)
            save_without_torch(tiny, known[tiny.name])
        return known[tiny.name]

    return folder_of


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Token ids of three prompts; the first is longer than the windows of the models."""
    import torch

    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 101, (n,), generator=generator).tolist() for n in (23, 5, 14)]


@pytest.fixture(scope="session")
def first_of_family() -> "list[Tiny]":
    """One model of every family."""
    from tests.unit.models.decoder.tiny_models import MODELS

    cache: dict[str, Tiny] = {}
    for tiny in MODELS:
        cache.setdefault(tiny.family, tiny)
    return list(cache.values())
