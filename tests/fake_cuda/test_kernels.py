"""Our Triton kernels become machine code for every kind of GPU that they may run on.

`tests/unit/kernels` runs them in Triton's interpreter against torch.
"""

import pytest

from tests.fake_cuda.forks import run_forked


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
def test_kernels_are_compiled(capability: int) -> None:
    run_forked("tests.fake_cuda.kernels", "compile_for", str(capability))
