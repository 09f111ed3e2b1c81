"""The product of linear layers: timed, not derived from the name of an instruction set."""

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pyengine import LLM
from pyengine.errors import ConfigurationError
from pyengine.models.decoder import product_choice as products
from pyengine.models.decoder.cpu_numbers import NUMPY
from pyengine.models.decoder.kernel_sets import KernelSettings, kernel_set
from pyengine.models.decoder.product_choice import (
    LayerShape,
    ProductChooser,
    available_products,
    best_product,
    choose_product,
    kernel_supports,
    onednn_supports,
)
from pyengine.utils.openmp import torch_threads
from tests.support.checkpoints import save_tiny
from tests.support.processes import run_python

CPU = torch.device("cpu")
needs_onednn = pytest.mark.skipif(
    not onednn_supports("float32"), reason="torch was built without oneDNN"
)


@pytest.mark.parametrize(
    ("torch_times", "onednn_times", "unpacked_times", "expected"),
    [
        ((10, 90, 95, 100), (10, 11, 20, 40), (9, 19, 25, 50), "onednn"),  # nine times for two rows
        ((24, 26, 45, 65), (29, 30, 33, 57), (26, 40, 40, 60), "onednn"),
        ((32, 53, 66, 116), (48, 54, 68, 112), (33, 56, 66, 108), "onednn-unpacked"),
        ((10, 10, 10, 10), (11, 11, 11, 11), (13, 13, 13, 13), "onednn"),  # as good as a tie
        ((10, 10, 10, 10), (13, 13, 13, 13), (14, 14, 14, 14), "torch"),
        ((2, 2, 2, 3), (18, 17, 18, 18), (18, 17, 18, 18), "torch"),  # a call costs more
    ],
)
def test_the_least_mean_of_all_numbers_of_rows_decides(
    torch_times, onednn_times, unpacked_times, expected
):
    times = {"torch": torch_times, "onednn": onednn_times, "onednn-unpacked": unpacked_times}
    assert best_product(times) == expected


@pytest.mark.parametrize("isa", ["avx2", "avx512_bf16", "amx"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_our_kernel_is_not_timed(monkeypatch, dtype, isa):
    at_level = SimpleNamespace(is_fast=lambda: True, isa=lambda: isa)
    monkeypatch.setattr(products, "CpuAttention", at_level)
    monkeypatch.setattr(products, "measure", pytest.fail)
    chooser = ProductChooser("auto", dtype)
    assert chooser(LayerShape(24, 17, dtype), [np.zeros((17, 24), NUMPY[dtype])]) == "pyengine"


@needs_onednn
def test_products_are_timed_where_our_kernel_has_no_instructions(monkeypatch):
    monkeypatch.setattr(products, "kernel_supports", lambda _dtype: False)
    monkeypatch.setattr(products, "_choices", {})
    timed = ProductChooser("auto", "float32")
    assert timed(LayerShape(24, 17, "float32"), [np.ones((17, 24), np.float32)]) != "pyengine"
    assert str(timed.describe()["linear_reason"]).startswith("timed in")


@pytest.mark.parametrize(
    ("unpacked_times", "onednn_times", "expected"),
    [
        ((10, 10, 10), (9.5, 9.5, 9.5), "onednn-unpacked"),
        ((10, 10, 10), (8, 8, 8), "onednn"),
        ((30, 30, 30), (30, 30, 30), "torch"),
        ((30, 30, 30), (10, 10, 10), "onednn"),
    ],
)
def test_a_tied_weight_is_copied_where_that_gains_more(unpacked_times, onednn_times, expected):
    times = {"torch": (12, 12, 12), "onednn": onednn_times, "onednn-unpacked": unpacked_times}
    assert best_product(times, is_tied=True) == expected


@needs_onednn
def test_a_shape_is_timed_once_in_a_process_and_on_one_thread(monkeypatch):
    monkeypatch.setattr(products, "_choices", {})
    threads: list[int] = []
    timed = products._timed

    def watched(*arguments: Any) -> Any:
        threads.append(torch.get_num_threads())
        return timed(*arguments)

    monkeypatch.setattr(products, "_timed", watched)
    shape, weight = LayerShape(24, 17, "float32"), np.ones((17, 24), np.float32)
    with torch_threads(2):
        first = choose_product(shape, [weight])
        assert choose_product(shape, [weight]) is first
        assert torch.get_num_threads() == 2
    assert threads == [1]
    assert set(first.times) == set(available_products("float32")) - {"pyengine"}
    assert all(len(times) == len(products.ROWS) for times in first.times.values())


@needs_onednn
def test_a_large_layer_is_timed_by_a_part_of_its_outputs():
    whole = np.empty((40_000, 512), np.float32)
    [[part]] = products._sample([whole])
    assert part.nbytes <= products._SAMPLE < whole.nbytes
    assert part.ctypes.data == whole.ctypes.data
    copies = products._sample([np.empty((512, 512), np.float32)])
    assert len({weights[0].ctypes.data for weights in copies}) == len(copies) > 1


_GENERIC_MKL = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_CBWR": "COMPATIBLE",
}
"""AVX2 at most, and those kernels of MKL that run on every processor."""

_CHOICE = """
import numpy as np
import torch
from pyengine.models.decoder.product_choice import LayerShape, choose_product, onednn_supports
assert torch.backends.cpu.get_cpu_capability() != "AVX512"
assert onednn_supports("float32")
weight = np.random.default_rng(0).random((8192, 640), np.float32)
print(choose_product(LayerShape(640, 8192, "float32"), [weight]).product)
"""


@needs_onednn
@pytest.mark.skipif("mkl" not in torch.__config__.show().lower(), reason="torch without MKL")
def test_torch_is_not_chosen_where_mkl_is_slow_without_avx512():
    """MKL on a processor that is not Intel's, as near as an Intel processor comes to it."""
    done = run_python(_CHOICE, env=os.environ | _GENERIC_MKL)
    assert done.stdout.split()[0] in ("onednn", "onednn-unpacked")


def test_what_cannot_be_is_refused():
    for backend in ("onednn", "pyengine"):
        with pytest.raises(ConfigurationError, match=f"linear_backend='{backend}'.*float16"):
            kernel_set(CPU, "float16", KernelSettings(linear_backend=backend))
    kernels = kernel_set(CPU, "float16", KernelSettings())
    assert kernels.products.describe()["linear_backend"] == "torch"


@needs_onednn
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_says_which_products_it_uses(tmp_path, dtype):
    save_tiny(tmp_path)
    answers = []
    backends = ["auto", "torch", "onednn"]
    backends += ["pyengine"] if kernel_supports(dtype) else []
    for backend in backends:
        llm = LLM(tmp_path, dtype=dtype, num_blocks=16, max_model_len=64, linear_backend=backend)
        about = llm.describe()
        if backend == "auto":
            reason = "same bits" if kernel_supports(dtype) else "timed in"
            assert reason in str(about["linear_reason"])
        else:
            assert (about["linear_backend"], about["linear_reason"]) == (backend, "asked for")
        answers.append(llm.generate([[3, 9, 27]])[0].outputs[0].token_ids)
        del llm
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.parametrize("backend", ["onednn", "pyengine"])
@pytest.mark.parametrize(
    "other", [{"quantization": "int8"}, {"tensor_parallel_size": 2}], ids=["int8", "divided"]
)
def test_a_product_by_name_does_not_go_together_with(other, backend):
    refused = f"linear_backend='{backend}' cannot be combined"
    with pytest.raises(ConfigurationError, match=refused):
        LLM(linear_backend=backend, **other)
