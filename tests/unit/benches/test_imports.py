"""Every module of benches/ and tools/ imports with what the environment holds.

All are imported in one new interpreter.
"""

import json
import os

from tests.support.docs import ROOT
from tests.support.processes import run_python
from tests.support.without_torch import MISSING

OTHERS = {"griffe", "macholib", "matplotlib", "nanovllm", "pefile", "playwright", "sglang", "vllm"}
"""Packages of peers, `make docs` and `make wheels`, which `.venv` need not hold."""
IMPORT_ALL = """
import importlib, json, sys
modules, sys.argv[1:] = sys.argv[1:], []
errors = {}
for module in modules:
    try:
        importlib.import_module(module)
    except Exception as error:
        errors[module] = [getattr(error, "name", None), repr(error)]
print(json.dumps(errors))
"""


def test_every_module_imports() -> None:
    files = [
        path.relative_to(ROOT)
        for part in ("benches", "tools")
        for path in ROOT.glob(f"{part}/**/*.py")
    ]
    modules = sorted(
        ".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in files
    )
    assert len(modules) > 70
    done = run_python(IMPORT_ALL, *modules, env={**os.environ, "PYTHONPATH": str(ROOT)})
    errors = json.loads(done.stdout.splitlines()[-1])
    missing = OTHERS | MISSING
    assert {module: text for module, (name, text) in errors.items() if name not in missing} == {}
