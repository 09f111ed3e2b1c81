"""A GGUF file gives the decoder of the model that it was made of."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pyengine.attention.cpu import CpuBackend
from pyengine.errors import ModelLoadError
from pyengine.kv_cache import CpuAttention
from pyengine.models.cpu_kernels import kernel_threads
from pyengine.models.decoder.cpu_kernels import CpuKernels
from pyengine.models.decoder.decoder import Decoder
from pyengine.models.decoder.gguf import check_gguf, load_gguf_decoder
from pyengine.models.decoder.kernels import Kernels
from pyengine.models.decoder.torch_kernels import TorchKernels
from pyengine.models.gguf_file import GGUFFile
from tests.unit.models.decoder.steps import CPU, Runner
from tests.unit.models.decoder.test_families import TOLERANCE
from tests.unit.models.gguf_of_model import CONFIGS, tiny_model, write_gguf_of

ARCHITECTURES = [name for name in CONFIGS if name not in ("stablelm", "nemotron")]
_TOKENS = [2, 7, 3, 5, 4, 6, 2, 2, 5, 7, 1, 3, 6, 4, 0, 5, 3, 7, 6, 2]


@contextmanager
def loaded(path: Path, kernels: Kernels) -> Iterator[Decoder]:
    with GGUFFile.open(path) as file:
        decoder = load_gguf_decoder(file, kernels)
    yield decoder


def logits(path: Path, kernels: Kernels, backend: Any = None) -> torch.Tensor:
    with loaded(path, kernels) as decoder:
        runner = Runner(decoder, *([] if backend is None else [backend]))
        sequence = runner.add(_TOKENS)
        runner.step((sequence, 12))
        for _ in _TOKENS[12:]:
            runner.step((sequence, 1))
    return torch.stack(sequence.logits)


def expected(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(input_ids=torch.tensor([_TOKENS]), use_cache=False).logits[0]
    return found


def write(path: Path, architecture: str, *, changes: Any = None, **file: Any) -> Any:
    eager = {"attn_implementation": "eager"}
    model = tiny_model(architecture, **{**eager, **(changes or {})})
    write_gguf_of(model, path, architecture, **file)
    return model


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_are_those_of_the_model(architecture: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = write(path, architecture)
    found = logits(path, TorchKernels(CPU, torch.float32))
    assert expected(model).std() > 0.05
    assert (found - expected(model)).abs().max() <= TOLERANCE


@pytest.mark.skipif(not CpuAttention.is_fast(), reason="this processor has no AVX2 with FMA")
@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_cpu_multiplies_by_the_formats_of_the_file(
    architecture: str, kind: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    write(path, architecture, kind=kind)
    kernels = CpuKernels(kernel_threads(torch.get_num_threads()))
    found, floats = (
        logits(path, kernels, CpuBackend),
        logits(path, TorchKernels(CPU, torch.float32)),
    )
    limit = 1e-4 if kind.startswith("F") else 0.05
    assert (found - floats).norm() <= limit * floats.norm()


@pytest.mark.parametrize(
    "values",
    [
        {".rope.freq_base": 500.0},
        {".rope.scaling.type": "linear", ".rope.scaling.factor": 4.0},
        {
            ".rope.scaling.type": "yarn",
            ".rope.scaling.factor": 4.0,
            ".rope.scaling.original_context_length": 16,
        },
        {".attention.layer_norm_rms_epsilon": 0.3},
    ],
    ids=lambda values: next(iter(values)),
)
def test_a_changed_key_changes_the_logits_as_in_a_folder(
    values: dict[str, Any], tmp_path: Path
) -> None:
    path, plain = tmp_path / "model.gguf", tmp_path / "plain.gguf"
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    changes: dict[str, Any] = {"rope_parameters": rope}
    rope["rope_theta"] = values.get(".rope.freq_base", 10000.0)
    if ".rope.scaling.type" in values:
        rope |= {"rope_type": values[".rope.scaling.type"], "factor": 4.0}
    if rope["rope_type"] == "yarn":
        rope["original_max_position_embeddings"] = 16
    if ".attention.layer_norm_rms_epsilon" in values:
        changes["rms_norm_eps"] = 0.3
    write(plain, "llama")
    model = write(path, "llama", changes=changes, values=values)
    found = logits(path, TorchKernels(CPU, torch.float32))
    assert (found - expected(model)).abs().max() <= TOLERANCE
    before = logits(plain, TorchKernels(CPU, torch.float32))
    assert (found - before).abs().max() > TOLERANCE


def test_divisors_of_frequencies_change_the_logits(tmp_path: Path) -> None:
    path, plain = tmp_path / "model.gguf", tmp_path / "plain.gguf"
    write(plain, "llama")
    divisors = np.array([1.0, 2.0, 4.0, 8.0], np.float32)
    write(path, "llama", extra={"rope_freqs.weight": divisors})
    with GGUFFile.open(path) as file:
        mixer = check_gguf(file).layers[0].mixer
    assert mixer.rotary is not None and mixer.rotary.scaling is not None
    torch_kernels = TorchKernels(CPU, torch.float32)
    assert (logits(path, torch_kernels) - logits(plain, torch_kernels)).abs().max() > TOLERANCE


def test_formats_of_one_layer_may_differ(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, "qwen2", kind="Q8_0")
    with loaded(path, CpuKernels(kernel_threads(1))):
        pass


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ({"values": {".attention.temperature": 2.0}}, "attention.temperature"),
        ({"values": {".context_length": None}}, "context_length"),
        ({"values": {".attention.head_count": "four"}}, "head_count"),
        ({"values": {".attention.sliding_window": 7}}, "sliding_window"),
        ({"values": {".residual_scale": 0.5}}, "residual_scale"),
        ({"extra": {"blk.0.attn_gate.weight": np.ones((4, 32), np.float32)}}, "attn_gate"),
    ],
    ids=["unknown key", "missing key", "text", "window", "scale", "unknown tensor"],
)
def test_what_nothing_reads_is_refused_by_name(
    file: dict[str, Any], named: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    write(path, "llama", **file)
    with pytest.raises(ModelLoadError, match=named), GGUFFile.open(path) as opened:
        check_gguf(opened)
