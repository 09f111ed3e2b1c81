"""The Triton kernel of the KV write: against torch's copy, and compiled for absent GPUs."""

import pytest
import torch

from pyengine.attention.paged import KVWriter
from pyengine.kv_cache.pool import KVCacheSpec, KVPool
from pyengine.utils.dtypes import dtype_of
from tests.support.kernels import in_compiler, in_interpreter, machine_code

CPU = torch.device("cpu")


def numbers(*shape: int) -> torch.Tensor:
    """Numbers that 8-bit floats hold or that are too large: the interpreter rounds others wrongly.

    Rounding up to the next power of two, it forgets the carry (triton 3.9).
    """
    mantissas = 1 + torch.randint(0, 8, shape) / 8
    signs = torch.randint(0, 2, shape) * 2 - 1
    return signs * mantissas * 2.0 ** torch.randint(-5, 12, shape)


def break_some(key: torch.Tensor, value: torch.Tensor) -> None:
    """Make numbers of three rows NaN or infinite, in place: of keys, of values, of one and both."""
    nan, infinity = float("nan"), float("inf")
    for row, of_key, of_value in ((0, nan, 1.0), (2, 1.0, -infinity), (-1, infinity, nan)):
        if len(key) > 2:
            key[row, 0, 1], value[row, -1, 2] = of_key, of_value


def without_nan(got: torch.Tensor, expected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in float32, with zeros where both are NaN or the same infinity.

    In 8-bit floats `got` may be anything there: the interpreter stores 384 for NaN (triton 3.9).
    """
    missing = ~expected.float().isfinite()
    if got.dtype.itemsize > 1:
        assert torch.allclose(got[missing], expected[missing], equal_nan=True)
    return got.float().masked_fill(missing, 0), expected.float().masked_fill(missing, 0)


@in_interpreter
def test_the_kernel_writes_what_torch_writes() -> None:
    """In the interpreter: for pools of all kinds, the kernel writes what the fallback writes."""
    from pyengine.kernels.kv_write import write_rows

    torch.manual_seed(0)
    shapes = [(2, 8, 8), (3, 5, 12), (1, 64, 64)]
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    cases = [(shape, dtype, dtype) for shape in shapes for dtype in dtypes]
    cases += [(shape, dtype, torch.float8_e4m3fn) for shape in shapes for dtype in dtypes]
    for (heads, dim_k, dim_v), dtype, stored in cases:
        spec = KVCacheSpec(heads, dim_k, dim_v, dtype_of(stored), scale_k=0.5, scale_v=4.0)
        by_kernel, by_torch = (KVPool([spec], 6, 4, CPU) for _ in range(2))
        slots = torch.tensor([5, -1, 23, 0, -1, 14])
        rows = [  # as transformers hands them over: heads first; and every second element
            (numbers(heads, 6, dim_k) * spec.scale_k).transpose(0, 1).to(dtype),
            (numbers(6, heads, 2 * dim_v) * spec.scale_v).to(dtype)[..., ::2],
        ]
        break_some(*rows)
        caches = (by_kernel.keys[0], by_kernel.values[0])
        write_rows(tuple(rows), caches, slots, (spec.scale_k, spec.scale_v))
        writer = KVWriter(by_torch)
        writer.write(0, (rows[0], *rows), writer.slots(slots[None])[0])
        for got, expected in zip(caches, (by_torch.keys[0], by_torch.values[0]), strict=True):
            assert torch.equal(*without_nan(got[:-1], expected[:-1])), (dtype, stored)
            assert not got[-1].float().any()  # nothing goes to the null block
            assert got.float().any()
        assert by_kernel.values[0].float().isfinite().all()
        assert by_torch.keys[0].float().isnan().any()
    write_rows(tuple(rows), caches, slots[:0])


@in_compiler
def test_the_kernel_becomes_machine_code() -> None:
    """For GPUs of two generations."""
    from pyengine.kernels.kv_write import _kernel

    constants = {"heads": 8, "dim_k": 128, "dim_v": 128, "block_heads": 8}
    constants |= {"block_k": 128, "block_v": 128}
    for capability, stored, largest in (
        (80, "*bf16", 0.0),
        (90, "*bf16", 0.0),
        (90, "*fp8e4nv", 448.0),
    ):
        kinds = {
            **dict.fromkeys(_kernel.arg_names, "*bf16"),
            **{"key_cache": stored, "value_cache": stored, "slots": "*i64"},
            **{"key_strides": ("i32",) * 3, "value_strides": ("i32",) * 3},
            "inverse_scales": ("fp32",) * 2,
        }
        options = {**constants, "largest": largest}
        assert len(machine_code(_kernel, kinds, options, capability, 4)) > 1000


def test_slot_minus_one_is_written_nowhere_that_counts():
    pool = KVPool([KVCacheSpec(1, 2, 2, "float32")], 3, 2, CPU)
    writer = KVWriter(pool)
    rows = torch.arange(1.0, 7.0).view(3, 1, 2)
    writer.write(0, (rows, rows, rows), writer.slots(torch.tensor([[3, -1, 0]]))[0])
    assert pool.keys[0][:3].flatten(0, 1)[:, 0].tolist() == [
        [5, 6],
        [0, 0],
        [0, 0],
        [1, 2],
        [0, 0],
        [0, 0],
    ]


def test_8_bit_floats_saturate_and_keep_what_is_not_a_number():
    spec = KVCacheSpec(1, 4, 1, "float8_e4m3fn", scale_k=2.0)
    pool = KVPool([spec], 3, 2, CPU)
    key = torch.tensor([[[1e6, -1e6, 3.0, float("nan")]], [[1.0, float("inf"), 2.0, 3.0]]])
    pool.write(0, key, torch.ones(2, 1, 1), torch.tensor([1, 2]))
    stored = pool.keys[0].flatten(0, 1)[1, 0].float()
    assert stored[:3].tolist() == [448, -448, 1.5]
    assert stored[3].isnan()
    assert pool.keys[0].flatten(0, 1)[2, 0].float().isnan().tolist() == [False, True, False, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_stored_as_zero_and_its_key_as_nan(dtype, broken):
    """A masked value is multiplied by zero, which NaN outlives; a masked score is replaced."""
    pool = KVPool([KVCacheSpec(2, 2, 3, dtype_of(dtype))], 3, 2, CPU)
    own = dtype if dtype.itemsize > 1 else torch.float32
    key, value = torch.ones(2, 2, 2, dtype=own), torch.ones(2, 2, 3, dtype=own)
    value[1, 0, 1] = broken
    pool.write(0, key, value, torch.tensor([3, 4]))
    keys, values = (item[0].float().flatten(0, 1)[3:5] for item in (pool.keys, pool.values))
    assert keys[0].tolist() == [[1, 1], [1, 1]]
    assert keys[1, 0].isnan().all()
    assert keys[1, 1].tolist() == [1, 1]  # of another head
    assert values[1].tolist() == [[1, 0, 1], [1, 1, 1]]
