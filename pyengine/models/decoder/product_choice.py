"""The choice of the product of linear layers on this CPU.

The Rust kernel's, where it multiplies the format: a row has the same bits in every batch then, and
few rows take less time than by the others (docs/benchmarks/engine.md). Elsewhere a short
measurement decides, once per shape: MKL, by which torch multiplies, is several times slower than
oneDNN on some processors and faster on others. All layers of a shape use one product for every
number of rows: products differ in their last bits.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from math import prod
from time import perf_counter, thread_time_ns
from typing import Any

import numpy as np

from pyengine.cpu import CpuAttention
from pyengine.errors import ConfigurationError
from pyengine.models.decoder.cpu_numbers import NUMPY, Dtype
from pyengine.models.decoder.float_products import ProductName, float_product, onednn_gate
from pyengine.utils.dtypes import Rows, rounded
from pyengine.utils.openmp import torch_threads

Multiply = Callable[[Rows], Rows]
Weights = Sequence[Rows]
"""The matrix of a layer; or gate and up of a gated one."""

ROWS = (1, 2, 8)
"""Numbers of rows that are timed, those of decode steps. More rows, those of prefills,
would take most of the time of a measurement."""
_SAMPLE = 32 << 20
"""Bytes of weights that one pass reads: copies of a small layer, the first outputs of a large one.
A step reads its weights from memory, and what stays in caches is another measurement."""
_MAX_COPIES = 24
_TURNS: tuple[ProductName, ...] = ("torch", "onednn", "onednn-unpacked", "onednn")
"""The first and the third read the same memory: between them another product reads its own, so that
none finds more of its weights in caches."""
_PENALTIES: Mapping[ProductName, float] = {"onednn": 1, "onednn-unpacked": 1.05, "torch": 1.25}
"""Factors on measured times: a noisy measurement changes nothing. By oneDNN's layout
a row mostly has the same bits in every batch, by torch often not."""
_WORTH_A_COPY = 1.15
"""How much faster oneDNN's layout must be where the weight stays in memory beside it (tied)."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Layers that use the same product.

    `is_gated`: gate and up, of `out_features` each. `is_tied`: the weight is an embedding's, too.
    """

    in_features: int
    out_features: int
    dtype: Dtype
    is_gated: bool = False
    is_tied: bool = False

    def __str__(self) -> str:
        kind = " gated" if self.is_gated else " tied" if self.is_tied else ""
        return f"{self.in_features}x{self.out_features}{kind}"


@dataclass(frozen=True, slots=True)
class ProductChoice:
    """The product of a shape; for every candidate microseconds of processor time by rows."""

    product: ProductName
    times: Mapping[ProductName, tuple[float, ...]]
    seconds: float = 0.0
    """How long the measurement took."""

    @property
    def reason(self) -> str:
        """The product, and the times of oneDNN as shares of those of torch."""
        shares = [
            f"{name} takes {_mean_ratio(times, self.times['torch']):.2f} of torch's time"
            for name, times in self.times.items()
            if name != "torch"
        ]
        return f"{self.product} ({', '.join(shares)})"


class ProductChooser:
    """Chooses the products of a model's layers, and remembers the choices.

    `requested` is the setting `linear_backend`. Raises `ConfigurationError` for a requested product
    that does not multiply `dtype` here.
    """

    def __init__(self, requested: str, dtype: Dtype) -> None:
        self._fixed: ProductName | None = None
        self._chosen: dict[LayerShape, ProductChoice] = {}
        if requested in ("auto", "pyengine") and kernel_supports(dtype):
            same_bits = "a row has the same bits in every batch"
            self._fixed = "pyengine"
            self._reason = same_bits if requested == "auto" else "asked for"
            return
        products = available_products(dtype)
        if requested != "auto":
            if requested not in products:
                why = "" if _has_torch() else ": torch is not installed"
                raise ConfigurationError(
                    f"linear_backend={requested!r} has no product for {dtype} on cpu here{why}; "
                    "use linear_backend='auto'"
                )
            self._fixed = next(product for product in products if product == requested)
            self._reason = "asked for"
        elif len(products) == 1:
            self._fixed, self._reason = products[0], f"the only one for {dtype} on cpu"

    @classmethod
    def fixed(cls, product: ProductName, reason: str) -> "ProductChooser":
        """A chooser without a choice."""
        chooser = cls.__new__(cls)
        chooser._fixed, chooser._reason, chooser._chosen = product, reason, {}
        return chooser

    @property
    def only(self) -> ProductName | None:
        """The product of all layers; None: layers are timed."""
        return self._fixed

    @property
    def may_be_torch(self) -> bool:
        """True if torch, or oneDNN in torch, may multiply."""
        return self._fixed != "pyengine"

    def __call__(self, shape: LayerShape, weights: Weights) -> ProductName:
        """The product of the layers of this shape; `weights` are those of one of them."""
        if self._fixed is not None:
            return self._fixed
        choice = self._chosen[shape] = choose_product(shape, weights)
        return choice.product

    @property
    def in_use(self) -> list[ProductName]:
        """The products of the layers that were chosen for so far."""
        if self._fixed is not None:
            return [self._fixed]
        return sorted({choice.product for choice in self._chosen.values()}) or ["torch"]

    def describe(self) -> dict[str, object]:
        """The products in use and why, for `describe()` and `pyengine info`."""
        if self._fixed is not None:
            return {"linear_backend": self._fixed, "linear_reason": self._reason}
        parts = [f"{shape}: {choice.reason}" for shape, choice in self._chosen.items()]
        seconds = sum(choice.seconds for choice in self._chosen.values())
        return {
            "linear_backend": " and ".join(self.in_use),
            "linear_reason": f"timed in {seconds:.2f} s: {'; '.join(parts)}",
        }


_choices: dict[LayerShape, ProductChoice] = {}
"""Kept until the process ends: its engines compute the same bits."""


def choose_product(shape: LayerShape, weights: Weights) -> ProductChoice:
    """The product for all layers of this shape in this process; timed at the first call.

    `weights` are those of one such layer, or of gate, up and down.
    """
    choice = _choices.get(shape)
    if choice is None:
        start = perf_counter()
        times = measure(shape, weights)
        product = best_product(times, is_tied=shape.is_tied)
        choice = ProductChoice(product, times, perf_counter() - start)
        _choices[shape] = choice
    return choice


def best_product(
    times: Mapping[ProductName, Sequence[float]], *, is_tied: bool = False
) -> ProductName:
    """The product with the smallest geometric mean over all numbers of rows, as times of torch's.

    torch must be faster by the factors above than a product whose rows vary less.
    """
    costs = {
        product: _mean_ratio(own_times, times["torch"]) * _PENALTIES[product]
        for product, own_times in times.items()
    }
    if is_tied and "onednn" in costs:
        costs["onednn"] *= _WORTH_A_COPY
    return min(costs, key=costs.__getitem__)


def _mean_ratio(times: Sequence[float], base_times: Sequence[float]) -> float:
    """Geometric mean of the ratios."""
    ratios = [time / base for time, base in zip(times, base_times, strict=True)]
    return float(prod(ratios) ** (1 / len(ratios)))


def measure(shape: LayerShape, weights: Weights) -> dict[ProductName, tuple[float, ...]]:
    """Microseconds of processor time on one thread: other programs hardly change those.

    A time is the median over copies: the first one has oneDNN compile its kernel.
    """
    copies = _sample(weights)
    timed = [name for name in available_products(shape.dtype) if name in _TURNS]
    with torch_threads(1):
        return _timed(shape, candidates(timed, copies))


def _sample(weights: Weights) -> list[Weights]:
    """Copies of small weights, or a part of a large one."""
    num_bytes = sum(weight.nbytes for weight in weights)
    if num_bytes > _SAMPLE:
        return [[weight[: max(1, len(weight) * _SAMPLE // num_bytes)] for weight in weights]]
    num_copies = max(1, min(_MAX_COPIES, _SAMPLE // max(num_bytes, 1)))
    return [weights, *([weight.copy() for weight in weights] for _ in range(num_copies - 1))]


def _timed(
    shape: LayerShape, candidates: Mapping[ProductName, Sequence[Multiply]]
) -> dict[ProductName, tuple[float, ...]]:
    timed = [name for name in _TURNS if name in candidates]
    times: dict[ProductName, list[float]] = {name: [] for name in timed}
    rng = np.random.default_rng(0)
    for count in ROWS:
        floats = rng.random((count, shape.in_features), dtype=np.float32)
        rows = rounded(floats, NUMPY[shape.dtype])
        timings: dict[ProductName, list[float]] = {name: [] for name in timed}
        for name in timed:
            for multiply in candidates[name]:
                start = thread_time_ns()
                multiply(rows)
                timings[name].append((thread_time_ns() - start) / 1000)
        for name, durations in timings.items():
            times[name].append(float(np.median(durations)))
    return {name: tuple(medians) for name, medians in times.items()}


def candidates(
    products: Sequence[ProductName], copies: Sequence[Weights]
) -> dict[ProductName, list[Multiply]]:
    """Each of these products over each copy of the weights."""
    return {product: [_multiply(product, weights) for weights in copies] for product in products}


def _multiply(product: ProductName, weights: Weights) -> Multiply:
    """A layer, or a gated one; torch's gate is one product of gate and up."""
    layer: Any
    if len(weights) == 1:
        layer = float_product(product, weights[0])
    elif product == "torch":
        layer = float_product(product, np.concatenate(weights))
    else:
        layer = onednn_gate(product, weights[0], weights[1], "silu")
    multiply: Multiply = layer.multiply
    return multiply


def available_products(dtype: Dtype) -> list[ProductName]:
    """The products of this CPU for weights of this format; imports torch if it is installed."""
    products: list[ProductName] = []
    if _has_torch():
        products += ["torch"]
        if onednn_supports(dtype):
            products += ["onednn", "onednn-unpacked"]
    if kernel_supports(dtype) or not products:
        products += ["pyengine"]
    return products


def _has_torch() -> bool:
    """True if torch is installed."""
    return find_spec("torch") is not None


def kernel_supports(dtype: Dtype) -> bool:
    """True if the Rust kernel multiplies this format here, and has instructions to be fast."""
    return dtype in NUMPY and CpuAttention.is_fast()


@cache
def onednn_supports(dtype: Dtype) -> bool:
    """True if oneDNN multiplies this format here with weights in its layout."""
    import torch

    backend: Any = torch.backends.mkldnn
    if dtype not in NUMPY or not backend.is_available():
        return False
    zeros = np.zeros((16, 16), NUMPY[dtype])
    try:
        float_product("onednn", zeros).multiply(zeros[:1])
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return True
