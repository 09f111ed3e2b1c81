"""The modules that import torch are known, so that the engine on a CPU never needs it."""

import ast
from pathlib import Path

from tests.support.without_torch import ROOT, TORCH_MODULES

PACKAGE = ROOT / "pyengine"


def imports_torch(path: Path) -> bool:
    """True if importing this module imports torch."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        if any(name.split(".")[0] == "torch" for name in names):
            return True
    return False


def test_they_are_those_that_the_suite_without_torch_skips() -> None:
    assert {path for path in PACKAGE.rglob("*.py") if imports_torch(path)} == TORCH_MODULES


def test_an_import_would_be_seen(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    for line in ("import torch", "from torch.nn import functional", "import torch.cuda as cuda"):
        file.write_text(f"import os\n{line}\n")
        assert imports_torch(file), line
    file.write_text("import torchless\n\ndef load():\n    import torch\n")
    assert not imports_torch(file)
