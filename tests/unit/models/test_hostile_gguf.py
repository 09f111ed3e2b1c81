"""GGUF files that are damaged, or that change while their weights stay in the file."""

import errno
import os
import shutil
import struct
import time
from contextlib import suppress

import numpy as np
import pytest

from pyengine.errors import ModelLoadError
from pyengine.models import gguf_file
from pyengine.models.gguf_file import GGUFFile
from pyengine.models.gguf_header import read_header
from pyengine.models.loader import checked_source, load_model
from pyengine.models.source import resolve_source
from tests.unit.models.test_gguf_header import spoiled
from tests.unit.models.tiny_gguf import write_tiny_gguf

SECONDS = 5
ARCHITECTURES = {"llama": {}, "qwen3moe": {"experts": 4}, "gpt-oss": {"experts": 4}}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def original(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / f"{request.param}.gguf"
    settings = ARCHITECTURES[request.param]
    write_tiny_gguf(path, architecture=request.param, kind="Q8_0", scale=0.2, **settings)
    return path


@pytest.fixture
def path(original, tmp_path):
    return shutil.copy(original, tmp_path / "tiny.gguf")


def kept(path):
    return load_model(path, device="cpu", dtype="float32")


def refused(path, match=None):
    """With the file's name and what to do, soon."""
    started = time.monotonic()
    with pytest.raises(ModelLoadError, match=match) as caught:
        kept(path)
    assert time.monotonic() - started < SECONDS
    said = str(caught.value)
    assert str(path) in said and len(said) < 4000
    return said


def loaded_or_refused(path):
    with suppress(ModelLoadError):
        assert kept(path).model is not None


def numbers(path):
    """The numbers of the header that say how large the model is, with their places."""
    data, header = path.read_bytes(), read_header(path)
    prefix = f"{header.values['general.architecture']}."
    for key, value in header.values.items():
        if key.startswith(prefix) and not isinstance(value, str):
            yield key, data.index(key.encode()) + len(key)


def test_a_file_that_is_whole_is_loaded(path):
    assert kept(path).path == path


def test_a_file_that_is_cut_anywhere_is_refused(path):
    data = path.read_bytes()
    for length in range(0, len(data), len(data) // 97):
        path.write_bytes(data[:length])
        said = refused(path, r"is not a GGUF|is damaged")
        assert "download it again" in said


@pytest.mark.parametrize("number", [0, 1, 3, 2**31, 2**32 - 1])
def test_sizes_of_any_number_are_loaded_or_refused_soon(path, number):
    data = path.read_bytes()
    for _, at in list(numbers(path)):
        path.write_bytes(data[: at + 4] + struct.pack("<I", number) + data[at + 8 :])
        started = time.monotonic()
        loaded_or_refused(path)
        assert time.monotonic() - started < SECONDS


@pytest.mark.parametrize("kind", [5, 6])
def test_numbers_of_other_types_are_loaded_or_refused(path, kind):
    data = path.read_bytes()
    for _, at in list(numbers(path)):
        path.write_bytes(data[:at] + struct.pack("<I", kind) + data[at + 4 :])
        loaded_or_refused(path)


@pytest.mark.slow
def test_headers_with_any_bytes_changed_are_loaded_or_refused_soon(path):
    data = path.read_bytes()
    for seed in range(60):
        path.write_bytes(spoiled(data, seed))
        started = time.monotonic()
        loaded_or_refused(path)
        assert time.monotonic() - started < 6 * SECONDS


def test_weights_with_any_bytes_changed_are_loaded_or_refused(path):
    """Codes may be any; scales and floats that are not finite are named."""
    data, tensors = path.read_bytes(), read_header(path).tensors
    for number, tensor in enumerate(tensors):
        spoilt = bytearray(data)
        spoilt[tensor.offset : tensor.offset + 4] = struct.pack("<f", [np.nan, np.inf][number % 2])
        spoilt[tensor.offset : tensor.offset + 2] = np.float16(np.nan).tobytes()
        path.write_bytes(spoilt)
        said = refused(path, rf"weights .*{tensor.name}.* (are damaged|hold NaN)")
        assert "damaged" in said


def moved(data, tensor, offset):
    """A file whose header has the tensor elsewhere."""
    at = data.index(tensor.name.encode()) + len(tensor.name)
    at += 4 + 8 * len(tensor.shape) + 4
    return data[:at] + struct.pack("<Q", offset) + data[at + 8 :]


def test_offsets_that_lie_are_refused(path):
    data, header = path.read_bytes(), read_header(path)
    first, *following = header.tensors
    for tensor in following:
        for offset in (0, first.num_bytes - 1, len(data), 2**63, 2**64 - 1):
            path.write_bytes(moved(data, tensor, offset))
            refused(path, r"lies within|does not end within the file")


def test_types_that_are_not_known_are_refused(path):
    data, header = path.read_bytes(), read_header(path)
    for tensor in header.tensors:
        at = data.index(tensor.name.encode()) + len(tensor.name) + 4 + 8 * len(tensor.shape)
        for kind in (4, 5, 200, 2**32 - 1):
            path.write_bytes(data[:at] + struct.pack("<I", kind) + data[at + 4 :])
            refused(path, rf"{tensor.name}' is of type {kind}, which")


def test_odd_shapes_are_refused(path):
    """The same bytes as a matrix of other sides, or of other dimensions."""
    data, header = path.read_bytes(), read_header(path)
    for tensor in header.tensors:
        at = data.index(tensor.name.encode()) + len(tensor.name)
        sides = list(reversed(tensor.shape))
        stored = struct.pack(f"<I{len(sides)}Q", len(sides), *sides)
        assert data[at : at + len(stored)] == stored
        if sides[0] % 64 == 0:
            odd = [sides[0] // 2, *sides[1:-1], sides[-1] * 2]
        elif len(sides) > 1 and sides[-1] % 2 == 0:
            odd = [sides[0] * 2, *sides[1:-1], sides[-1] // 2]
        else:
            continue
        path.write_bytes(
            data[:at] + struct.pack(f"<I{len(odd)}Q", len(odd), *odd) + data[at + len(stored) :]
        )
        refused(path, r"have the shape|cannot have the shape|is damaged|not the number of rows")


def test_a_file_that_is_cut_while_it_is_read_is_refused(path, monkeypatch):
    """At every tensor: the process survives, as nothing is mapped."""
    data, read, count = path.read_bytes(), GGUFFile.read, len(read_header(path).tensors)
    for number in range(count):
        path.write_bytes(data)
        source, calls = resolve_source(path), []

        def cut(file, tensor, out, number=number, calls=calls):
            calls.append(tensor)
            if len(calls) == number + 1:
                os.truncate(path, tensor.offset + 3)
            read(file, tensor, out)

        monkeypatch.setattr(GGUFFile, "read", cut)
        with pytest.raises(ModelLoadError, match=r"was cut while it was read.*; get it again"):
            load_model(source, device="cpu", dtype="float32")


def test_a_file_that_changes_while_it_is_read_is_refused(path, monkeypatch):
    source, read = resolve_source(path), GGUFFile.read

    def grow(file, tensor, out):
        read(file, tensor, out)
        with path.open("ab") as stream:
            stream.write(b"more")

    monkeypatch.setattr(GGUFFile, "read", grow)
    with pytest.raises(ModelLoadError, match=r"was changed while it was read: load it again"):
        load_model(source, device="cpu", dtype="float32")


def test_a_file_that_vanishes_or_is_replaced_while_it_is_read_is_loaded(path, monkeypatch):
    """The open file stays the old one to its end."""
    source, read = resolve_source(path), GGUFFile.read

    def replace(file, tensor, out):
        path.unlink(missing_ok=True)
        path.write_bytes(b"another")
        read(file, tensor, out)

    monkeypatch.setattr(GGUFFile, "read", replace)
    loaded = load_model(source, device="cpu", dtype="float32")
    assert loaded.path == path and path.read_bytes() == b"another"


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE])
def test_a_disk_that_fails_is_named(path, monkeypatch, error):
    source = resolve_source(path)

    def fail(*_arguments):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(gguf_file.os, "preadv", fail)
    with pytest.raises(ModelLoadError, match=os.strerror(error)) as caught:
        load_model(source, device="cpu", dtype="float32")
    assert str(path) in str(caught.value)


def test_a_pipe_in_place_of_a_file_is_not_waited_for(path):
    source = resolve_source(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ModelLoadError, match="there is no model at"):
        resolve_source(path)
    with pytest.raises(ModelLoadError, match=f"{path} is not a regular file"):
        load_model(source, device="cpu", dtype="float32")


def test_a_file_that_is_gone_before_it_is_read_is_refused(path):
    source = resolve_source(path)
    path.unlink()
    with pytest.raises(ModelLoadError, match=f"{path} cannot be read"):
        load_model(source, device="cpu", dtype="float32")


def test_what_is_checked_without_weights_is_refused_as_well(path):
    """`checked_source` reads headers only."""
    assert checked_source(path).path == path
    data, tensor = path.read_bytes(), read_header(path).tensors[-1]
    path.write_bytes(data[: tensor.offset + 1])
    with pytest.raises(ModelLoadError, match="is damaged"):
        checked_source(path)
