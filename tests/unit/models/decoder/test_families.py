"""Every family computes what transformers computes, over a paged cache."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pyengine.attention.backend import AttentionBackend
from pyengine.attention.cpu import CpuBackend
from pyengine.attention.gather import GatherBackend
from pyengine.cpu import CpuAttention
from pyengine.cpu.threads import kernel_threads
from pyengine.models.decoder.cpu_kernels import CpuKernels
from pyengine.models.decoder.cpu_numbers import Dtype
from pyengine.models.decoder.families import TABLE
from pyengine.models.decoder.kernels import Kernels
from pyengine.models.decoder.loading import open_model, read_spec, spec_of
from pyengine.models.decoder.torch_kernels import TorchKernels
from tests.support.processes import run_python
from tests.unit.models.decoder.steps import CPU, Runner, generate
from tests.unit.models.decoder.tiny_models import MODELS, RECURRENT, Tiny

TOLERANCE = 2e-4
_TOLERANCE_OF_GATED_DELTA = 6e-4
"""Of Qwen's gated delta nets, where transformers in float32 is as far from float64 as ours."""
_MIN_SPREAD = 0.02
"""Deviation of logits below which a difference would not be seen."""
Saved = Callable[[Tiny], tuple[Path, Any]]


SETS: dict[str, tuple[Callable[[], Kernels], type[AttentionBackend]]] = {
    "torch": (lambda: TorchKernels(CPU, torch.float32), GatherBackend),
    "cpu": (lambda: CpuKernels(kernel_threads(torch.get_num_threads())), CpuBackend),
}
"""Kernel sets, each with its backend of attention."""


def tolerance_of(tiny: Tiny) -> float:
    is_gated_delta = tiny.family.startswith(("qwen3_next", "qwen3_5"))
    return _TOLERANCE_OF_GATED_DELTA if is_gated_delta else TOLERANCE


@pytest.mark.parametrize("kernels", SETS)
@pytest.mark.parametrize("tiny", MODELS, ids=lambda tiny: tiny.name)
def test_logits_and_tokens_are_those_of_transformers(
    tiny: Tiny, kernels: str, saved: Saved, prompts: list[list[int]]
) -> None:
    if kernels == "cpu" and not CpuAttention.is_fast():
        pytest.skip("this processor has no AVX2 with FMA")
    folder, model = saved(tiny)
    make_kernels, backend = SETS[kernels]
    decoder = open_model(folder).decoder(make_kernels())
    for sequence in generate(Runner(decoder, backend), prompts, 8):
        with torch.inference_mode():
            expected = model(input_ids=torch.tensor([sequence.tokens]), use_cache=False).logits[0]
        actual = torch.stack(sequence.logits)
        assert expected.std() > _MIN_SPREAD
        assert len(actual) == len(expected) > len(prompts[0])
        assert (actual - expected).abs().max() <= tolerance_of(tiny)
        assert torch.equal(actual.argmax(-1), expected.argmax(-1))


def test_every_family_of_the_table_is_tested() -> None:
    assert {tiny.family for tiny in MODELS} == set(TABLE)


def test_layers_differ_in_their_windows(saved: Saved) -> None:
    folder, _ = saved(next(tiny for tiny in MODELS if tiny.name == "gemma3"))
    assert read_spec(folder).windows == (9, 9, 9, 9, 9, None, 9)


@pytest.mark.skipif(not CpuAttention.is_fast(), reason="this processor has no AVX2 with FMA")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tiny", MODELS, ids=lambda tiny: tiny.name)
def test_a_row_has_the_same_bits_in_every_batch_on_the_cpu(
    tiny: Tiny, dtype: Dtype, saved: Saved, prompts: list[list[int]]
) -> None:
    kind = getattr(torch, dtype)
    alone, together = (
        Runner(
            open_model(saved(tiny)[0]).decoder(CpuKernels(kernel_threads(threads), dtype=dtype)),
            CpuBackend,
            kind,
        )
        for threads in (1, 3)
    )
    first, rest = alone.add(prompts[0]), [together.add(prompt) for prompt in prompts]
    alone.step((first, 20))
    together.step(*((sequence, len(sequence.tokens) - 3) for sequence in rest))
    for _ in range(3):
        alone.step((first, 1))
        together.step(*((sequence, 1) for sequence in rest))
    assert torch.equal(torch.stack(first.logits), torch.stack(rest[0].logits))


@pytest.mark.parametrize("name", ["llama", "gemma3", "olmo2", "gpt_oss", "deepseek_v3"])
def test_bfloat16_is_as_close_to_float32_as_in_transformers(
    name: str, saved: Saved, prompts: list[list[int]]
) -> None:
    folder, model = saved(next(tiny for tiny in MODELS if tiny.name == name))
    ids = torch.tensor(prompts[:1])
    with torch.inference_mode():
        exact = model(input_ids=ids).logits[0]
        theirs = copy.deepcopy(model).to(torch.bfloat16)(input_ids=ids).logits[0].float()
    runner = Runner(
        open_model(folder).decoder(TorchKernels(CPU, torch.bfloat16)), dtype=torch.bfloat16
    )
    sequence = runner.add(prompts[0])
    runner.step((sequence, len(prompts[0])))
    ours = torch.stack(sequence.logits)
    assert ours.dtype == torch.bfloat16
    assert (ours.float() - exact).norm() <= 1.3 * (theirs - exact).norm()


@pytest.mark.skipif(not CpuAttention.is_fast(), reason="this processor has no AVX2 with FMA")
@pytest.mark.parametrize(
    "tiny", [tiny for tiny in MODELS if tiny not in RECURRENT], ids=lambda tiny: tiny.name
)
def test_bfloat16_on_the_cpu_is_as_close_to_float32_as_with_torch(
    tiny: Tiny, saved: Saved, prompts: list[list[int]]
) -> None:
    """Models with states need longer prompts: see `test_recurrent_cpu.py`."""
    folder, dtype = saved(tiny)[0], torch.bfloat16
    exact, theirs, ours = (
        Runner(open_model(folder).decoder(TorchKernels(CPU, torch.float32))),
        Runner(open_model(folder).decoder(TorchKernels(CPU, dtype)), dtype=dtype),
        Runner(
            open_model(folder).decoder(CpuKernels(kernel_threads(1), dtype="bfloat16")),
            CpuBackend,
            dtype,
        ),
    )
    logits = []
    for runner in (exact, theirs, ours):
        running = [runner.add(prompt) for prompt in prompts]
        runner.step(*((sequence, len(sequence.tokens)) for sequence in running))
        logits.append(torch.stack([row for sequence in running for row in sequence.logits]))
    right, by_torch, actual = logits
    assert actual.dtype == torch.bfloat16
    # Medians: of rows whose experts change, errors say nothing.
    torch_error, error = (
        (rows.float() - right).norm(dim=1).median() for rows in (by_torch, actual)
    )
    assert error <= 1.1 * torch_error


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "gemma4_text", "cohere2", "olmo3"])
def test_windows_are_those_of_transformers_where_the_file_has_no_layer_types(family: str) -> None:
    from transformers import CONFIG_MAPPING

    for count in (8, 12):
        settings: dict[str, Any] = {"num_hidden_layers": count}
        config: Any = CONFIG_MAPPING[family](**settings)
        spec = spec_of({"model_type": family, "num_hidden_layers": count}, "config.json")
        slides = [kind == "sliding_attention" for kind in config.layer_types]
        assert [layer.mixer.window is not None for layer in spec.layers] == slides


_IMPORTS = """
import sys
import pyengine.models.decoder.cpu_kernels
import pyengine.models.decoder.loading
for name in ("torch", "transformers"):
    assert name not in sys.modules, f"{name} was imported"
"""


def test_the_kernels_of_cpus_are_imported_without_torch() -> None:
    run_python(_IMPORTS)


_OPEN_ALL = """
import sys
from pathlib import Path
import torch
from pyengine.models.decoder.loading import open_model
from pyengine.models.decoder.torch_kernels import TorchKernels
from tests.unit.models.decoder.steps import CPU, Runner, generate

for folder in sys.argv[1:]:
    decoder = open_model(Path(folder)).decoder(TorchKernels(CPU, torch.float32))
    [answer] = generate(Runner(decoder), [[5, 6, 7]], 3)
    print(*answer.tokens)
assert "transformers" not in sys.modules, "transformers was imported"
"""


def test_folders_are_opened_and_answered_without_transformers(
    saved: Saved, first_of_family: list[Tiny]
) -> None:
    folders = [str(saved(tiny)[0]) for tiny in first_of_family]
    process = run_python(_OPEN_ALL, *folders)
    assert len(process.stdout.splitlines()) == len(TABLE)
