"""Mixtures of experts in GGUF files: transformers' models, with experts in the file's formats."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pyengine import LLM, SamplingParams
from pyengine.errors import ModelLoadError
from pyengine.models.gguf_header import read_header
from pyengine.models.loader import checked_source, load_model
from pyengine.models.quantized_experts import QuantizedExperts
from pyengine.models.source import resolve_source
from tests.support.forked import run_forked
from tests.unit.models.tiny_gguf import write_tiny_gguf

EXPERTS = 4
TOKENS = torch.tensor([[2, 3, 4, 5, 6, 7, 0, 3]])
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 2.0,
    "rope.scaling.original_context_length": 24,
}
NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_inp": "mlp.gate",
}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("PYENGINE_CACHE", str(tmp_path / "cache"))


def write(path, architecture, **settings):
    found = {"kind": "Q8_0", "layers": 2, "scale": 0.2, "experts": EXPERTS, **settings}
    if architecture == "gpt-oss":
        found["values"] = YARN | found.get("values", {})
    write_tiny_gguf(path, architecture=architecture, **found)


def kept(path, dtype="float32"):
    return load_model(resolve_source(path, keep_quantized=True), device="cpu", dtype=dtype)


def dequantised(path):
    """The numbers of the file by name."""
    from gguf import GGUFReader, dequantize

    return {
        tensor.name: torch.tensor(
            dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1].tolist())
        )
        for tensor in GGUFReader(path).tensors
    }


def plain_model(path, config):
    """transformers' model with the numbers of the file, written out by hand."""
    tensors, state = dequantised(path), {}
    architecture = read_header(path).values["general.architecture"]
    for name, stored in tensors.items():
        values = stored
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
        if match is None or "exps" in name:
            continue
        layer, own, kind = match.groups()
        if architecture == "llama" and own in ("attn_q", "attn_k"):
            values = values.view(2, -1, 2, values.shape[1]).transpose(1, 2).reshape(values.shape)
        if own == "ffn_gate_inp_shexp":
            values = values[None]
        target = f"model.layers.{layer}.{NAMES.get(own)}.{kind}"
        if own == "attn_sinks":
            target = f"model.layers.{layer}.self_attn.sinks"
        if architecture == "gpt-oss":
            target = target.replace("mlp.gate", "mlp.router")
        state[target] = values
    for layer in range(config.num_hidden_layers):
        for name, values in experts_of(tensors, layer, architecture).items():
            state[f"model.layers.{layer}.mlp.experts.{name}"] = values
    state["model.embed_tokens.weight"] = tensors["token_embd.weight"]
    state["model.norm.weight"] = tensors["output_norm.weight"]
    state["lm_head.weight"] = tensors.get("output.weight", tensors["token_embd.weight"])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(state)
    return model.eval()


def experts_of(tensors, layer, architecture):
    def own(kind, what="weight"):
        return tensors[f"blk.{layer}.ffn_{kind}_exps.{what}"]

    if architecture != "gpt-oss":
        both = torch.cat([own("gate"), own("up")], 1)
        return {"gate_up_proj": both, "down_proj": own("down")}
    both = torch.stack([own("gate"), own("up")], 2).flatten(1, 2)
    biases = torch.stack([own("gate", "bias"), own("up", "bias")], 2).flatten(1, 2)
    return {
        "gate_up_proj": both.transpose(1, 2),
        "gate_up_proj_bias": biases,
        "down_proj": own("down").transpose(1, 2),
        "down_proj_bias": own("down", "bias"),
    }


FILES = [
    ("qwen3moe", "Q8_0", 32),
    ("qwen3moe", "Q4_K", 256),
    ("qwen2moe", "Q5_0", 32),
    ("llama", "Q4_0", 32),
    ("llama", "Q6_K", 256),
    ("gpt-oss", "Q8_0", 32),
    ("gpt-oss", "MXFP4", 32),
]


@pytest.mark.parametrize(("architecture", "kind", "hidden"), FILES)
@torch.no_grad()
def test_a_model_is_transformers_with_the_numbers_of_the_file(tmp_path, architecture, kind, hidden):
    path = tmp_path / "tiny.gguf"
    write(path, architecture, kind=kind, hidden=hidden)
    loaded = kept(path)
    assert (loaded.gguf, loaded.quantization) == (path, kind)
    assert loaded.has_float_linears  # the router
    ours, theirs = loaded.model, plain_model(path, loaded.config)
    for layer, plain in zip(ours.model.layers, theirs.model.layers, strict=True):
        assert type(layer.mlp.experts) is QuantizedExperts
        torch.manual_seed(0)
        rows = torch.randn(1, 9, hidden)
        found, expected = layer.mlp(rows), plain.mlp(rows)
        if architecture == "gpt-oss":
            found, expected = found[0], expected[0]
        assert (found - expected).norm() / expected.norm() < 0.03
    found, expected = (model(TOKENS).logits.log_softmax(-1) for model in (ours, theirs))
    torch.testing.assert_close(found, expected, rtol=0, atol=0.2)


@pytest.mark.parametrize("architecture", ["qwen3moe", "qwen2moe"])
def test_what_is_converted_has_the_sizes_of_the_file(tmp_path, architecture):
    path = tmp_path / "tiny.gguf"
    write(path, architecture)
    plain = load_model(path, device="cpu", dtype="float32")
    with torch.no_grad():
        found, expected = plain.model(TOKENS), plain_model(path, plain.config)(TOKENS)
    torch.testing.assert_close(found.logits, expected.logits, rtol=2e-3, atol=2e-2)


def rounded(rows):
    """Rows with each 32 numbers rounded to a 127th of the largest, in float64."""
    blocks = rows.double().view(len(rows), -1, 32)
    scales = blocks.abs().amax(2, keepdim=True) / 127
    return ((blocks / scales.where(scales > 0, 1)).round() * scales).view(rows.shape)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
@torch.no_grad()
def test_experts_are_exact_but_for_the_rounding_of_rows(tmp_path, kind):
    path = tmp_path / "tiny.gguf"
    write(path, "qwen3moe", kind=kind, layers=1)
    experts, tensors = kept(path).model.model.layers[0].mlp.experts, dequantised(path)
    gates, ups, downs = (
        tensors[f"blk.0.ffn_{name}_exps.weight"].double() for name in ("gate", "up", "down")
    )
    torch.manual_seed(0)
    rows = torch.randn(9, 32)
    indices = torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(9)])
    weights = torch.rand(9, 2)
    expected = torch.zeros(9, 32)
    for number, expert in enumerate(experts.experts):
        hidden = expert.up.multiply_gated(rows, expert.gate)
        gate, up = (rounded(rows) @ weight[number].T for weight in (gates, ups))
        torch.testing.assert_close(
            hidden.double(), torch.nn.functional.silu(gate) * up, rtol=1e-5, atol=1e-6
        )
        out = expert.down.multiply(hidden)
        torch.testing.assert_close(
            out.double(), rounded(hidden) @ downs[number].T, rtol=1e-5, atol=1e-6
        )
        chosen = (indices == number).any(1)
        factors = torch.where(indices == number, weights, 0).sum(1, keepdim=True)
        expected[chosen] += (out * factors)[chosen]
    assert torch.equal(experts(rows, indices, weights), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("architecture", "kind"), [("llama", "Q4_0"), ("gpt-oss", "MXFP4")])
@torch.no_grad()
def test_a_row_has_the_same_bits_in_every_batch_and_in_a_graph(tmp_path, architecture, kind, dtype):
    path = tmp_path / "tiny.gguf"
    write(path, architecture, kind=kind, layers=1)
    loaded = kept(path, dtype)
    experts = loaded.model.model.layers[0].mlp.experts
    rows = torch.randn(40, 32).to(loaded.dtype)
    indices = torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(40)])
    given = rows, indices, torch.rand(40, 2).to(loaded.dtype)
    together = experts(*given)
    assert together.dtype == loaded.dtype
    for count in (1, 2, 7, 33):
        assert torch.equal(experts(*(item[-count:] for item in given)), together[-count:])
    torch._dynamo.reset()
    graph = torch.compile(experts, fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        assert torch.equal(graph(*given), together)


def test_an_expert_that_is_masked_adds_nothing(tmp_path):
    path = tmp_path / "tiny.gguf"
    write(path, "llama", layers=1)
    experts = kept(path).model.model.layers[0].mlp.experts
    rows, weights = torch.randn(3, 32), torch.ones(3, 2)
    masked = torch.tensor([[1, EXPERTS], [EXPERTS, EXPERTS], [2, 0]])
    found = experts(rows, masked, weights)
    assert torch.equal(found[1], torch.zeros(32))
    assert torch.equal(found[:1], experts(rows[:1], torch.tensor([[1]]), weights[:1, :1]))


@pytest.mark.parametrize("architecture", ["qwen3moe", "llama", "gpt-oss"])
def test_the_engine_gives_the_tokens_of_transformers(tmp_path, architecture):
    path = tmp_path / "tiny.gguf"
    write(path, architecture, has_head=True)
    llm = LLM(path, device="cpu", dtype="float32", num_blocks=32)
    assert llm.describe()["quantization"] == "Q8_0"
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=7)
    prompts = [TOKENS[0].tolist(), [5, 4, 3], [7]]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    plain = plain_model(path, kept(path).config)
    for prompt, output in zip(prompts, outputs, strict=True):
        [completion] = output.outputs
        tokens = [*prompt, *completion.token_ids]
        with torch.no_grad():
            logits = plain(torch.tensor([tokens[:-1]])).logits[0, len(prompt) - 1 :]
        expected = logits.log_softmax(-1)
        for step, token, scores in zip(
            completion.logprobs, completion.token_ids, expected, strict=True
        ):
            assert abs(step[token].logprob - scores[token]) < 0.2
            assert scores[token] > scores.max() - 0.2


CHILD = """
import re, sys
from pathlib import Path
from pyengine.models.loader import load_model
from pyengine.models.source import resolve_source
import torch, transformers

def resident(name):
    found = re.search(rf"{name}:\\s+(\\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) << 10

load_model(resolve_source(sys.argv[1], keep_quantized=True), device="cpu")
Path("/proc/self/clear_refs").write_text("5")  # the peak is what is there now
before = resident("VmRSS")
loaded = load_model(resolve_source(sys.argv[2], keep_quantized=True), device="cpu")
loaded.model(torch.tensor([[1, 2, 3]]))
print(resident("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells the peak")
def test_memory_stays_near_the_size_of_the_file(tmp_path):
    small, large = tmp_path / "small.gguf", tmp_path / "large.gguf"
    write(small, "qwen3moe", kind="Q4_K", hidden=256, layers=1)
    write(large, "qwen3moe", kind="Q4_K", hidden=256, layers=12, experts=32)
    done = run_forked(CHILD, str(small), str(large))
    assert (done.returncode, done.stderr) == (0, "")
    size = large.stat().st_size
    assert size > 1e8
    assert int(done.stdout) < 1.25 * size


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ffn_up_exps.weight": "F16"}, r"blk\.0\.ffn_up_exps\.weight has experts of type F16"),
        ({"attn_q.weight": "TQ2_0"}, "TQ2_0 cannot be kept"),
    ],
)
def test_what_cannot_be_kept_is_converted_or_refused_by_name(tmp_path, caplog, changes, message):
    path = tmp_path / "tiny.gguf"
    write(path, "qwen3moe", kinds=changes, hidden=256, layers=1)
    assert kept(path).gguf is None
    assert re.search(message, caplog.text)
    write(path, "llama", kinds=changes, hidden=256, layers=1)
    with pytest.raises(ModelLoadError, match="architecture 'llama', which cannot be converted"):
        kept(path)
    with pytest.raises(ModelLoadError, match="architecture 'llama', which cannot be converted"):
        checked_source(path)


def test_a_refusal_says_why_the_file_was_to_be_converted(tmp_path):
    path = tmp_path / "tiny.gguf"
    write(path, "gpt-oss")
    with pytest.raises(ModelLoadError, match="not multiplied in float16") as caught:
        kept(path, "float16")
    for words in ("architecture 'gpt-oss'", "quantization, linear_backend and dtype left out"):
        assert words in str(caught.value)
    with pytest.raises(ModelLoadError, match="cannot be converted to floats"):
        load_model(path, device="cpu")


@pytest.mark.parametrize(
    ("architecture", "left_out", "message"),
    [
        ("qwen3moe", "ffn_up_exps.weight", r"lacks the weights of model\.layers\.0\.mlp\.experts"),
        ("qwen3moe", "ffn_down_exps.weight", r"lacks the weights of model\.layers\.0\.mlp\.exp"),
        ("llama", "ffn_gate_inp.weight", r"lacks the weights of model\.layers\.0\.mlp\.gate"),
        ("gpt-oss", "ffn_gate_exps.bias", r"lacks the weights of model\.layers\.0\.mlp\.experts"),
        ("gpt-oss", "attn_sinks.weight", r"lacks the weights of .*\.sinks"),
    ],
)
def test_what_is_missing_is_refused(tmp_path, architecture, left_out, message):
    path = tmp_path / "tiny.gguf"
    write(path, architecture, left_out=(f"blk.0.{left_out}",))
    with pytest.raises(ModelLoadError, match=message):
        kept(path)


@pytest.mark.parametrize(
    ("architecture", "key", "number", "message"),
    [
        (
            "qwen3moe",
            b"expert_count",
            5,
            r"ffn_\w+_exps\.weight have the shape \[4, .*asks for \[5",
        ),
        (
            "qwen3moe",
            b"expert_feed_forward_length",
            64,
            r"exps\.weight .*asks for \[4, (32, 64|64)",
        ),
        ("llama", b"expert_count", 2**31, r"llama\.expert_count \(2147483648\)"),
        ("llama", b"expert_count", 2**31 - 1, "num_local_experts=2147483647"),
        ("gpt-oss", b"attention.key_length", 2**32 - 1, r"attention\.key_length \(4294967295\)"),
        ("gpt-oss", b"expert_used_count", 2**32 - 1, r"expert_used_count \(4294967295\)"),
    ],
)
def test_sizes_that_the_tensors_do_not_have_are_refused(
    tmp_path, architecture, key, number, message
):
    path = tmp_path / "tiny.gguf"
    write(path, architecture)
    content, key = path.read_bytes(), f"{architecture}.".encode() + key
    at = content.index(key) + len(key) + 4
    path.write_bytes(content[:at] + np.uint32(number).tobytes() + content[at + 4 :])
    with pytest.raises(ModelLoadError, match=message):
        kept(path)


def test_damaged_experts_are_named(tmp_path):
    path = tmp_path / "tiny.gguf"
    write(path, "llama", layers=1)
    content = bytearray(path.read_bytes())
    tensors = {tensor.name: tensor for tensor in read_header(path).tensors}
    tensor = tensors["blk.0.ffn_up_exps.weight"]
    at = tensor.offset + tensor.num_bytes // EXPERTS * 2
    content[at : at + 2] = np.float16(np.inf).tobytes()
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"blk\.0\.ffn_up_exps\.weight\[2\] are damaged"):
        kept(path)


def test_keys_that_gpt_oss_needs_are_named(tmp_path):
    path = tmp_path / "tiny.gguf"
    write(path, "gpt-oss", values={"rope.scaling.type": "longrope"})
    with pytest.raises(ModelLoadError, match=r"gpt-oss\.rope\.scaling\.type \('longrope'\)"):
        kept(path)
    for key, message in (
        (b"attention.key_length", r"gpt-oss\.attention\.key_lengtx"),
        (b"attention.sliding_window", r"does not say gpt-oss\.attention\.sliding_window"),
        (b"context_length", r"does not say gpt-oss\.context_length"),
    ):
        write(path, "gpt-oss")
        content, name = path.read_bytes(), b"gpt-oss." + key
        path.write_bytes(content.replace(name, name[:-1] + b"x", 1))
        with pytest.raises(ModelLoadError, match=message):
            kept(path)
