"""The Triton kernel of sum and norm against torch, without a GPU."""

from typing import Any

import torch
from hypothesis import strategies as st

from tests.support.cases import check_cases
from tests.support.kernels import in_compiler, in_interpreter, machine_code

ULP = {torch.float32: 1e-6, torch.float16: 2.0**-10}


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "seed": draw(st.integers(0, 10**6)),
        "shape": draw(st.sampled_from([(3, 8), (1, 100), (2, 2048), (0, 16), (2, 3, 20)])),
        "dtype": draw(st.sampled_from(list(ULP))),
        "is_part": draw(st.booleans()),
        "scale": draw(st.sampled_from([None, 1.0, 0.22])),
        "offset": draw(st.sampled_from([None, 0.0, 1.0])),
        "is_centred": draw(st.booleans()),
        "has_bias": draw(st.booleans()),
    }


def rows(shape: tuple[int, ...], dtype: torch.dtype, is_part: bool) -> torch.Tensor:
    """Random rows; those of a part lie between others."""
    if not is_part:
        return torch.randn(shape).to(dtype)
    return torch.randn(*shape[:-1], 2 * shape[-1]).to(dtype)[..., : shape[-1]]


def compare(case: dict[str, Any]) -> None:
    """In the interpreter: sums and norms are those of float64, rounded."""
    from pyengine.kernels.add_norm import RowNorm, add_norm

    torch.manual_seed(case["seed"])
    shape, dtype, size = case["shape"], case["dtype"], case["shape"][-1]
    stream, change = (rows(shape, dtype, case["is_part"]) for _ in range(2))
    weight = None if case["offset"] is None else torch.randn(size).to(dtype)
    bias = torch.randn(size).to(dtype) if case["has_bias"] else None
    norm = RowNorm(weight, bias, 1e-5, case["offset"] or 0.0, case["is_centred"])
    scale = case["scale"]
    total, normed = add_norm(stream, None if scale is None else change, scale or 1.0, norm)
    assert total.dtype == normed.dtype == dtype and normed.is_contiguous()
    exact = stream.double() if scale is None else stream.double() + scale * change.double()
    torch.testing.assert_close(total.double(), exact, rtol=ULP[dtype], atol=ULP[dtype])
    exact = total.double()
    if case["is_centred"]:
        exact = exact - exact.mean(-1, keepdim=True)
    exact = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    if weight is not None:
        exact = exact * (case["offset"] + weight.double())
    if bias is not None:
        exact = exact + bias.double()
    torch.testing.assert_close(normed.double(), exact, rtol=4 * ULP[dtype], atol=4 * ULP[dtype])


@in_compiler
def test_it_becomes_machine_code() -> None:
    """For GPUs of several generations."""
    from pyengine.kernels.add_norm import _kernel

    tensors = ("rows", "change", "weight", "bias", "total", "out")
    kinds: dict[str, Any] = {
        **dict.fromkeys(tensors, "*bf16"),
        **dict.fromkeys(("row_strides", "change_strides"), ("i32", "i32", "i32")),
        **{"scale": "fp32", "eps": "fp32"},
    }
    constants = {"heads": 1, "size": 4096, "offset": 1.0, "is_centred": False, "block": 4096}
    for capability in (80, 90, 100):
        assert len(machine_code(_kernel, kinds, constants, capability, 8)) > 1000
    own = {name: kind for name, kind in kinds.items() if name not in ("change", "total", "bias")}
    constants = {**constants, "change": None, "total": None, "bias": None, "is_centred": True}
    assert len(machine_code(_kernel, own, constants, 90, 8)) > 1000


@in_interpreter
def test_rows_are_added_and_normalised() -> None:
    check_cases(compare, 40, case=cases())
