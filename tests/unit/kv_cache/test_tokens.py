"""Token ids as inputs: accepted forms, and refused ones with their position."""

import array
import ctypes
import sys
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import numpy as np
import pytest

from pyengine.kv_cache import BlockManager, TokenError
from tests.support.blocks import unchanged

TOKENS = [3, 0, 127, 5]
LARGEST = 2**32 - 1


@pytest.fixture
def manager() -> BlockManager:
    return BlockManager(8, 4)


def refused(manager: BlockManager, tokens: Any, *names: object) -> None:
    with unchanged(manager), pytest.raises(TokenError) as raised:
        manager.sequence(tokens)
    assert type(raised.value) is TokenError
    assert all(str(name) in str(raised.value) for name in names), raised.value


# ---- taken


@pytest.mark.parametrize("kind", [list, tuple, iter, bytes, bytearray])
def test_iterables_of_ints(manager: BlockManager, kind: Any) -> None:
    assert manager.sequence(kind(TOKENS)).tokens() == TOKENS


def test_other_things_that_are_ints(manager: BlockManager) -> None:
    assert manager.sequence([np.int64(3), np.uint8(4), 5]).tokens() == [3, 4, 5]
    assert manager.sequence(range(5)).tokens() == [0, 1, 2, 3, 4]


def test_what_follows_a_thing_that_is_no_plain_int_is_read(manager: BlockManager) -> None:
    class Int(int):
        """No plain one, but an int."""

    mixed: list[Any] = [LARGEST, Int(7), 3, np.int64(4), 5]
    assert manager.sequence(mixed).tokens() == [LARGEST, 7, 3, 4, 5]
    refused(manager, [1, Int(7), 3, -1], "token id -1 at position 3 ")


DTYPES = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "longlong"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_arrays(manager: BlockManager, dtype: str) -> None:
    whole = np.array(TOKENS, dtype=dtype)
    assert manager.sequence(whole).tokens() == TOKENS
    largest = min(np.iinfo(dtype).max, LARGEST)
    assert manager.sequence(np.array([largest], dtype=dtype)).tokens() == [largest]
    readonly = whole.copy()
    readonly.setflags(write=False)
    assert manager.sequence(readonly).tokens() == TOKENS


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_views(manager: BlockManager, dtype: str) -> None:
    whole = np.arange(12, dtype=dtype)
    assert manager.sequence(whole[1::3]).tokens() == [1, 4, 7, 10]
    assert manager.sequence(whole[::-1]).tokens() == list(range(11, -1, -1))
    assert manager.sequence(whole.reshape(3, 4)[:, 2]).tokens() == [2, 6, 10]


@pytest.mark.parametrize("code", "bBhHiIlLqQ")
def test_arrays_and_memoryviews(manager: BlockManager, code: str) -> None:
    tokens = array.array(code, TOKENS)
    assert manager.sequence(tokens).tokens() == TOKENS
    assert manager.sequence(memoryview(tokens)).tokens() == TOKENS
    assert manager.sequence(memoryview(tokens)[1:]).tokens() == TOKENS[1:]
    assert manager.sequence(memoryview(tokens)[::2]).tokens() == TOKENS[::2]


def test_torch_tensors(manager: BlockManager) -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.int64, torch.int32, torch.uint8):
        tensor = torch.tensor(TOKENS, dtype=dtype)
        assert manager.sequence(tensor.numpy()).tokens() == TOKENS
        assert manager.sequence(tensor[1:].numpy()).tokens() == TOKENS[1:]
        assert manager.sequence(tensor).tokens() == TOKENS
    columns = torch.arange(6).reshape(3, 2)
    assert manager.sequence(columns[:, 1].numpy()).tokens() == [1, 3, 5]


def test_the_manager_keeps_its_own_copy(manager: BlockManager) -> None:
    tokens = np.array(TOKENS)
    sequence = manager.sequence(tokens)
    tokens[:] = 9
    assert sequence.tokens() == TOKENS
    tokens.resize(2, refcheck=False)  # no buffer is left exported


def test_all_kinds_name_the_same_content(manager: BlockManager) -> None:
    sequence = manager.sequence(TOKENS)
    plan = manager.begin_step(10)
    plan.prefill(sequence, 10)
    plan.commit(np.array([LARGEST], dtype=np.uint32))
    assert sequence.tokens() == [*TOKENS, LARGEST]
    for dtype in DTYPES:
        assert manager.match_prefix(np.array(TOKENS, dtype=dtype)).num_tokens == 4
    assert manager.match_prefix(array.array("H", TOKENS)).num_tokens == 4


SWAPPED = ">" if sys.byteorder == "little" else "<"


def test_arrays_of_the_other_byte_order_are_not_misread(manager: BlockManager) -> None:
    tokens = np.array(TOKENS, dtype=f"{SWAPPED}i4")
    try:
        taken = manager.sequence(tokens).tokens()
    except TokenError:
        return
    assert taken == TOKENS


def test_formats_that_python_itself_cannot_read(manager: BlockManager) -> None:
    tokens = memoryview((ctypes.c_int32 * 4)(*TOKENS))
    assert tokens.format[0] not in {SWAPPED, "i"}
    refused(manager, tokens, tokens.format, "NumPy int64 array")
    assert manager.sequence(np.asarray(tokens)).tokens() == TOKENS


# ---- refused


@pytest.mark.parametrize("bad", [-1, 2**32, -(2**63), 2**63, 10**30])
@pytest.mark.parametrize("position", [0, 3])
def test_numbers_that_do_not_fit_32_bits(manager: BlockManager, bad: int, position: int) -> None:
    tokens = [1] * 5
    tokens[position] = bad
    refused(manager, tokens, f"token id {bad} at position {position} ", "0 to 4294967295")
    assert manager.sequence([0, LARGEST]).tokens() == [0, LARGEST]


@pytest.mark.parametrize(
    ("dtype", "bad"),
    [
        *(("int8", -1), ("int16", -300), ("int32", -(2**31)), ("int64", -1)),
        *(("int64", 2**32), ("uint64", 2**32), ("uint64", 2**64 - 1)),
    ],
)
def test_array_elements_that_do_not_fit(manager: BlockManager, dtype: str, bad: int) -> None:
    tokens = np.array([1, 2, bad, bad], dtype=dtype)
    refused(manager, tokens, f"token id {bad} at position 2 ")
    refused(manager, tokens[::2], f"token id {bad} at position 1 ")
    refused(manager, memoryview(tokens), f"token id {bad} at position 2 ")


@pytest.mark.parametrize("dtype", ["int64", "uint64", "int32"])
def test_arrays_of_every_length_around_a_block_of_a_copy(dtype: str) -> None:
    manager = BlockManager(num_blocks=64, block_size=4)
    random = np.random.default_rng(0)
    for length in [*range(1, 26), 255, 256, 257, 1000]:
        tokens = random.integers(0, 2**31, length).astype(dtype)
        assert manager.sequence(tokens).tokens() == tokens.tolist()
        for bad in {0, length // 2, length - 1} if dtype != "int32" else ():
            wrong = tokens.copy()
            wrong[bad:] += 2**40  # also those after it: the first is named
            refused(manager, wrong, f"token id {wrong[bad]} at position {bad} ")


@pytest.mark.parametrize("bad", [1.0, float("nan"), "7", None, b"7", [1], (), 1j, {}])
def test_items_that_are_no_integers(manager: BlockManager, bad: Any) -> None:
    refused(manager, [1, 2, bad, 4], f"token id {bad} at position 2 ")


@pytest.mark.parametrize(
    ("tokens", "name"),
    [
        (np.array([1.0]), "format"),
        (np.array([True]), "format"),
        (np.array([1j]), "format"),
        (array.array("d", [1]), "format"),
        (np.array([[1, 2]]), "2 dimensions"),
        (np.zeros((1, 1, 1), int), "3 dimensions"),
        (memoryview(b"abcd").cast("B", [2, 2]), "2 dimensions"),
        ([[1, 2], [3, 4]], "token id [1, 2] at position 0"),
        ("12", "token id 1 at position 0"),
        (None, "NoneType"),
        (7, "int"),
        (7.5, "float"),
        (np.int64(7), "int64"),
        (np.array(7), "ndarray"),
        (object(), "object"),
    ],
)
def test_things_that_are_no_list_of_ints(manager: BlockManager, tokens: Any, name: str) -> None:
    refused(manager, tokens, name)


def test_tensors_that_are_no_list_of_ints(manager: BlockManager) -> None:
    torch = pytest.importorskip("torch")
    refused(manager, torch.tensor([1, -2]), "-2", "position 1")
    refused(manager, torch.tensor([1.0]), "integers", '"f"')
    refused(manager, torch.tensor([[1, 2], [3, 4]]), "one-dimensional", "2 dimensions")


def test_a_tensor_of_one_column_is_two_dimensional(manager: BlockManager) -> None:
    torch = pytest.importorskip("torch")
    refused(manager, torch.tensor([[1], [2]]), "one-dimensional", "2 dimensions")


@pytest.mark.parametrize("empty", [[], (), np.array([], int), b"", array.array("B")])
def test_no_tokens(manager: BlockManager, empty: Any) -> None:
    refused(manager, empty, "at least one token")
    assert manager.match_prefix(empty).num_tokens == 0
    assert manager.begin_step(1).commit(empty) == []


def test_an_empty_array_is_an_empty_list(manager: BlockManager) -> None:
    assert manager.match_prefix(array.array("i")).num_tokens == 0


def test_errors_of_the_iterator_come_through(manager: BlockManager) -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise KeyError("mine")

    with unchanged(manager), pytest.raises(KeyError, match="mine"):
        manager.sequence(broken())  # type: ignore[arg-type]


# ---- tensors


class Tensor:
    """Speaks DLPack and nothing else, as a tensor of a library that is not imported."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **settings: Any) -> Any:
        return self.array.__dlpack__(**settings)

    def __dlpack_device__(self) -> tuple[Any, Any]:
        return self.array.__dlpack_device__()


class Elsewhere(Tensor):
    """On a device that NumPy cannot read."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, **settings: Any) -> Any:
        raise BufferError("the memory of another device")


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
def test_tensors_are_read_by_dlpack(manager: BlockManager, kind: Any) -> None:
    assert manager.sequence(Tensor(np.array(TOKENS, kind))).tokens() == TOKENS
    assert manager.sequence(Tensor(np.array([9, *TOKENS, 9] * 2, kind)[1:5])).tokens() == TOKENS
    assert manager.match_prefix(Tensor(np.array(TOKENS, kind))).num_tokens == 0


def test_tensors_that_are_no_token_ids(manager: BlockManager) -> None:
    refused(manager, Tensor(np.array([1.5])), "integers", '"d"')
    refused(manager, Tensor(np.zeros((2, 2), np.int64)), "one-dimensional", 2)
    refused(manager, Tensor(np.array([1, -3])), "token id -3 at position 1")
    refused(manager, Elsewhere(np.array([1])), "memory of another device", "CPU")


def test_tensors_of_torch_cost_what_arrays_cost(manager: BlockManager) -> None:
    torch = pytest.importorskip("torch")
    array = np.arange(100_000)
    tensor = torch.from_numpy(array)
    assert manager.sequence(tensor).tokens() == array.tolist()
    refused(manager, tensor.to(torch.bfloat16), "cannot be read")

    def fastest(tokens: Any) -> float:
        times = []
        for _ in range(20):
            start = perf_counter()
            manager.sequence(tokens)
            times.append(perf_counter() - start)
        return min(times)

    assert fastest(tensor) < 10 * fastest(array)
