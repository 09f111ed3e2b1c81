"""`pyengine info`: what is installed, what it would run on, and why."""

import platform
from importlib.metadata import PackageNotFoundError, version

import typer

from pyengine.cli.backend import factory_of
from pyengine.cli.options import command
from pyengine.cli.rows import print_rows
from pyengine.core.distribution import package_version
from pyengine.core.settings import EngineSettings

LIBRARIES = ("numpy", "torch", "transformers", "tokenizers", "safetensors", "gguf")


@command()
def info(context: typer.Context, *, settings: EngineSettings) -> None:
    """Print versions, then open the model and print device, attention backend and why."""
    versions = _versions()
    print_rows("versions", versions)
    engine = factory_of(context)(settings)
    rows = {key: value for key, value in engine.describe().items() if key not in versions}
    print_rows("engine", {"model_path": engine.model_path, **rows})


def _versions() -> dict[str, object]:
    found: dict[str, object] = {"pyengine": package_version(), "python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
