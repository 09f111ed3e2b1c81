"""A GGUF file gives the decoder of the model that it was made of."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pyengine.attention.cpu import CpuBackend
from pyengine.cpu import CpuAttention
from pyengine.cpu.threads import kernel_threads
from pyengine.errors import ModelLoadError
from pyengine.models.decoder.cpu_kernels import CpuKernels
from pyengine.models.decoder.decoder import Decoder
from pyengine.models.decoder.gguf import open_gguf
from pyengine.models.decoder.kernels import Kernels
from pyengine.models.decoder.ranks import WHOLE, Rank
from pyengine.models.decoder.torch_kernels import TorchKernels
from pyengine.models.gguf_file import GGUFFile
from tests.support.processes import run_python
from tests.unit.models.decoder.steps import CPU, Runner
from tests.unit.models.decoder.test_divided import on_all_ranks
from tests.unit.models.decoder.test_families import TOLERANCE
from tests.unit.models.decoder.tiny_models import Tiny, random_model
from tests.unit.models.gguf_of_model import CONFIGS, write
from tests.unit.models.tiny_gguf import write_tiny_gguf

ARCHITECTURES = list(CONFIGS)
_TOKENS = [2, 7, 3, 5, 4, 6, 2, 2, 5, 7, 1, 3, 6, 4, 0, 5, 3, 7, 6, 2]


@contextmanager
def loaded(path: Path, kernels: Kernels, rank: Rank = WHOLE) -> Iterator[Decoder]:
    with GGUFFile.open(path) as file:
        decoder = open_gguf(file).decoder(kernels, rank)
    yield decoder


def logits(
    path: Path, kernels: Kernels, backend: Any = None, *, rank: Rank = WHOLE
) -> torch.Tensor:
    with loaded(path, kernels, rank) as decoder:
        runner = Runner(decoder, *([] if backend is None else [backend]))
        sequence = runner.add(_TOKENS)
        runner.step((sequence, 12))
        for _ in _TOKENS[12:]:
            runner.step((sequence, 1))
    return torch.stack(sequence.logits)


def expected(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        actual: torch.Tensor = model(input_ids=torch.tensor([_TOKENS]), use_cache=False).logits[0]
    return actual


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_are_those_of_the_model(architecture: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = write(path, architecture)
    actual = logits(path, TorchKernels(CPU, torch.float32))
    assert expected(model).std() > 0.05
    assert (actual - expected(model)).abs().max() <= TOLERANCE


@pytest.mark.skipif(not CpuAttention.is_fast(), reason="this processor has no AVX2 with FMA")
@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_cpu_multiplies_by_the_formats_of_the_file(
    architecture: str, kind: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    write(path, architecture, kind=kind)
    kernels = CpuKernels(kernel_threads(torch.get_num_threads()))
    actual, floats = (
        logits(path, kernels, CpuBackend),
        logits(path, TorchKernels(CPU, torch.float32)),
    )
    limit = 1e-4 if kind.startswith("F") else 0.05
    assert (actual - floats).norm() <= limit * floats.norm()


@pytest.mark.parametrize("kind", ["F16", "Q4_0"])
@pytest.mark.parametrize("architecture", ["llama", "phi3", "gpt2", "qwen2moe"])
def test_ranks_divide_the_floats_of_a_file(architecture: str, kind: str, tmp_path: Path) -> None:
    path, kernels = tmp_path / "model.gguf", TorchKernels(CPU, torch.float32)
    write(path, architecture, kind=kind)
    whole = logits(path, kernels)
    for actual in on_all_ranks(2, lambda rank: logits(path, kernels, rank=rank)):
        assert (actual - whole).abs().max() <= TOLERANCE


def test_a_rank_reads_its_outputs_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, seen = tmp_path / "model.gguf", []
    write(path, "llama", kind="Q8_0")
    read = GGUFFile.read

    def noted(file: GGUFFile, tensor: Any, out: Any) -> None:
        seen.append((tensor.name, out.nbytes / tensor.num_bytes))
        read(file, tensor, out)

    monkeypatch.setattr(GGUFFile, "read", noted)
    with loaded(path, TorchKernels(CPU, torch.float32), Rank(1, 2)):
        shares = dict(seen)
    names = ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up")
    assert {shares[f"blk.0.{name}.weight"] for name in names} == {0.5}
    assert shares["token_embd.weight"] == 0.5


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
    actual = logits(path, TorchKernels(CPU, torch.float32))
    assert (actual - expected(model)).abs().max() <= TOLERANCE
    before = logits(plain, TorchKernels(CPU, torch.float32))
    assert (actual - before).abs().max() > TOLERANCE


@pytest.mark.parametrize(("size", "rotated"), [(44, 30), (46, 26), (98, 16), (80, 20), (64, 64)])
def test_the_rotated_part_of_a_head_is_that_of_the_header(
    size: int, rotated: int, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    changes = {"head_dim": size, "partial_rotary_factor": 0.5}
    values = {".attention.key_length": size, ".rope.dimension_count": rotated}
    write(path, "nemotron", changes=changes, values={**values, ".attention.value_length": size})
    with GGUFFile.open(path) as file:
        rotary = open_gguf(file).spec.layers[0].mixer.rotary
    assert rotary is not None and (rotary.size, rotary.exponent_size) == (rotated, rotated)


def test_divisors_of_frequencies_change_the_logits(tmp_path: Path) -> None:
    path, plain = tmp_path / "model.gguf", tmp_path / "plain.gguf"
    write(plain, "llama")
    divisors = np.array([1.0, 2.0, 4.0, 8.0], np.float32)
    write(path, "llama", extra={"rope_freqs.weight": divisors})
    with GGUFFile.open(path) as file:
        mixer = open_gguf(file).spec.layers[0].mixer
    assert mixer.rotary is not None and mixer.rotary.scaling is not None
    torch_kernels = TorchKernels(CPU, torch.float32)
    assert (logits(path, torch_kernels) - logits(plain, torch_kernels)).abs().max() > TOLERANCE


def write_gpt_oss(path: Path, kind: str) -> Any:
    """A GPT-OSS with separate experts, as the converter writes it."""
    from gguf import GGMLQuantizationType, GGUFWriter, quantize

    settings = {"head_dim": 32, "hidden_size": 64, "intermediate_size": 96, "sliding_window": 5}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    model = random_model(
        Tiny("gpt_oss", "gpt_oss", {**settings, **experts, "num_hidden_layers": 2})
    )
    writer = GGUFWriter(path, "gpt-oss")
    for key, value in {
        "block_count": 2,
        "context_length": 128,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 6,
        "attention.head_count_kv": 2,
        "attention.key_length": 32,
        "attention.sliding_window": 5,
        "expert_count": 4,
        "expert_used_count": 2,
        "rope.scaling.original_context_length": 4096,
    }.items():
        writer.add_uint32(f"gpt-oss.{key}", value)
    writer.add_string("gpt-oss.rope.scaling.type", "yarn")
    for key, number in {
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 150000.0,
        "rope.scaling.factor": 32.0,
    }.items():
        writer.add_float32(f"gpt-oss.{key}", number)
    for name, tensor in _gpt_oss_tensors(model.state_dict()):
        is_float = tensor.ndim == 1 or "_inp" in name or name.endswith("bias")
        quantization = GGMLQuantizationType["F32" if is_float else kind]
        numbers = tensor.contiguous().numpy()
        writer.add_tensor(name, quantize(numbers, quantization), raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _gpt_oss_tensors(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    names = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "post_attention_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.router": "ffn_gate_inp",
    }
    yield "token_embd.weight", tensors["model.embed_tokens.weight"]
    yield "output_norm.weight", tensors["model.norm.weight"]
    yield "output.weight", tensors["lm_head.weight"]
    for layer in range(2):
        theirs, ours = f"model.layers.{layer}.", f"blk.{layer}."
        for name, tensor in tensors.items():
            stem, _, end = name.removeprefix(theirs).rpartition(".")
            if name.startswith(theirs) and stem in names:
                yield f"{ours}{names[stem]}.{end}", tensor
        yield f"{ours}attn_sinks.weight", tensors[f"{theirs}self_attn.sinks"]
        experts = f"{theirs}mlp.experts."
        gate_up = tensors[f"{experts}gate_up_proj"].transpose(1, 2)
        down = tensors[f"{experts}down_proj"].transpose(1, 2)
        biases = tensors[f"{experts}gate_up_proj_bias"]
        for index, kind in enumerate(("gate", "up")):
            yield f"{ours}ffn_{kind}_exps.weight", gate_up[:, index::2]
            yield f"{ours}ffn_{kind}_exps.bias", biases[:, index::2]
        yield f"{ours}ffn_down_exps.weight", down
        yield f"{ours}ffn_down_exps.bias", tensors[f"{experts}down_proj_bias"]


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_gpt_oss_has_sinks_and_biases_of_experts(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = write_gpt_oss(path, kind)
    actual = logits(path, TorchKernels(CPU, torch.float32))
    limit = 1e-5 if kind == "F32" else 0.05
    assert (actual - expected(model)).norm() <= limit * expected(model).norm()
    if CpuAttention.is_fast():
        packed = logits(path, CpuKernels(kernel_threads(1)), CpuBackend)
        assert (packed - actual).norm() <= max(limit, 1e-4) * actual.norm()


@pytest.mark.skipif(not CpuAttention.is_fast(), reason="this processor has no AVX2 with FMA")
def test_formats_of_one_layer_may_differ(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    kinds = {"attn_v.weight": "Q8_0", "ffn_up.weight": "Q5_0", "attn_k.weight": "F32"}
    write_tiny_gguf(path, kind="Q4_0", kinds=kinds, has_head=True)
    actual = logits(path, CpuKernels(kernel_threads(1)), CpuBackend)
    floats = logits(path, TorchKernels(CPU, torch.float32))
    assert (actual - floats).norm() <= 0.05 * floats.norm()


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
        open_gguf(opened)


_OPEN = """
import sys
from pathlib import Path
from pyengine.cpu.threads import kernel_threads
from pyengine.models.decoder.cpu_kernels import CpuKernels
from pyengine.models.decoder.gguf import open_gguf
from pyengine.models.gguf_file import GGUFFile

for path in sys.argv[1:]:
    with GGUFFile.open(Path(path)) as file:
        open_gguf(file).decoder(CpuKernels(kernel_threads(1)))
assert "transformers" not in sys.modules, "transformers was imported"
"""


@pytest.mark.skipif(not CpuAttention.is_fast(), reason="this processor has no AVX2 with FMA")
def test_files_are_opened_without_transformers(tmp_path: Path) -> None:
    paths = []
    for architecture in ("llama", "gemma3", "qwen3moe"):
        paths.append(str(tmp_path / f"{architecture}.gguf"))
        write(Path(paths[-1]), architecture, kind="Q8_0")
    run_python(_OPEN, *paths)
