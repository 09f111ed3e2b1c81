"""The choice of the product of linear layers on this CPU.

The Rust kernel's, where it multiplies the format: a row has the same bits in every batch then, and
few rows take less time than by the others (docs/benchmarks/engine.md). Elsewhere a short
measurement decides, once per shape: MKL, by which torch multiplies, is several times slower than
oneDNN on some processors and faster on others. All layers of a shape use one product for every
number of rows: products differ in their last bits.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from statistics import median
from time import perf_counter, thread_time_ns

import torch
import torch.nn.functional as F

from pyengine.errors import ConfigurationError
from pyengine.models.cpu_kernels import (
    Product,
    available_products,
    kernel_is_default,
    prepared_product,
)
from pyengine.utils.openmp import torch_threads

Multiply = Callable[[torch.Tensor], torch.Tensor]

ROWS = (1, 2, 8)
"""Numbers of rows that are timed: decode steps of as many sequences. More rows, those of prefills,
would take most of the time of a measurement."""
_SAMPLE = 32 << 20
"""Bytes of weights that one pass reads: copies of a small layer, the first outputs of a large one.
A step reads its weights from memory, and what stays in caches is another measurement."""
_MOST_COPIES = 24
_TURNS: tuple[Product, ...] = ("torch", "onednn", "onednn-unpacked", "onednn")
"""The first and the third read the same memory: between them another product reads its own, so that
none finds more of its weights in caches."""
_PENALTIES: Mapping[Product, float] = {
    "onednn": 1,
    "onednn-unpacked": 1.05,
    "torch": 1.25,
}
"""Factors on the times that were measured: a noisy measurement changes nothing. By oneDNN's layout
a row mostly has the same bits in every batch, by torch often not."""
_WORTH_A_COPY = 1.15
"""How much faster oneDNN's layout must be where the weight stays in memory beside it (tied)."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Layers that use the same product. `is_gated`: a gated MLP of `out_features` in the middle.

    `is_tied`: the weight is an embedding's, too.
    """

    in_features: int
    out_features: int
    dtype: torch.dtype
    is_gated: bool = False
    is_tied: bool = False

    def __str__(self) -> str:
        kind = " gated" if self.is_gated else " tied" if self.is_tied else ""
        return f"{self.in_features}x{self.out_features}{kind}"


@dataclass(frozen=True, slots=True)
class ProductChoice:
    """The product of a shape; for every candidate microseconds of processor time by rows."""

    product: Product
    times: Mapping[Product, tuple[float, ...]]
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

    `asked` is the setting `linear_backend`. Raises `ConfigurationError` where a product is asked
    for that does not multiply `dtype` here.
    """

    def __init__(self, asked: str, device: torch.device, dtype: torch.dtype) -> None:
        on_cpu = device.type == "cpu"
        products: list[Product] = available_products(dtype) if on_cpu else ["torch"]
        if asked != "auto" and asked not in products:
            raise ConfigurationError(
                f"linear_backend={asked!r} has no product for {dtype} on {device} here; "
                "use linear_backend='auto'"
            )
        self._fixed: Product | None = None
        self._reason = ""
        if asked != "auto":
            self._fixed = next(each for each in products if each == asked)
            self._reason = "asked for"
        elif products == ["torch"]:
            self._fixed, self._reason = "torch", f"the only one for {dtype} on {device}"
        elif on_cpu and kernel_is_default(dtype):
            self._fixed, self._reason = "pyengine", "a row has the same bits in every batch"
        self._chosen: dict[LayerShape, ProductChoice] = {}

    def __call__(self, shape: LayerShape, weights: Sequence[torch.Tensor]) -> Product:
        """The product of the layers of this shape; `weights` are those of one of them."""
        if self._fixed is not None:
            return self._fixed
        choice = self._chosen[shape] = choose_product(shape, weights)
        return choice.product

    @property
    def in_use(self) -> list[Product]:
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
"""Of this process, for good: two engines of one process compute the same bits."""


def choose_product(shape: LayerShape, weights: Sequence[torch.Tensor]) -> ProductChoice:
    """The product for all layers of this shape in this process; timed at the first call.

    `weights` are those of one such layer, or of gate, up and down.
    """
    found = _choices.get(shape)
    if found is None:
        start = perf_counter()
        times = measure(shape, weights)
        product = best_product(times, is_tied=shape.is_tied)
        found = ProductChoice(product, times, perf_counter() - start)
        _choices[shape] = found
    return found


def best_product(times: Mapping[Product, Sequence[float]], *, is_tied: bool = False) -> Product:
    """The product with the least geometric mean over all numbers of rows, as times of torch's.

    torch must be faster by the factors above than a product whose rows vary less.
    """
    costs = {
        product: _mean_ratio(each, times["torch"]) * _PENALTIES[product]
        for product, each in times.items()
    }
    if is_tied and "onednn" in costs:
        costs["onednn"] *= _WORTH_A_COPY
    return min(costs, key=costs.__getitem__)


def _mean_ratio(times: Sequence[float], others: Sequence[float]) -> float:
    """Geometric mean of the ratios."""
    ratios = [time / other for time, other in zip(times, others, strict=True)]
    return float(prod(ratios) ** (1 / len(ratios)))


def measure(shape: LayerShape, weights: Sequence[torch.Tensor]) -> dict[Product, tuple[float, ...]]:
    """Microseconds of processor time on one thread: other programs hardly change those.

    A time is the median over copies: the first one has oneDNN compile its kernel.
    """
    with torch.inference_mode():
        copies = _sample([weight.detach() for weight in weights])
        timed = [name for name in available_products(shape.dtype) if name in _TURNS]
        with torch_threads(1):
            return _timed(shape, candidates(timed, copies))


def _sample(weights: Sequence[torch.Tensor]) -> list[Sequence[torch.Tensor]]:
    """Copies of small weights, or a part of a large one."""
    num_bytes = sum(weight.nbytes for weight in weights)
    if num_bytes > _SAMPLE and len(weights) == 1:
        [whole] = weights
        return [[whole[: max(1, len(whole) * _SAMPLE // num_bytes)]]]
    num_copies = max(1, min(_MOST_COPIES, _SAMPLE // num_bytes))
    return [
        weights,
        *([each_weight.clone() for each_weight in weights] for _ in range(num_copies - 1)),
    ]


def _timed(
    shape: LayerShape, candidates: Mapping[Product, Sequence[Multiply]]
) -> dict[Product, tuple[float, ...]]:
    timed = [name for name in _TURNS if name in candidates]
    times: dict[Product, list[float]] = {name: [] for name in timed}
    for count in ROWS:
        rows = torch.rand(count, shape.in_features).to(shape.dtype)
        taken: dict[Product, list[float]] = {name: [] for name in timed}
        for name in timed:
            for multiply in candidates[name]:
                start = thread_time_ns()
                multiply(rows)
                taken[name].append((thread_time_ns() - start) / 1000)
        for name, each in taken.items():
            times[name].append(median(each))
    return {name: tuple(medians) for name, medians in times.items()}


def candidates(
    products: Sequence[Product], copies: Sequence[Sequence[torch.Tensor]]
) -> dict[Product, list[Multiply]]:
    """Each of these products over each copy of the weights."""
    return {product: [_multiply(product, weights) for weights in copies] for product in products}


def _multiply(product: Product, weights: Sequence[torch.Tensor]) -> Multiply:
    """A layer, or a gated MLP, by this product."""
    if product == "torch":
        return _by_torch(*weights)
    first, *others = (prepared_product(weight, None, product) for weight in weights)
    if not others:
        multiply: Multiply = first.multiply
        return multiply
    up, down = others
    return lambda rows: down.multiply(up.multiply_gated(rows, first))


def _by_torch(first: torch.Tensor, *others: torch.Tensor) -> Multiply:
    if not others:
        return lambda rows: F.linear(rows, first)
    up, down = others
    return lambda rows: F.linear(F.silu(F.linear(rows, first)) * F.linear(rows, up), down)
