"""The Triton kernel of norm, rotary embedding and KV write against torch, without a GPU.

Triton's interpreter computes it; Triton's compiler makes machine code for absent GPUs. Importing
triton decides between them, so each runs in a separate process.
"""

from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from hypothesis import strategies as st

from pyengine.attention.paged import KVWriter
from pyengine.kernels.rope import HeadNorm, RotaryLayout, Rotation
from pyengine.kv_cache.pool import KVCacheSpec, KVPool
from pyengine.utils.dtypes import dtype_of
from tests.support.cases import check_cases
from tests.support.kernels import in_compiler, in_interpreter, machine_code
from tests.unit.kernels.test_kv_write import break_some, numbers, without_nan

CPU = torch.device("cpu")
ULP = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


@dataclass(frozen=True)
class Case:
    """A layer and its step, random by `seed`."""

    seed: int
    query_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    layout: RotaryLayout
    offset: float | None
    dtype: torch.dtype
    stored: torch.dtype | None
    is_broken: bool
    angles: torch.dtype
    slots: list[int]

    def rows(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Parts of one product, as fused projections give; the value has every second number."""
        sizes = [self.query_heads * self.head_dim, self.kv_heads * self.head_dim]
        sizes.append(2 * self.kv_heads * self.value_dim)
        scales = torch.tensor([1.0, self.scale_k, self.scale_v]).repeat_interleave(
            torch.tensor(sizes)
        )
        whole = (numbers(len(self.slots), sum(sizes)) * scales).to(self.dtype)
        query, key, value = whole.split(sizes, -1)
        key = key.unflatten(-1, (self.kv_heads, -1))
        value = value[..., ::2].unflatten(-1, (self.kv_heads, -1))
        if self.is_broken:
            break_some(key, value)
        return query.unflatten(-1, (self.query_heads, -1)), key, value

    def rotation(self) -> Rotation:
        columns = self.layout.size // 2 * self.layout.step
        angles = torch.randn(len(self.slots), columns) * 10
        if self.stored is not None:  # right angles: 8-bit floats hold what is turned by them
            angles = torch.randint(0, 4, angles.shape) * (torch.pi / 2)
        norm = None
        if self.offset is not None:
            weights = [(torch.randn(self.head_dim) + 1).to(self.dtype) for _ in range(2)]
            norm = HeadNorm(*weights, eps=1e-5, offset=self.offset)
        cos, sin = angles.cos(), angles.sin()
        if self.stored is not None:
            cos, sin = cos.round(), sin.round()
        return Rotation(cos.to(self.angles), sin.to(self.angles), self.layout, norm)

    @property
    def scale_k(self) -> float:
        return 0.5 if self.stored else 1.0

    @property
    def scale_v(self) -> float:
        return 4.0 if self.stored else 1.0

    def pool(self) -> KVPool:
        spec = KVCacheSpec(
            self.kv_heads,
            self.head_dim,
            self.value_dim,
            dtype_of(self.stored or self.dtype),
            scale_k=self.scale_k,
            scale_v=self.scale_v,
        )
        return KVPool([spec], 6, 4, CPU)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    head_dim = draw(st.sampled_from([8, 16, 24, 64, 80, 128]))
    size = draw(st.sampled_from([head_dim, head_dim // 4 * 2, 2]))
    orders: list[Literal["halves", "pairs"]] = ["halves", "pairs"]
    kv_heads, dtype = draw(st.integers(1, 2)), draw(st.sampled_from(list(ULP)))
    free = draw(st.permutations(range(24)))
    slots = draw(st.lists(st.booleans(), min_size=0, max_size=3))
    stored = draw(st.sampled_from([None, None, torch.float8_e4m3fn]))
    return Case(
        seed=draw(st.integers(0, 10**6)),
        query_heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=draw(st.sampled_from([head_dim, 8, 12])),
        layout=RotaryLayout(size, draw(st.sampled_from(orders)), draw(st.integers(1, 2))),
        offset=draw(st.sampled_from([None] if stored else [None, 0.0, 1.0])),
        dtype=dtype,
        stored=stored,
        is_broken=draw(st.booleans()),
        angles=draw(st.sampled_from([torch.float32, dtype])),
        slots=[free[at] if is_real else -1 for at, is_real in enumerate(slots)],
    )


def compare(case: Case) -> None:
    """In the interpreter: the kernel returns and writes what torch returns and writes."""
    from pyengine.kernels.rotation import write_rotated

    torch.manual_seed(case.seed)
    rows, rotation = case.rows(), case.rotation()
    slots = torch.tensor(case.slots, dtype=torch.int64)
    by_kernel, by_torch = case.pool(), case.pool()
    spec = by_kernel.specs[0]
    query = write_rotated(
        rows,
        (by_kernel.keys[0], by_kernel.values[0]),
        slots,
        rotation,
        (spec.scale_k, spec.scale_v),
    )
    writer = KVWriter(by_torch)
    expected = writer.write(0, rows, writer.slots(slots[None])[0], rotation)
    close(query, expected, ULP[case.dtype])
    close(by_kernel.keys[0][:-1], by_torch.keys[0][:-1], ULP[case.dtype] if not case.stored else 0)
    close(by_kernel.values[0][:-1], by_torch.values[0][:-1], 0)
    assert by_kernel.values[0].float().isfinite().all()
    assert not by_kernel.keys[0][-1].float().any()  # nothing goes to the null block
    untouched = torch.ones(24, dtype=torch.bool)
    untouched[slots[slots >= 0]] = False
    assert not by_kernel.keys[0][:-1].float().flatten(0, 1)[untouched].any()


@pytest.mark.parametrize("count", [8, pytest.param(300, marks=pytest.mark.soak)])
@in_interpreter
def test_the_kernel_gives_what_torch_gives(count: int) -> None:
    check_cases(compare, count, case=cases())


def close(got: torch.Tensor, expected: torch.Tensor, relative: float) -> None:
    assert got.shape == expected.shape and got.dtype == expected.dtype
    got, expected = without_nan(got, expected)
    limit = relative * expected.abs()
    if relative and got.numel():  # a difference of larger numbers has the rounding of those
        limit = limit + 1e-6 * expected.abs().amax(-1, keepdim=True)
    assert ((got - expected).abs() <= limit).all(), (got - expected).abs().max()


@in_compiler
def test_the_kernel_becomes_machine_code() -> None:
    """For GPUs of two generations, with all options of a layer."""
    from pyengine.kernels.rotation import _WARPS, _kernel

    constants = {
        "query_heads": 16,
        "kv_heads": 8,
        "dim_k": 128,
        "dim_v": 128,
        "half": 48,
        "stride": 1,
        "gap": 48,
        "angle_step": 1,
        "offset": 0.0,
        "block_half": 64,
        "block_rest": 32,
        "block_v": 128,
    }
    strides = {name: ("i32",) * 3 for name in ("query_strides", "key_strides", "value_strides")}
    strides |= {name: ("i32",) * 2 for name in ("cos_strides", "sin_strides")}
    for capability, stored, largest in (
        (80, "*bf16", 0.0),
        (90, "*bf16", 0.0),
        (90, "*fp8e4nv", 448.0),
    ):
        for weight in ({"query_weight": None, "key_weight": None}, {}):
            kinds = {
                **dict.fromkeys(_kernel.arg_names, "*bf16"),
                **{"key_cache": stored, "value_cache": stored, "slots": "*i64", "eps": "fp32"},
                **strides,
                "inverse_scales": ("fp32",) * 2,
            }
            options = {**constants, "largest": largest, **weight}
            assert len(machine_code(_kernel, kinds, options, capability, _WARPS)) > 1000
