"""GGUF files that lie: about counts, lengths, offsets and types."""

import math
import random
import struct
import time
from contextlib import suppress

import pytest

from pyengine.errors import ModelLoadError
from pyengine.models.gguf_header import GGML_TYPES, read_header
from pyengine.models.loader import checked_source, load_model
from tests.unit.models.tiny_gguf import write_tiny_gguf

SECONDS = 5


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_tiny_gguf(path)
    return path.read_bytes()


def refused(path, content, match):
    path.write_bytes(content)
    started = time.monotonic()
    with pytest.raises(ModelLoadError, match=match) as caught:
        checked_source(path)
    assert time.monotonic() - started < SECONDS
    assert str(path) in str(caught.value)


def gguf(*, tensors=1, values=0, rest=b""):
    return struct.pack("<4sIQQ", b"GGUF", 3, tensors, values) + rest


def string(text):
    return struct.pack("<Q", len(text)) + text


def tensor(name=b"a", dims=(4,), kind=0, offset=0):
    return (
        string(name)
        + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        + struct.pack("<IQ", kind, offset)
    )


def value(kind, body, key=b"k"):
    return string(key) + struct.pack("<I", kind) + body


def array(kind, length, body=b""):
    return value(9, struct.pack("<IQ", kind, length) + body)


ZEROS = bytes(1000)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gguf(tensors=0, rest=ZEROS), "declares no tensors"),
        (gguf(tensors=2**63), "is damaged"),
        (gguf(values=2**63), "is damaged"),
        (gguf(values=2**63, rest=bytes(10**6)), "is damaged"),
        (gguf(tensors=2**63, rest=bytes(10**6)), "has 0 dimensions"),
        (gguf(values=1, rest=struct.pack("<Q", 2**63)), "do not end within the file"),
        (gguf(values=1, rest=value(8, struct.pack("<Q", 2**40))), "do not end within the file"),
        (gguf(values=1, rest=array(0, 2**60)), "do not end within the file"),
        (gguf(values=1, rest=array(12, 2**61)), "do not end within the file"),
        (gguf(values=1, rest=array(8, 2**60) + ZEROS), "strings at .* do not end"),
        (gguf(values=1, rest=array(9, 2**60) + ZEROS), "an array is of type 9"),
        (gguf(values=1, rest=value(99, ZEROS)), "of type 99"),
        (
            gguf(values=1, rest=array(6, 2**24) + bytes(2**26)),
            "'k': 16777216 numbers are more than",
        ),
        (
            gguf(values=1, rest=array(12, 5000, struct.pack("<5000d", *[math.inf] * 5000))),
            "'k': it holds NaN",
        ),
        (
            gguf(values=1, rest=array(6, 5000, bytes(19_996) + struct.pack("<f", math.nan))),
            "holds NaN",
        ),
        (gguf(rest=tensor(dims=()) + ZEROS), "has 0 dimensions"),
        (gguf(rest=tensor(dims=(1,) * 5) + ZEROS), "has 5 dimensions"),
        (gguf(rest=tensor(dims=(2**63, 2**63)) + ZEROS), "does not end within the file"),
        (gguf(rest=tensor(dims=(0,)) + ZEROS), "cannot have the shape"),
        (gguf(rest=tensor(dims=(33,), kind=8) + ZEROS), "cannot have the shape"),
        (gguf(rest=tensor(kind=4) + ZEROS), "of type 4, which"),
        (gguf(rest=tensor(kind=2**31) + ZEROS), "of type 2147483648, which"),
        (gguf(rest=tensor(offset=2**63) + ZEROS), "does not end within the file"),
        (gguf(tensors=2, rest=tensor() + tensor(offset=32) + ZEROS), "have one name"),
        (gguf(tensors=2, rest=tensor() + tensor(b"b", offset=8) + ZEROS), "'b' lies within 'a'"),
        (
            gguf(values=1, rest=value(4, bytes(4), b"general.alignment") + tensor() + ZEROS),
            "its alignment is 0",
        ),
        (
            gguf(
                values=1,
                rest=value(10, struct.pack("<Q", 2**62), b"general.alignment") + tensor() + ZEROS,
            ),
            "its alignment is",
        ),
        (gguf(rest=tensor() + ZEROS), "declares None layers of the architecture None"),
        (
            gguf(values=1, rest=value(4, struct.pack("<I", 3), b"split.count") + tensor() + ZEROS),
            "one of 3 files",
        ),
        (struct.pack(">4sIQQ", b"GGUF", 3, 1, 0) + ZEROS, "for big-endian machines"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path, content, message):
    refused(tmp_path / "model.gguf", content, message)


def test_a_whole_header_is_read(tmp_path, content):
    path = tmp_path / "tiny.gguf"
    path.write_bytes(content)
    header = read_header(path)
    assert header.values["general.architecture"] == "llama"
    assert (len(header.tensors), header.main_type) == (11, "F32")
    assert header.num_elements == 10_592


def test_a_file_that_is_cut_anywhere_is_refused(tmp_path, content):
    for length in range(0, len(content), 251):
        refused(tmp_path / "model.gguf", content[:length], "is not a GGUF|is damaged")


def test_headers_with_any_bytes_changed_are_read_or_refused_soon(tmp_path, content):
    path = tmp_path / "model.gguf"
    for seed in range(2000):
        path.write_bytes(spoiled(content, seed))
        started = time.monotonic()
        with suppress(ModelLoadError):
            read_header(path)
        assert time.monotonic() - started < SECONDS


@pytest.mark.slow
def test_files_with_any_bytes_changed_are_loaded_or_refused_soon(tmp_path, content):
    path = tmp_path / "model.gguf"
    for seed in range(60):
        path.write_bytes(spoiled(content, seed))
        started = time.monotonic()
        with suppress(ModelLoadError):
            load_model(path, device="cpu")
        assert time.monotonic() - started < 6 * SECONDS


def spoiled(content, seed):
    """`content` with up to three words of its header changed, mostly to extreme numbers."""
    chosen = random.Random(seed)
    changed = bytearray(content)
    for _ in range(chosen.randint(1, 3)):
        at = chosen.randrange(4, 1500)
        number = chosen.choice([0, 1, 2**31, 2**32 - 1, chosen.getrandbits(32)])
        changed[at : at + 4] = struct.pack("<I", number)
    return bytes(changed)


@pytest.mark.parametrize(
    ("key", "number"),
    [
        (b"llama.embedding_length", 2**31 - 2),
        (b"llama.feed_forward_length", 2**32 - 1),
        (b"llama.attention.head_count", 2**31),
        (b"llama.attention.head_count", 0),
        (b"llama.context_length", 2**32 - 1),
        (b"llama.context_length", 0),
        (b"llama.vocab_size", 2**32 - 1),
        (b"llama.block_count", 2**32 - 1),
    ],
)
def test_sizes_that_the_tensors_do_not_have_are_refused(tmp_path, content, key, number):
    at = content.index(key) + len(key) + 4
    changed = content[:at] + struct.pack("<I", number) + content[at + 4 :]
    path = tmp_path / "model.gguf"
    path.write_bytes(changed)
    started = time.monotonic()
    with pytest.raises(ModelLoadError):
        load_model(path, device="cpu")
    assert time.monotonic() - started < SECONDS


def test_types_are_those_of_the_library():
    from gguf import GGML_QUANT_SIZES

    known = {int(kind): (kind.name, *size) for kind, size in GGML_QUANT_SIZES.items()}
    assert GGML_TYPES.items() >= known.items()


@pytest.mark.parametrize("kind", [24, 26, 28, 9])
def test_types_whose_numbers_are_not_read_are_refused_by_name(tmp_path, kind):
    path = tmp_path / "model.gguf"
    write_tiny_gguf(path, kind="F32")
    tensor = next(item for item in read_header(path).tensors if item.name.endswith("ffn_up.weight"))
    data = path.read_bytes()
    at = data.index(tensor.name.encode()) + len(tensor.name) + 4 + 8 * len(tensor.shape)
    path.write_bytes(data[:at] + struct.pack("<I", kind) + data[at + 4 :] + bytes(10**5))
    said = rf"ffn_up\.weight.* of type {GGML_TYPES[kind][0]}, whose numbers|lies within"
    refused(path, path.read_bytes(), said)
