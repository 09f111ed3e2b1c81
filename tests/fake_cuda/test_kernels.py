"""Our Triton kernels become machine code for every kind of GPU that they may run on.

`tests/unit/kernels` runs them in Triton's interpreter against torch.
"""

from pathlib import Path

import pytest

from tests.support.kernels import run_apart


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
def test_kernels_are_compiled(capability: int, tmp_path: Path) -> None:
    run_apart(
        "tests.fake_cuda.kernels", "compile_for", str(capability), TRITON_CACHE_DIR=str(tmp_path)
    )
