"""An extension of griffe for `make docs`: it reads docstrings of the compiled `pyengine._cpu`.

griffe reads only `_cpu.py` and `_cpu.pyi`, which have none.
"""

import inspect
from typing import Any

import griffe

from pyengine import _cpu


class CompiledDocstrings(griffe.Extension):
    """Takes the docstring of each class and method from the object itself."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Called for each object that griffe has read."""
        module, _, path = obj.path.rpartition("_cpu.")
        if module != "pyengine." or path.rpartition(".")[2].startswith("_"):
            return
        found: Any = _cpu
        for name in path.split("."):
            found = getattr(found, name)
        if text := inspect.getdoc(found):
            obj.docstring = griffe.Docstring(text, parent=obj)
