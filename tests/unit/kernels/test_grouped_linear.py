"""The Triton kernel of grouped products: against loops in torch, and made for absent GPUs."""

from typing import Any

import torch

from pyengine.models.decoder.grouped import group_pairs
from tests.support.kernels import in_compiler, in_interpreter, machine_code

FLOAT8 = torch.float8_e4m3fn


def expected(
    rows: torch.Tensor,
    weight: torch.Tensor,
    chosen: torch.Tensor,
    bias: torch.Tensor | None,
    factors: torch.Tensor | None,
) -> torch.Tensor:
    """A pair at a time, in float64."""
    results = []
    for pair, group in enumerate(chosen.flatten().tolist()):
        row = rows[pair // chosen.shape[1]].double()
        result = weight[group].double() @ row
        if bias is not None:
            result += bias[group].double()
        results.append(result if factors is None else result * factors[pair].double())
    return torch.stack(results)


@in_interpreter
def test_pairs_are_multiplied_by_the_weights_of_their_groups() -> None:
    """In the interpreter: every pair is multiplied by the weight of its group, in any layout.

    Not in bfloat16: the interpreter's product takes the bits for integers (triton 3.9).
    """
    from pyengine.kernels.grouped_linear import grouped_linear

    torch.manual_seed(0)
    for num_rows, choices, num_groups, inputs, outputs in (
        (1, 2, 8, 48, 32),
        (7, 3, 5, 200, 130),
        (50, 2, 3, 64, 40),  # tiles of 64 rows
        (9, 1, 1, 96, 16),
    ):
        chosen = torch.stack([torch.randperm(num_groups)[:choices] for _ in range(num_rows)])
        if num_groups == 3:
            chosen.clamp_(max=1)  # a group has none
        groups = group_pairs(chosen, num_groups)
        for dtype, is_transposed, with_more in (
            (torch.float32, False, True),
            (torch.float32, True, False),
            (torch.float16, False, False),
            (torch.float16, True, True),
        ):
            rows = torch.randn(num_rows, 2 * inputs).to(dtype)[:, :inputs]
            weight = torch.randn(num_groups, outputs, inputs).to(dtype)
            if is_transposed:
                weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
            bias = torch.randn(num_groups, outputs).to(dtype) if with_more else None
            factors = torch.rand(num_rows * choices) if with_more else None
            got = grouped_linear(rows, weight, *groups, choices, bias=bias, factors=factors)
            assert got.dtype == dtype
            torch.testing.assert_close(
                got.double(),
                expected(rows, weight, chosen, bias, factors),
                rtol={4: 1e-5, 2: 1e-2}[dtype.itemsize],
                atol={4: 1e-4, 2: 0.05}[dtype.itemsize],
            )
    assert len(grouped_linear(rows[:0], weight, *group_pairs(chosen[:0], num_groups))) == 0


def exact_rows(num_rows: int, inputs: int) -> torch.Tensor:
    """Rows that 8-bit floats hold once they are divided by their scale, a power of two.

    The interpreter rounds others wrongly (triton 3.9).
    """
    numbers = (1 + torch.randint(0, 8, (num_rows, inputs)) / 8) * 2.0 ** torch.randint(
        -4, 8, (num_rows, inputs)
    )
    numbers *= torch.randint(0, 2, numbers.shape) * 2 - 1
    for start in range(0, inputs, 128):
        numbers[:, start] = 448.0
        numbers[:, start : start + 128] *= 2.0 ** torch.randint(-8, 3, (num_rows, 1))
    return numbers


@in_interpreter
def test_weights_in_8_bit_floats_have_scales() -> None:
    """In the interpreter: 8-bit floats with a scale a row, or a square of 128."""
    from pyengine.kernels.grouped_linear import grouped_linear

    torch.manual_seed(0)
    for num_groups, outputs, inputs in ((1, 144, 256), (3, 136, 320), (2, 16, 64)):
        codes = torch.randn(num_groups, outputs, inputs).to(FLOAT8)
        by_row = torch.rand(num_groups, outputs, 1) + 0.5
        squares = torch.rand(num_groups, -(-outputs // 128), -(-inputs // 128)) + 0.5
        wide = squares.repeat_interleave(128, 1).repeat_interleave(128, 2)
        for scales, whole in ((by_row, by_row), (squares, wide[:, :outputs, :inputs])):
            rows = exact_rows(5, inputs)
            chosen = torch.randint(0, num_groups, (5, 2))
            groups = group_pairs(chosen, num_groups)
            weight = codes.float() * whole
            got = grouped_linear(rows, codes, *groups, 2, scales=scales)
            exact = expected(rows, weight, chosen, None, None)
            torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-3 * rows.abs().max())
            if num_groups == 1:
                alone = grouped_linear(rows, codes, scales=scales)
                assert torch.equal(alone, got[::2])  # the same kernel without a choice


@in_compiler
def test_the_kernel_becomes_machine_code() -> None:
    """For GPUs of several generations."""
    from pyengine.kernels.grouped_linear import _kernel

    kinds: dict[str, Any] = {
        **dict.fromkeys(("rows", "weight", "out", "bias"), "*bf16"),
        **{"order": "*i64", "ends": "*i64", "factors": "*bf16", "scales": "*fp32"},
        **{"num_pairs": "i32", "row_stride": "i32"},
        **{"weight_strides": ("i64", "i32", "i32"), "scale_strides": ("i32",) * 3},
    }
    sizes = {"inputs": 2048, "outputs": 1536, "choices": 8, "num_groups": 128, "lanes": 128}
    for capability, is_scaled, block_m in (
        (80, False, 16),
        (80, False, 64),
        (90, False, 64),
        (100, False, 16),
        (89, True, 16),
        (90, True, 64),
        (100, True, 64),
        (120, True, 16),
    ):
        constants = {
            **sizes,
            **{"scaled_outputs": 128, "scaled_inputs": 128, "largest": 448.0 * is_scaled},
            **{"block_m": block_m, "block_n": 128, "block_k": 128 if is_scaled else 64},
        }
        own = {**kinds, "weight": "*fp8e4nv" if is_scaled else "*bf16"}
        if not is_scaled:
            constants["scales"] = None
            del own["scales"]
        assert len(machine_code(_kernel, own, constants, capability, 4)) > 1000


def test_groups_list_pairs_by_expert():
    chosen = torch.tensor([[2, 0], [0, 3], [2, 3]])
    order, ends = group_pairs(chosen, 5)
    assert order.tolist() == [1, 2, 0, 4, 3, 5]
    assert ends.tolist() == [2, 2, 4, 6, 6]
