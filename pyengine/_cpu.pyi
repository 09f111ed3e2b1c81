"""Attention and products with weights on the CPU, written in Rust (`rust/cpu-kernels`, bound by
`rust/cpu-py`).
"""

from os import PathLike
from typing import Any, Final, Self, TypeAlias, final

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

__all__ = [
    "BufferError",
    "ConfigError",
    "CpuAttention",
    "CpuCache",
    "CpuError",
    "CpuStateStep",
    "CpuStep",
    "HandleError",
    "PackedWeight",
    "QuantizedWeight",
    "__version__",
    "add_adapters",
    "add_norm",
    "add_rows",
    "draw_tokens",
    "gate_rows",
    "gated_delta",
    "gated_norm",
    "largest_logits",
    "limit_threads",
    "mamba",
    "mamba2",
    "map_rows",
    "norm_rows",
    "quantise_groups",
    "quantise_q8_0",
    "short_conv",
    "token_logprobs",
]

__version__: str

_Array: TypeAlias = npt.NDArray[np.integer[Any]] | Buffer
_AnyArray: TypeAlias = npt.NDArray[Any] | Buffer
_Floats: TypeAlias = npt.NDArray[np.float32] | Buffer
_Doubles: TypeAlias = npt.NDArray[np.float64] | Buffer
_Bytes: TypeAlias = npt.NDArray[np.uint8] | Buffer
_Norm: TypeAlias = tuple[_Floats, _Floats, float, float]
_Rotation: TypeAlias = tuple[_Floats, _Floats, int, bool, int, _Norm | None]

class CpuError(Exception): ...
class ConfigError(CpuError): ...
class HandleError(CpuError): ...
class BufferError(CpuError): ...

@final
class CpuCache:
    def __new__(cls, keys: _Floats, values: _Floats) -> Self: ...

@final
class CpuStep:
    def __new__(
        cls,
        cache: CpuCache,
        *,
        query_start_loc: _Array,
        seq_lens: _Array,
        block_tables: _Array,
        slots: _Array,
        order: _Array | None = None,
        prefixes: _Array | None = None,
    ) -> Self: ...

@final
class CpuAttention:
    def __new__(cls, num_threads: int, openmp: str | PathLike[str] | None = None) -> Self: ...
    @staticmethod
    def is_fast() -> bool: ...
    @staticmethod
    def isa() -> str: ...
    def forward(
        self,
        step: CpuStep,
        cache: CpuCache,
        query: _Floats,
        key: _Floats,
        value: _Floats,
        out: _Floats,
        *,
        scaling: float,
        sliding_window: int | None = None,
        first_key: int = 0,
        softcap: float | None = None,
        sinks: _Floats | None = None,
        rotation: _Rotation | None = None,
    ) -> None: ...
    def rms_norm(self, rows: _Floats, weight: _Floats, out: _Floats, epsilon: float) -> None: ...

def limit_threads(count: int | None) -> int | None: ...

_NormOfRows: TypeAlias = tuple[_AnyArray | None, _AnyArray | None, float, float, bool]

def add_norm(
    threads: CpuAttention,
    stream: _AnyArray,
    change: _AnyArray,
    scale: float,
    norm: _NormOfRows,
    out: _AnyArray,
) -> None: ...
def norm_rows(
    threads: CpuAttention, rows: _AnyArray, norm: _NormOfRows, out: _AnyArray
) -> None: ...
def add_rows(threads: CpuAttention, sums: _AnyArray, addends: _AnyArray, scale: float) -> None: ...
def map_rows(
    threads: CpuAttention, rows: _AnyArray, out: _AnyArray, function: str, number: float = 1.0
) -> None: ...
def gate_rows(
    threads: CpuAttention,
    rows: _AnyArray,
    out: _AnyArray,
    activation: str = "silu",
    clamped: tuple[float, float] | None = None,
) -> None: ...

@final
class CpuStateStep:
    def __new__(cls, *, query_start_loc: _Array, sources: _Array, slots: _Array) -> Self: ...

def short_conv(
    threads: CpuAttention,
    step: CpuStateStep,
    x: _AnyArray,
    weight: _Floats,
    states: _Floats,
    out: _AnyArray,
    *,
    bias: _Floats | None = None,
    activation: str | None = None,
    gates: tuple[_AnyArray, _AnyArray] | None = None,
) -> None: ...
def gated_delta(
    threads: CpuAttention,
    step: CpuStateStep,
    query: _AnyArray,
    key: _AnyArray,
    value: _AnyArray,
    decay_gate: _AnyArray,
    beta_gate: _AnyArray,
    weights: tuple[_Floats, _Floats],
    states: _Floats,
    out: _AnyArray,
    *,
    scaling: float,
    epsilon: float | None = None,
    beta_scale: float = 1.0,
    tiled_heads: bool = False,
) -> None: ...

_MambaWeights: TypeAlias = tuple[_Floats, _Floats, _Floats]

def mamba2(
    threads: CpuAttention,
    step: CpuStateStep,
    x: _AnyArray,
    dt: _AnyArray,
    b: _AnyArray,
    c: _AnyArray,
    weights: _MambaWeights,
    states: _Floats,
    out: _AnyArray,
    *,
    gate: _AnyArray | None = None,
    dt_limits: tuple[float, float] = ...,
) -> None: ...
def mamba(
    threads: CpuAttention,
    step: CpuStateStep,
    x: _AnyArray,
    dt: _AnyArray,
    b: _AnyArray,
    c: _AnyArray,
    weights: _MambaWeights,
    states: _Floats,
    out: _AnyArray,
    *,
    gate: _AnyArray | None = None,
) -> None: ...
def add_adapters(
    threads: CpuAttention,
    rows: _AnyArray,
    out: _AnyArray,
    slots: _Array,
    down: _Floats,
    up: _Floats,
    ranks: _Array,
    ends: _Array,
) -> None: ...
def gated_norm(
    threads: CpuAttention,
    rows: _AnyArray,
    gates: _AnyArray,
    weight: _AnyArray,
    out: _AnyArray,
    epsilon: float,
    *,
    group_size: int | None = None,
    function: str = "silu",
    is_norm_first: bool = True,
) -> None: ...
def quantise_groups(
    threads: CpuAttention,
    weight: _AnyArray,
    codes: _Bytes,
    scales: _Floats,
    zeros: _Bytes,
) -> None: ...
def quantise_q8_0(threads: CpuAttention, weight: _AnyArray, blocks: _Bytes) -> None: ...

@final
class PackedWeight:
    def __new__(cls, weight: _AnyArray) -> Self: ...
    @staticmethod
    def from_float8(bytes: _AnyArray, scales: _Floats, block: int) -> PackedWeight: ...
    def multiply(
        self, threads: CpuAttention, rows: _AnyArray, out: _AnyArray, bias: _AnyArray | None = None
    ) -> None: ...
    def multiply_gated(
        self,
        threads: CpuAttention,
        rows: _AnyArray,
        gate: PackedWeight,
        out: _AnyArray,
        activation: str = "silu",
    ) -> None: ...
    def gather(self, outputs: _Array, out: _AnyArray) -> None: ...
    in_features: Final[int]
    out_features: Final[int]

@final
class QuantizedWeight:
    def __new__(cls, format: str, data: _Bytes, out_features: int, in_features: int) -> Self: ...
    @staticmethod
    def from_groups(
        codes: _Bytes, scales: _Floats, zeros: _Bytes | None = None, *, group_size: int
    ) -> QuantizedWeight: ...
    def multiply(
        self, threads: CpuAttention, rows: _Floats, out: _Floats, bias: _Floats | None = None
    ) -> None: ...
    def multiply_gated(
        self,
        threads: CpuAttention,
        rows: _Floats,
        gate: QuantizedWeight,
        out: _Floats,
        activation: str = "silu",
    ) -> None: ...
    def gather(self, outputs: _Array, out: _Floats) -> None: ...
    format: Final[str]
    shape: Final[tuple[int, int]]
    num_bytes: Final[int]
    in_features: Final[int]
    out_features: Final[int]

def largest_logits(threads: CpuAttention, logits: _AnyArray, out: _Array) -> None: ...
def draw_tokens(
    threads: CpuAttention,
    logits: _AnyArray,
    rows: _Array,
    settings: _Doubles,
    numbers: _Doubles,
    out: _Array,
) -> None: ...
def token_logprobs(
    threads: CpuAttention,
    logits: _AnyArray,
    reported: tuple[_Array, _Array, _Array],
    out: tuple[_Floats, _Array, _Array, _Floats],
) -> None: ...
