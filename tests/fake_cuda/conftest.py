"""Everything here is for `make gpu-tests`, in whose environment the attention libraries are."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/fake_cuda/" in item.nodeid:
            item.add_marker("fake_cuda")
