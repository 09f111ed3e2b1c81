"""Arrays that no binding may read as numbers: each is refused, or read correctly.

Every binding that accepts an array gets the same values as objects, records, pointers, in the other
byte order, misaligned, strided, reversed, indirect and read-only.
"""

import ctypes
from collections.abc import Callable
from functools import reduce
from operator import mul
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pyengine.cpu import CpuAttention, CpuCache, CpuError, CpuStep, PackedWeight, QuantizedWeight
from pyengine.kv_cache import (
    BlockManager,
    KVBlocks,
    KvError,
    SharedPrefixes,
    StepBuffers,
    SuffixIndex,
)
from tests.support.blocks import computed, step_arrays

pytestmark = pytest.mark.levels

Array = npt.NDArray[Any]
Binding = tuple[Callable[[Any], object], Array]
"""A call with an array, which answers what it has computed of it, and an array that it accepts."""


def floats(*shape: int) -> Array:
    """Different small numbers."""
    return (np.arange(np.prod(shape)).reshape(shape) % 7 - 3).astype(np.float32)


def kv_blocks(array: Any) -> object:
    blocks = KVBlocks([array], [[0]])
    return blocks.num_blocks, blocks.block_bytes(0)


def step_buffers(name: str) -> Binding:
    def fill(array: Any) -> object:
        arrays = step_arrays() | {name: array}
        buffers, manager = StepBuffers(**arrays), BlockManager(8, 4)
        plan = manager.begin_step(8)
        plan.prefill(manager.sequence([1, 2, 3]), 8)
        plan.fill(buffers)
        return np.asarray(arrays[name]).tobytes()

    return fill, step_arrays()[name]


PREFIXES = {"order": (4,), "own_blocks": (4,), "prefixes": (2, 5)}


def shared_prefixes(name: str) -> Binding:
    def make(array: Any) -> object:
        arrays: dict[str, Any] = {
            other: np.zeros(shape, np.int32) for other, shape in PREFIXES.items()
        }
        return SharedPrefixes(**arrays | {name: array}).num_prefixes

    return make, np.zeros(PREFIXES[name], np.int32)


STEP = {
    "query_start_loc": np.array([0, 2], np.int32),
    "seq_lens": np.array([3], np.int32),
    "block_tables": np.array([[2, 0]], np.int32),
    "slots": np.array([1, 0]),
    "order": np.array([0], np.int32),
    "prefixes": np.zeros((0, 5), np.int32),
}
ROWS = {
    "query": floats(2, 4, 3),
    "key": floats(2, 2, 3),
    "value": floats(2, 2, 2),
    "out": np.zeros((2, 4, 2), np.float32),
    "sinks": floats(4),
}
CACHE = {"keys": floats(3, 2, 2, 3), "values": floats(3, 2, 2, 2)}
ROTATION = {"cos": floats(2, 1), "sin": floats(2, 1), "norm": floats(3)}


def attention(name: str, good: Array) -> Binding:
    def forward(array: Any) -> object:
        arguments = {**STEP, **ROWS, **CACHE, **ROTATION, name: array}
        for written in ("out", "keys", "values"):
            if written != name:
                arguments[written] = arguments[written].copy()
        cache = CpuCache(arguments["keys"], arguments["values"])
        step = CpuStep(cache, **{part: arguments[part] for part in STEP})
        norm = (arguments["norm"], arguments["norm"], 1e-6, 0.0)
        rotation = (arguments["cos"], arguments["sin"], 2, False, 1, norm)
        rows = {part: arguments[part] for part in ROWS}
        CpuAttention(1).forward(step, cache, **rows, scaling=1.0, rotation=rotation)
        return [np.asarray(arguments[part]).tobytes() for part in ("out", "keys", "values")]

    return forward, good


NORM = {"rows": floats(2, 8), "weight": floats(8), "out": np.zeros((2, 8), np.float32)}


def rms_norm(name: str) -> Binding:
    def normalise(array: Any) -> object:
        arguments: dict[str, Any] = {**NORM, "out": NORM["out"].copy(), name: array}
        CpuAttention(1).rms_norm(*arguments.values(), 1e-6)
        return np.asarray(arguments["out"]).tobytes()

    return normalise, NORM[name]


PRODUCT = {
    "rows": floats(2, 64),
    "out": np.zeros((2, 3), np.float32),
    "bias": floats(3),
    "outputs": np.array([2, 0]),
    "gathered": np.zeros((2, 64), np.float32),
}
WEIGHTS: dict[str, dict[str, Array]] = {
    "packed": {"weight": floats(3, 64)},
    "float8": {"bytes": np.full((3, 64), 0x38, np.uint8), "scales": floats(3, 2)},
    "ggml": {"data": np.zeros(3 * 2 * 34, np.uint8)},
    "groups": {
        "codes": np.full((3, 32), 0x79, np.uint8),
        "scales": floats(3, 2),
        "zeros": np.full((3, 2), 7, np.uint8),
    },
}
MAKE: dict[str, Callable[..., Any]] = {
    "packed": PackedWeight,
    "float8": lambda bytes, scales: PackedWeight.from_float8(bytes, scales, 32),
    "ggml": lambda data: QuantizedWeight("Q8_0", data, 3, 64),
    "groups": lambda **arrays: QuantizedWeight.from_groups(**arrays, group_size=32),
}


def product(kind: str, name: str, good: Array) -> Binding:
    def multiply(array: Any) -> object:
        written = {part: PRODUCT[part].copy() for part in ("out", "gathered")}
        arguments: dict[str, Any] = {**PRODUCT, **WEIGHTS[kind], **written, name: array}
        weight = MAKE[kind](**{part: arguments[part] for part in WEIGHTS[kind]})
        threads = CpuAttention(1)
        weight.multiply(threads, arguments["rows"], arguments["out"], arguments["bias"])
        outputs = [np.asarray(arguments["out"]).tobytes()]
        weight.multiply_gated(threads, arguments["rows"], weight, arguments["out"])
        weight.gather(arguments["outputs"], arguments["gathered"])
        return [*outputs, *(np.asarray(arguments[part]).tobytes() for part in written)]

    return multiply, good


def match(tokens: Any) -> object:
    manager = BlockManager(8, 4)
    kept = computed(manager, np.arange(1, 9))
    return manager.match_prefix(tokens).num_tokens, kept.num_tokens


def suffix(tokens: Any) -> object:
    index = SuffixIndex(64)
    return index.draft(index.start(tokens), 4)


BINDINGS: dict[str, Binding] = {
    "KVBlocks": (kv_blocks, np.ones((4, 8), np.float32)),
    **{f"StepBuffers {name}": step_buffers(name) for name in step_arrays()},
    **{f"SharedPrefixes {name}": shared_prefixes(name) for name in PREFIXES},
    **{
        f"CpuAttention {name}": attention(name, good)
        for name, good in {**STEP, **ROWS, **CACHE, **ROTATION}.items()
    },
    **{f"rms_norm {name}": rms_norm(name) for name in NORM},
    **{
        f"{kind} {name}": product(kind, name, good)
        for kind, own in WEIGHTS.items()
        for name, good in {**PRODUCT, **own}.items()
    },
    "match_prefix": (match, np.arange(1, 9)),
    "SuffixIndex": (suffix, np.array([1, 2, 3, 1, 2])),
}


def as_records(array: Array, *more: Any) -> Array:
    records = np.zeros(array.shape, [("value", array.dtype), *more])
    records["value"] = array
    return records


def as_pointers(kind: Any) -> Callable[[Array], Any]:
    """An array of ctypes of as many pointers, none of which points anywhere."""

    def make(array: Array) -> Any:
        return reduce(mul, reversed(array.shape), kind)()

    return make


def misaligned(array: Array) -> Array:
    memory = bytearray(array.nbytes + 1)
    moved = np.frombuffer(memory, array.dtype, offset=1).reshape(array.shape)
    moved[...] = array
    return moved


def indirect(array: Array) -> Any:
    """A buffer of pointers to its rows."""
    testing = pytest.importorskip("_testbuffer")
    if array.ndim < 2 or not array.size:
        pytest.skip("it has no rows")
    items = array.reshape(-1).tolist()
    flags = testing.ND_PIL | testing.ND_WRITABLE
    return testing.ndarray(items, list(array.shape), format=array.dtype.char, flags=flags)


def read_only(array: Array) -> Array:
    fixed = array.copy()
    fixed.setflags(write=False)
    return fixed


def released(array: Array) -> memoryview:
    view = memoryview(array.copy())
    view.release()
    return view


BAD: dict[str, Callable[[Array], Any]] = {
    "objects": lambda array: array.astype(object),
    "records": as_records,
    "records with an object": lambda array: as_records(array, ("more", object)),
    "records of the same size": lambda array: array.view([("value", array.dtype)]),
    "objects of ctypes": as_pointers(ctypes.py_object),
    "texts of ctypes": as_pointers(ctypes.c_char_p),
    "pointers of ctypes": as_pointers(ctypes.POINTER(ctypes.c_int)),
    "times": lambda array: array.astype("M8[s]"),
    "texts": lambda array: array.astype("U4"),
    "bytes": lambda array: array.view(f"V{array.itemsize}"),
    "complex numbers": lambda array: array.astype(np.complex128),
    "booleans": lambda array: array.astype(bool),
    "the other byte order": lambda array: array.astype(array.dtype.newbyteorder()),
    "misaligned": misaligned,
    "every other one": lambda array: np.repeat(array, 2, axis=-1)[..., ::2],
    "reversed rows": lambda array: array[::-1].copy()[::-1],
    "reversed columns": lambda array: array[..., ::-1].copy()[..., ::-1],
    "in Fortran's order": np.asfortranarray,
    "one element, broadcast": lambda array: np.broadcast_to(array[:1] * 0, array.shape),
    "indirect": indirect,
    "read-only": read_only,
    "released": released,
    "no dimension": lambda array: np.array(3, array.dtype),
    "one more dimension": lambda array: array[None],
    "a type": type,
}
"""Arrays that are not C-contiguous in the native order of a number, or barely are."""


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("binding", BINDINGS)
def test_it_is_refused_or_read_as_what_it_is(binding: str, bad: str) -> None:
    call, good = BINDINGS[binding]
    array = BAD[bad](good)
    try:
        results = call(array)
    except (KvError, CpuError, ValueError, TypeError) as error:
        assert "\n" not in str(error)
    else:
        plain = np.array(array, order="C")
        if binding not in {"match_prefix", "SuffixIndex", "KVBlocks"}:
            assert plain.dtype == good.dtype
        assert results == call(plain)


OBJECTS = ["objects", "records with an object", "objects of ctypes", "texts of ctypes"]


@pytest.mark.parametrize("bad", [*OBJECTS, "pointers of ctypes", "records", "texts", "bytes"])
def test_blocks_of_anything_but_numbers_are_refused(bad: str) -> None:
    with pytest.raises(KvError, match=r"tensors\[0\] (has format .*: blocks are|has no buffer)"):
        kv_blocks(BAD[bad](np.ones((4, 8), np.float32)))


@pytest.mark.parametrize("code", "bBhHiIlLqQefdgFDG")
def test_blocks_of_all_numbers_are_accepted(code: str) -> None:
    array = np.ones((4, 3), code)
    assert kv_blocks(array) == (4, 3 * array.itemsize)


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_pointers_to_rows_are_never_read_as_rows(name: str) -> None:
    """Rows of attention may be parts of longer ones. Here a row is as long as a pointer."""
    cache = CpuCache(floats(3, 2, 2, 1), floats(3, 2, 2, 1))
    rows: dict[str, Any] = {part: floats(2, 2, 1) for part in ("query", "key", "value", "out")}
    rows[name] = indirect(rows[name])
    with pytest.raises(CpuError, match=f"array {name} is of pointers to its rows"):
        CpuAttention(1).forward(CpuStep(cache, **STEP), cache, **rows, scaling=1.0)
