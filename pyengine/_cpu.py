"""The CPU's arithmetic in Rust: the second module of the extension's file.

A wheel of maturin has one library. Python finds `pyengine._kv` in it, whose name the file has, and
this module puts `pyengine._cpu` in its own place (PEP 489, "Multiple modules in one library").
Neither module loads the other.
"""

import sys
from importlib.machinery import ExtensionFileLoader
from importlib.util import find_spec, module_from_spec, spec_from_file_location

_FILE = "pyengine._kv"


def _load() -> None:
    library = find_spec(_FILE)
    if library is None or library.origin is None:
        raise ModuleNotFoundError(f"No module named {_FILE!r}", name=_FILE)
    loader = ExtensionFileLoader(__name__, library.origin)
    spec = spec_from_file_location(__name__, library.origin, loader=loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[__name__] = module


_load()
