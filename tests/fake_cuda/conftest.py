"""Everything here is for `make gpu-tests`, in whose environment the attention libraries are."""

import os
from collections.abc import Iterator

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/fake_cuda/" in item.nodeid:
            item.add_marker("fake_cuda")


@pytest.fixture(scope="session", autouse=True)
def _kernels_are_compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """All tests share one cache of Triton's machine code, which is empty at first."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(folder / "triton"))
        yield
