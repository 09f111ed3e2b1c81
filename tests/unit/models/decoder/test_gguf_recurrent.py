"""A GGUF file of a model that keeps states gives the decoder of the model that it was made of."""

from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from pyengine import LLM, SamplingParams
from pyengine.attention.cpu import CpuBackend
from pyengine.cpu import CpuAttention
from pyengine.cpu.threads import kernel_threads
from pyengine.errors import ModelLoadError
from pyengine.models.decoder.cpu_kernels import CpuKernels
from pyengine.models.decoder.gguf import open_gguf
from pyengine.models.decoder.gguf_recurrent import RECURRENT_ARCHITECTURES
from pyengine.models.decoder.torch_kernels import TorchKernels
from pyengine.models.gguf_file import GGUFFile
from tests.unit.models.decoder.steps import CPU
from tests.unit.models.decoder.test_gguf import _TOKENS, expected, logits
from tests.unit.models.decoder.tiny_models import VOCABULARY, random_model
from tests.unit.models.gguf_of_recurrent import TINY, write

TOLERANCE = 3e-4


@pytest.mark.parametrize("architecture", TINY)
def test_logits_are_those_of_the_model(architecture: str, tmp_path: Path) -> None:
    path, model = tmp_path / "model.gguf", random_model(TINY[architecture])
    write(path, architecture, model)
    actual = logits(path, TorchKernels(CPU, torch.float32))
    assert expected(model).std() > 0.05
    assert len(actual) == len(_TOKENS)
    assert (actual - expected(model)).abs().max() <= TOLERANCE


@pytest.mark.skipif(not CpuAttention.is_fast(), reason="this processor has no AVX2 with FMA")
@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
@pytest.mark.parametrize("architecture", TINY)
def test_the_cpu_multiplies_by_the_formats_of_the_file(
    architecture: str, kind: str, tmp_path: Path
) -> None:
    path, model = tmp_path / "model.gguf", random_model(TINY[architecture])
    write(path, architecture, model, kind=kind)
    kernels = CpuKernels(kernel_threads(torch.get_num_threads()))
    actual = logits(path, kernels, CpuBackend)
    floats = logits(path, TorchKernels(CPU, torch.float32))
    limit = 1e-4 if kind == "F16" else 0.1
    # A median: of rows whose experts change, errors say nothing.
    errors = (actual - floats).norm(dim=1) / floats.norm(dim=1)
    assert errors.median() <= limit


@pytest.mark.parametrize("architecture", TINY)
def test_each_key_may_have_any_value(architecture: str, tmp_path: Path) -> None:
    path, model = tmp_path / "model.gguf", random_model(TINY[architecture])
    for key in write(path, architecture, model):
        for value in (None, 0, 7, 2**31, 1.5, "text", [1, 0], True):
            write(path, architecture, model, values={key: value})
            with suppress(ModelLoadError), GGUFFile.open(path) as file:
                open_gguf(file)


@pytest.mark.parametrize("architecture", ["qwen35", "nemotron_h_moe"])
def test_layers_for_speculation_are_left_out(architecture: str, tmp_path: Path) -> None:
    path, model = tmp_path / "model.gguf", random_model(TINY[architecture])
    write(path, architecture, model)
    plain, count = logits(path, TorchKernels(CPU, torch.float32)), model.config.num_hidden_layers
    values: dict[str, object] = {"block_count": count + 1, "nextn_predict_layers": 1}
    if architecture == "nemotron_h_moe":
        kinds = model.config.layers_block_type
        values["attention.head_count_kv"] = [2 if kind == "full_attention" else 0 for kind in kinds]
        values["attention.head_count_kv"] += [2]  # type: ignore[operator]
        values["feed_forward_length"] = [24 if kind == "moe" else 0 for kind in (*kinds, "moe")]
    else:
        values["attention.head_count_kv"] = model.config.num_key_value_heads
    extra = {f"blk.{count}.nextn.eh_proj.weight": np.ones((4, 4))}
    write(path, architecture, model, values=values, extra=extra)
    assert torch.equal(logits(path, TorchKernels(CPU, torch.float32)), plain)


def test_every_architecture_is_tested() -> None:
    assert {name.removesuffix("-dense") for name in TINY} == set(RECURRENT_ARCHITECTURES)


@pytest.mark.parametrize("architecture", TINY)
def test_an_engine_answers_from_the_file(architecture: str, tmp_path: Path) -> None:
    path, model = tmp_path / "model.gguf", random_model(TINY[architecture])
    write(path, architecture, model)
    tokens = torch.randint(3, VOCABULARY, (70,), generator=torch.Generator().manual_seed(3))
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=8)
    sizes = {"num_blocks": 64, "block_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    with LLM(path, device="cpu", **sizes) as llm:
        outputs = [llm.generate([tokens.tolist()], params, use_tqdm=False)[0] for _ in range(2)]
    with torch.inference_mode():
        for _ in range(8):
            logits = model(input_ids=tokens[None], use_cache=False).logits
            tokens = torch.cat([tokens, logits[0, -1:].argmax(-1)])
    for output in outputs:
        assert list(output.outputs[0].token_ids) == tokens[70:].tolist()
    assert [output.num_cached_tokens for output in outputs] == [0, 64]
