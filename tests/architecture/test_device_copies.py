"""No copy to the device makes the host wait: a lint over what runs in a step.

`utils.host_copy.upload` is the way there: pinned, and not blocking.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "pyengine"
PACKAGES = (
    "attention",
    "engine",
    "executor",
    "kernels",
    "kv_cache",
    "models",
    "sampling",
    "speculation",
)
MAKERS = {"tensor", "as_tensor", "asarray", "scalar_tensor"}


def waits(source: str) -> Iterator[tuple[int, str]]:
    """Lines that copy from pageable memory to a device, or wait for one to count."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name, keywords = node.func.attr, {keyword.arg for keyword in node.keywords}
        to_device = name == "to" and any(map(_is_device, node.args))
        to_device |= name == "to" and "device" in keywords
        if to_device and not _is_not_blocking(node):
            yield node.lineno, ".to(device) without non_blocking=True"
        elif name in MAKERS and "device" in keywords:
            yield node.lineno, f"torch.{name}(..., device=)"
        elif name == "cuda":
            yield node.lineno, ".cuda()"
        elif name == "repeat_interleave" and "output_size" not in keywords:
            yield node.lineno, "repeat_interleave without output_size"


def _is_device(node: ast.expr) -> bool:
    named = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
    return named.lstrip("_") == "device"


def _is_not_blocking(node: ast.Call) -> bool:
    return any(
        keyword.arg == "non_blocking"
        and isinstance(keyword.value, ast.Constant)
        and keyword.value.value
        for keyword in node.keywords
    )


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_is_copied_to_a_device_from_pageable_memory(package: str) -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {what}"
        for path in (PACKAGE / package).rglob("*.py")
        for line, what in waits(path.read_text())
    ]
    assert not found, found


@pytest.mark.parametrize(
    "line",
    [
        "x.to(device)",
        "x.to(y.device)",
        "x.to(self._device, torch.int64)",
        "x.to(device=y.device)",
        "x.to(device, non_blocking=False)",
        "torch.tensor([1], device=y.device)",
        "torch.as_tensor(x, device='cuda')",
        "x.cuda()",
        "x.repeat_interleave(counts, dim=0)",
    ],
)
def test_the_lint_sees(line: str) -> None:
    assert len(list(waits(line))) == 1


@pytest.mark.parametrize(
    "line",
    ["x.to(device, non_blocking=True)", "x.to(torch.float32)", "torch.empty(3, device=device)"],
)
def test_the_lint_lets_pass(line: str) -> None:
    assert not list(waits(line))
