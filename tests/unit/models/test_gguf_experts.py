"""Mixtures of experts in GGUF files, in the formats of the files."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyengine import LLM, SamplingParams
from pyengine.attention.cpu import CpuBackend
from pyengine.cpu import CpuAttention
from pyengine.cpu.threads import kernel_threads
from pyengine.errors import ModelLoadError
from pyengine.models.decoder.cpu_kernels import CpuKernels
from pyengine.models.decoder.gguf import open_gguf
from pyengine.models.gguf_file import GGUFFile
from pyengine.models.gguf_header import read_header
from pyengine.models.loader import checked_source, load_model
from tests.support.forked import run_forked
from tests.unit.models.tiny_gguf import write_tiny_gguf

EXPERTS = 4
TOKENS = [2, 3, 4, 5, 6, 7, 0, 3]
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 2.0,
    "rope.scaling.original_context_length": 24,
}
needs_kernels = pytest.mark.skipif(
    not CpuAttention.is_fast(), reason="this processor has no AVX2 with FMA"
)


def write(path: Path, architecture: str, **settings: Any) -> None:
    options = {"kind": "Q8_0", "layers": 2, "scale": 0.2, "experts": EXPERTS, **settings}
    if architecture == "gpt-oss":
        options["values"] = YARN | options.get("values", {})
    write_tiny_gguf(path, architecture=architecture, **options)


def kernels() -> CpuKernels:
    import torch

    return CpuKernels(kernel_threads(torch.get_num_threads()))


FILES = [
    ("qwen3moe", "Q8_0", 32),
    ("qwen3moe", "Q4_K", 256),
    ("qwen2moe", "Q5_0", 32),
    ("llama", "Q4_0", 32),
    ("llama", "Q6_K", 256),
    ("gpt-oss", "Q8_0", 32),
    ("gpt-oss", "MXFP4", 32),
]


@needs_kernels
@pytest.mark.parametrize(("architecture", "kind", "hidden"), FILES)
def test_products_of_formats_are_those_of_the_numbers(
    tmp_path: Path, architecture: str, kind: str, hidden: int
) -> None:
    """Equal except for the rounding of rows to 8 bits."""
    import torch

    from pyengine.models.decoder.torch_kernels import TorchKernels
    from tests.unit.models.decoder.steps import CPU
    from tests.unit.models.decoder.test_gguf import logits

    path = tmp_path / "tiny.gguf"
    write(path, architecture, kind=kind, hidden=hidden)
    loaded = load_model(path, device="cpu", dtype="float32")
    assert loaded.quantization == kind
    assert loaded.has_float_linears  # the router
    floats = logits(path, TorchKernels(CPU, torch.float32)).log_softmax(-1)
    actual = logits(path, kernels(), CpuBackend).log_softmax(-1)
    torch.testing.assert_close(actual, floats, rtol=0, atol=0.2)


@needs_kernels
@pytest.mark.parametrize(("architecture", "kind"), [("llama", "Q4_0"), ("gpt-oss", "MXFP4")])
def test_a_row_has_the_same_bits_in_every_batch(
    tmp_path: Path, architecture: str, kind: str
) -> None:
    import torch

    from tests.unit.models.decoder.steps import Runner

    path = tmp_path / "tiny.gguf"
    write(path, architecture, kind=kind)
    with GGUFFile.open(path) as file:
        decoder = open_gguf(file).decoder(kernels())
    alone, together = Runner(decoder, CpuBackend), Runner(decoder, CpuBackend)
    first, sequences = alone.add(TOKENS), [together.add(TOKENS[number:]) for number in range(4)]
    alone.step((first, 6))
    alone.step((first, 2))
    together.step(*((sequence, len(sequence.tokens)) for sequence in sequences))
    assert torch.equal(torch.stack(first.logits), torch.stack(sequences[0].logits))


@needs_kernels
@pytest.mark.parametrize("architecture", ["qwen3moe", "llama", "gpt-oss"])
def test_the_engine_gives_the_tokens_of_the_floats(tmp_path: Path, architecture: str) -> None:
    path = tmp_path / "tiny.gguf"
    write(path, architecture, has_head=True)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=7)
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in (TOKENS, [5, 4, 3], [7])]
    outputs = []
    for quantization, named in ((None, "Q8_0"), ("none", "none")):
        settings: dict[str, Any] = {"num_blocks": 32, "quantization": quantization}
        with LLM(path, device="cpu", dtype="float32", **settings) as llm:
            assert llm.describe()["quantization"] == named
            outputs.append([output.outputs[0] for output in llm.generate(prompts, params)])
    for ours, floats in zip(*outputs, strict=True):
        steps = zip(ours.logprobs, floats.logprobs, ours.token_ids, strict=True)
        for step, expected, token in steps:
            best = max(entry.logprob for entry in expected.values())
            assert expected[token].logprob > best - 0.2
            assert abs(step[token].logprob - expected[token].logprob) < 0.2
            if expected[token].logprob < best:
                break  # another answer from here on


CHILD = """
import re, sys
from pathlib import Path
from pyengine.models.loader import load_model

def resident(name):
    found = re.search(rf"{name}:\\s+(\\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) << 10

load_model(sys.argv[1], device="cpu", dtype="float32")
Path("/proc/self/clear_refs").write_text("5")  # the peak is what is there now
before = resident("VmRSS")
loaded = load_model(sys.argv[2], device="cpu", dtype="float32")
print(resident("VmHWM") - before)
"""


@pytest.mark.slow
@needs_kernels
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells the peak")
def test_memory_stays_near_the_size_of_the_file(tmp_path: Path) -> None:
    small, large = tmp_path / "small.gguf", tmp_path / "large.gguf"
    write(small, "qwen3moe", kind="Q4_K", hidden=256, layers=1)
    write(large, "qwen3moe", kind="Q4_K", hidden=256, layers=12, experts=32)
    done = run_forked(CHILD, str(small), str(large))
    assert done.stderr == ""
    size = large.stat().st_size
    assert size > 1e8
    assert int(done.stdout) < 1.25 * size


@needs_kernels
@pytest.mark.parametrize("kind", ["F16", "TQ2_0"])
@pytest.mark.parametrize("architecture", ["qwen3moe", "llama"])
def test_experts_in_other_formats_are_floats(tmp_path: Path, kind: str, architecture: str) -> None:
    import torch

    from pyengine.models.decoder.torch_kernels import TorchKernels
    from tests.unit.models.decoder.steps import CPU
    from tests.unit.models.decoder.test_gguf import logits

    path = tmp_path / "tiny.gguf"
    kinds = {"ffn_up_exps.weight": kind, "attn_q.weight": kind}
    write(path, architecture, kinds=kinds, hidden=256, layers=1)
    assert load_model(path, device="cpu", dtype="float32").quantization == "Q8_0"
    floats = logits(path, TorchKernels(CPU, torch.float32)).log_softmax(-1)
    actual = logits(path, kernels(), CpuBackend).log_softmax(-1)
    torch.testing.assert_close(actual, floats, rtol=0, atol=0.2)


def refused(path: Path, message: str) -> None:
    for opened in (checked_source, load_model):
        with pytest.raises(ModelLoadError, match=message):
            opened(path)


@pytest.mark.parametrize(
    ("architecture", "left_out"),
    [
        ("qwen3moe", "ffn_up_exps.weight"),
        ("qwen3moe", "ffn_down_exps.weight"),
        ("llama", "ffn_gate_inp.weight"),
        ("gpt-oss", "ffn_gate_exps.bias"),
        ("gpt-oss", "attn_sinks.weight"),
    ],
)
def test_what_is_missing_is_refused(tmp_path: Path, architecture: str, left_out: str) -> None:
    path = tmp_path / "tiny.gguf"
    write(path, architecture, left_out=(f"blk.0.{left_out}",))
    refused(path, rf"lack blk\.0\.{re.escape(left_out)}, which its header asks for")


@pytest.mark.parametrize(
    ("architecture", "key", "number", "message"),
    [
        ("qwen3moe", b"expert_count", 5, r"have the shape \[4, .*asks for \[5"),
        ("qwen3moe", b"expert_feed_forward_length", 64, r"exps\.weight .*asks for \[(4, )?64"),
        ("llama", b"expert_count", 2**31, r"llama\.expert_count \(2147483648\)"),
        ("llama", b"expert_count", 2**31 - 1, "num_local_experts=2147483647"),
        ("gpt-oss", b"attention.key_length", 2**32 - 1, r"attention\.key_length \(4294967295\)"),
        ("gpt-oss", b"expert_used_count", 2**32 - 1, r"expert_used_count \(4294967295\)"),
    ],
)
def test_sizes_that_the_tensors_do_not_have_are_refused(
    tmp_path: Path, architecture: str, key: bytes, number: int, message: str
) -> None:
    path = tmp_path / "tiny.gguf"
    write(path, architecture)
    content, key = path.read_bytes(), f"{architecture}.".encode() + key
    at = content.index(key) + len(key) + 4
    path.write_bytes(content[:at] + np.uint32(number).tobytes() + content[at + 4 :])
    refused(path, message)


@needs_kernels
def test_damaged_experts_are_named(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write(path, "llama", layers=1)
    content = bytearray(path.read_bytes())
    tensors = {tensor.name: tensor for tensor in read_header(path).tensors}
    tensor = tensors["blk.0.ffn_up_exps.weight"]
    at = tensor.offset + tensor.num_bytes // EXPERTS * 2
    content[at : at + 2] = np.float16(np.inf).tobytes()
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"blk\.0\.ffn_up_exps\.weight\[2\] .*are damaged"):
        load_model(path, device="cpu", dtype="float32")


def test_keys_that_gpt_oss_needs_are_named(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write(path, "gpt-oss", values={"rope.scaling.type": "longrope"})
    refused(path, r"gpt-oss\.rope\.scaling\.type \('longrope'\)")
    for key, message in (
        (b"attention.key_length", r"gpt-oss\.attention\.key_lengtx"),
        (b"attention.sliding_window", r"does not say gpt-oss\.attention\.sliding_window"),
        (b"context_length", r"does not say gpt-oss\.context_length"),
    ):
        write(path, "gpt-oss")
        content, name = path.read_bytes(), b"gpt-oss." + key
        path.write_bytes(content.replace(name, name[:-1] + b"x", 1))
        refused(path, message)
