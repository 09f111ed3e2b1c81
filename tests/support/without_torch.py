"""In an environment without torch, tests that import it are skipped: `make test-light`.

Only imports by tests and benches count, of torch or of a module that is written for it. If another
part of the package imports torch where it is missing, the test fails.
"""

from importlib.util import find_spec
from pathlib import Path
from traceback import walk_tb
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TORCH_MODULES = frozenset(
    ROOT / "pyengine" / f"{name}.py"
    for name in (
        *("attention/dispatch", "attention/flash_attn", "attention/flash_kernels"),
        *("attention/flashinfer", "attention/flex", "attention/gather", "attention/paged"),
        *("attention/varlen", "executor/compiled", "executor/cuda_graphs"),
        *("executor/piecewise_graphs", "executor/tensor_parallel/distributed"),
        *("executor/tensor_parallel/ranks", "executor/tensor_parallel/worker"),
        *("kernels/add_norm", "kernels/best_tokens", "kernels/delta_rule", "kernels/draw"),
        *("kernels/floors", "kernels/gate", "kernels/gated_norm", "kernels/grouped_linear"),
        *("kernels/kv_write", "kernels/masks", "kernels/operators", "kernels/rotation"),
        *("kernels/sequences", "kernels/short_conv", "kernels/state_space"),
        *("models/decoder/compiled_kernels", "models/decoder/cuda_kernels"),
        *("models/decoder/cuda_states", "models/decoder/float8", "models/decoder/grouped"),
        *("models/decoder/torch_adapters", "models/decoder/torch_kernels"),
        *("models/decoder/torch_states", "models/fallback"),
        "models/tensor_model",
        "sampling/tensor_operations",
    )
)
"""The modules that import torch: a device's, and those of models that torch computes."""
LIBRARIES = frozenset({"torch", "transformers", "accelerate"})
MISSING = frozenset(name for name in LIBRARIES if find_spec(name) is None)


needs_torch = pytest.mark.skipif("torch" in MISSING, reason="torch is not installed")
"""Marks a test that imports no torch itself, and needs an engine that computes by it."""


def tensors(*values: Any) -> list[Any]:
    """Tensors of torch with these values; none where it is not installed."""
    if "torch" in MISSING:
        return []
    import torch

    return [torch.tensor(value) for value in values]


def reason(error: BaseException | None) -> str | None:
    """Why a test is skipped for this error; None if it is not."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError):
            library = str(error.name).partition(".")[0]
            return f"{library} is not installed" if _is_by_a_test(error, library) else None
        error = error.__cause__
    return None


def _is_by_a_test(error: ModuleNotFoundError, library: str) -> bool:
    if library not in MISSING:
        return False
    files = [Path(frame.f_code.co_filename) for frame, _ in walk_tb(error.__traceback__)]
    importers = (file for file in reversed(files) if "importlib" not in str(file))
    importer = next(file for file in importers if file not in TORCH_MODULES)
    return any(importer.is_relative_to(ROOT / folder) for folder in ("tests", "benches"))


def skip(report: Any, error: BaseException | None) -> None:
    """Turn the report of a test or a file that failed into that of a skipped one, if it is one."""
    why = reason(error) if report.failed else None
    if why is not None:
        report.outcome = "skipped"
        report.longrepr = (str(report.fspath), 0, f"Skipped: {why}")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Any:
    """A file that imports torch is skipped."""
    report = yield
    call = getattr(report, "call", None)
    skip(report, call.excinfo.value if call is not None and call.excinfo else None)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """A test that imports torch is skipped."""
    report = yield
    skip(report, call.excinfo.value if call.excinfo else None)
    return report
