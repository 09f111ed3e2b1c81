"""Decoders are written down, not made of transformers' modules: nothing changes a built tree.

The code of transformers' models is imported by `models/fallback.py` alone, which runs its modules
as they are.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "pyengine"
FALLBACK = "pyengine/models/fallback.py"
_CODE, _TREES, _HOOKED = "looks at the code of a function", "replaces modules", "hooks"
_MODELS = "transformers' models"
KEPT: dict[str, set[str]] = {
    "pyengine/utils/frame_memory.py": {_CODE},
    "pyengine/utils/own_graphs.py": {_CODE},
}
"""Files that look at functions of torch's compiler, and at no model."""
FEWEST_FILES = 150

_WALKS = {"named_children", "named_modules", "children", "modules"}
_CHANGES = {"setattr", "set_submodule", "register_module", "add_module", "_modules"}
_HOOKS = {
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_module_forward_hook",
    "register_module_forward_pre_hook",
    "register_load_state_dict_post_hook",
}
_CLASSES = ("AutoModel", "PreTrainedModel", "GenerationMixin")
_MODULES = ("models", "modeling_", "masking_utils", "integrations", "pytorch_utils", "generation")


def faults(code: str) -> Iterator[str]:
    """The faults of a file, which decoders of ours need not: each kind, in words."""
    tree = ast.parse(code)
    names = {_name(node) for node in ast.walk(tree)}
    calls = {_name(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    methods = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    if names & {"__code__", "co_code", "getsource"}:
        yield _CODE
    if calls & methods & _WALKS and names & _CHANGES:
        yield _TREES
    if names & _HOOKS:
        yield _HOOKED
    if any(_is_modeling(name) for node in ast.walk(tree) for name in _imported(node)):
        yield _MODELS


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _imported(node: ast.AST) -> Iterator[str]:
    """The full names that a statement imports, and strings that look like such names."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.level == 0:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value.partition("\n")[0]


def _is_modeling(name: str) -> bool:
    first, _, rest = name.partition(".")
    if first != "transformers" or " " in name:
        return False
    parts = rest.split(".")
    is_class = any(part.startswith(_CLASSES) for part in parts)
    return is_class or parts[0].startswith(_MODULES) or "modeling_" in rest


FILES = {str(path.relative_to(ROOT)): path for path in sorted(PACKAGE.rglob("*.py"))}


def test_every_file_was_looked_at() -> None:
    assert len(FILES) >= FEWEST_FILES
    folders = {path.parent.name for path in FILES.values()}
    assert folders >= {"decoder", "families", "executor", "attention", "kernels", "server"}
    assert _MODELS in set(faults(FILES[FALLBACK].read_text(encoding="utf-8")))


def test_nothing_changes_a_built_tree_or_imports_transformers_models() -> None:
    found = {
        name: kinds
        for name, path in FILES.items()
        if name != FALLBACK and (kinds := set(faults(path.read_text(encoding="utf-8"))))
    }
    assert found == KEPT


def test_the_fallback_runs_modules_as_they_are() -> None:
    assert set(faults(FILES[FALLBACK].read_text(encoding="utf-8"))) == {_MODELS}


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("same = own.__call__.__code__ == other", _CODE),
        ("import inspect\ninspect.getsource(x)", _CODE),
        ("for n, m in x.named_children():\n    setattr(x, n, m)", _TREES),
        ("for n, m in x.named_modules():\n    x.set_submodule(n, m)", _TREES),
        ("for m in x.modules():\n    m._modules['a'] = 1", _TREES),
        ("x.register_forward_pre_hook(f)", _HOOKED),
        ("from transformers import AutoModelForCausalLM", _MODELS),
        ("from transformers.models.llama import LlamaModel", _MODELS),
        ("import transformers.models.llama.modeling_llama as m", _MODELS),
        ("def f():\n    from transformers.modeling_utils import a", _MODELS),
        ("m = import_module('transformers.models.llama')", _MODELS),
        ("from transformers.integrations import x", _MODELS),
    ],
)
def test_each_kind_is_seen(code: str, kind: str) -> None:
    assert list(faults(code)) == [kind]


@pytest.mark.parametrize(
    "code",
    [
        "from transformers import AutoConfig, AutoTokenizer",
        "from transformers.utils import logging",
        '"""Models of transformers: see transformers.models for them."""',
        "setattr(x, 'a', 1)",
    ],
)
def test_nothing_else_is_a_fault(code: str) -> None:
    assert list(faults(code)) == []
