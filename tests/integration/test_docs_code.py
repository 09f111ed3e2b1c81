"""Every Python block of the docs compiles, and prints what its comments say."""

import pytest

from pyengine.utils.openmp import openmp_runtime
from tests.support.docs import ROOT, blocks, printed, run
from tests.support.without_torch import needs_torch

PAGES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
CODE = [
    (page, number, code) for page in PAGES for number, code in enumerate(blocks(page, "python"))
]
MODEL = ("LLM", "AsyncEngine")


def cases() -> list[object]:
    found: list[object] = []
    for page, number, code in CODE:
        marks = [pytest.mark.slow] if any(name in code for name in MODEL) else []
        if "GOMP_SPINCOUNT" in code:
            marks.append(
                pytest.mark.skipif(openmp_runtime() is None, reason="torch has no libgomp")
            )
        if "import torch" in code:
            marks.append(needs_torch)
        if printed(code):
            found.append(
                pytest.param(code, marks=marks, id=f"{page.removeprefix('docs/')}-{number}")
            )
    return found


def test_there_is_something_to_run() -> None:
    assert len(cases()) >= 30


@pytest.mark.parametrize(("page", "number", "code"), CODE)
def test_a_block_compiles(page: str, number: int, code: str) -> None:
    compile(code, f"{page}, block {number}", "exec")


@pytest.mark.parametrize("code", cases())
def test_a_block_prints_what_it_says(code: str) -> None:
    may_import = any(name in code for name in (*MODEL, "torch"))
    has_torch = may_import and "GOMP_SPINCOUNT" not in code  # that one is about the first import
    code += "\nimport sys; print('torch' in sys.modules)"
    *lines, torch = run(code, has_torch=has_torch).splitlines()
    assert lines == printed(code)
    assert may_import or torch == "False"
