"""The distribution that holds the package: its name, its version, and how its extras are had.

The package is imported as `pyengine`. That name belongs to another project on PyPI, so the
distribution has one of its own.
"""

from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "pyengine-kv"
"""What pip knows; `[project] name` of pyproject.toml says the same."""


def package_version() -> str:
    """The version of the installed distribution; "unknown" where it runs from bare sources."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "unknown"


def needs_engine_extra(what: str, missing: str) -> str:
    """The sentence for `what`, which cannot do without the library `missing`."""
    return (
        f"{what} needs {missing}, of the extra 'engine': say `make hello` in a checkout, "
        f"or pip install '{DISTRIBUTION.replace('-', '_')}-....whl[engine]' with the path of the "
        f"wheel ({DISTRIBUTION} is the name of the distribution; pyengine on PyPI is not this)"
    )
