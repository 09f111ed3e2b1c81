"""Devices and number formats by name."""

from types import SimpleNamespace

import pytest
import torch

from pyengine.core.errors import ConfigurationError
from pyengine.models import resolve_device, resolve_dtype, resolve_first_device

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def config(dtype):
    text = SimpleNamespace(dtype=dtype)
    return SimpleNamespace(get_text_config=lambda: text)


def test_auto_takes_cuda_where_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("auto") == CUDA
    assert resolve_device("cuda") == CUDA
    assert resolve_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ConfigurationError, match=r"'cuda:2'.*sees 2 CUDA devices"):
        resolve_device("cuda:2")


def test_cuda_without_a_device_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigurationError, match="sees 0 CUDA devices; use device='cpu'"):
        resolve_device("cuda")


@pytest.mark.parametrize("device", ["gpu", "", "meta", "mps:0", "cuda:x"])
def test_other_devices_are_refused(device):
    with pytest.raises(ConfigurationError, match="device="):
        resolve_device(device)


@pytest.mark.parametrize(
    ("dtype", "saved", "device", "expected"),
    [
        ("auto", torch.bfloat16, CPU, torch.float32),
        ("auto", torch.float16, CUDA, torch.float16),
        ("auto", torch.float32, CUDA, torch.bfloat16),
        ("auto", None, CUDA, torch.bfloat16),
        ("bfloat16", torch.float32, CPU, torch.bfloat16),
        (torch.float16, torch.float32, CPU, torch.float16),
    ],
)
def test_dtypes(dtype, saved, device, expected):
    assert resolve_dtype(dtype, config(saved), device) == expected


@pytest.mark.parametrize("dtype", ["float8", "f32", torch.int8, "None"])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(ConfigurationError, match="dtype="):
        resolve_dtype(dtype, config(None), CPU)


@pytest.mark.parametrize(
    ("count", "device", "size", "expected"),
    [(0, "auto", 2, CPU), (0, "cpu", 3, CPU), (2, "auto", 2, CUDA), (4, "cuda:0", 2, CUDA)],
)
def test_the_processes_of_a_model_start_at_the_first_device(
    monkeypatch, count, device, size, expected
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert resolve_first_device(device, size) == expected


@pytest.mark.parametrize(
    ("device", "size", "words"),
    [
        ("auto", 4, "torch sees 2 CUDA devices .* use tensor_parallel_size=2 or less"),
        ("cuda:1", 2, "from cuda:0 on.*CUDA_VISIBLE_DEVICES"),
        ("cpu", 2, "the 2 CUDA devices that torch sees.*CUDA_VISIBLE_DEVICES"),
        ("auto", 0, "tensor_parallel_size=0: it must be at least 1"),
        ("auto", -3, "tensor_parallel_size=-3: it must be at least 1"),
    ],
)
def test_devices_that_processes_cannot_have(monkeypatch, device, size, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigurationError, match=words):
        resolve_first_device(device, size)
