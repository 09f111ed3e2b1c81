"""Settings in a GGUF header: the model computes as its float folder does, or the file is refused
by the name of the unread key."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from pyengine.errors import ModelLoadError
from pyengine.models.decoder.gguf import open_gguf
from pyengine.models.decoder.gguf_settings import gguf_settings
from pyengine.models.decoder.loading import spec_of
from pyengine.models.decoder.rotary import frequencies
from pyengine.models.decoder.spec import DecoderSpec, Rotary
from pyengine.models.gguf_file import GGUFFile
from pyengine.models.gguf_header import GGUFArray, read_header
from pyengine.models.gguf_keys import _IDLE, HeaderKeys
from tests.unit.models.gguf_of_model import LENGTH, tiny_model, write, write_gguf_of

if TYPE_CHECKING:
    import torch

MIXTRAL = "mixtral"


def logits_of(path: Path) -> "torch.Tensor":
    """The logits of a file."""
    import torch

    from pyengine.models.decoder.torch_kernels import TorchKernels
    from tests.unit.models.decoder.steps import CPU
    from tests.unit.models.decoder.test_gguf import logits

    return logits(path, TorchKernels(CPU, torch.float32))


def spec(path: Path) -> DecoderSpec:
    """The spec of a file, which is refused unless it is whole."""
    with GGUFFile.open(path) as file:
        return open_gguf(file).spec


def rotary(path: Path) -> Rotary:
    """The rotary embedding of the last layer."""
    rotary = spec(path).layers[-1].mixer.rotary
    assert rotary is not None
    return rotary


def expected(model: Any) -> "torch.Tensor":
    """The logits of a model of transformers."""
    from tests.unit.models.decoder import test_gguf

    return test_gguf.expected(model)


def assert_near(ours: "torch.Tensor", theirs: "torch.Tensor") -> None:
    import torch

    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-4)


def yarn(factor, **more):
    return {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": factor,
        "original_max_position_embeddings": 16,
        **more,
    }


YARN_KEYS = {
    ".rope.scaling.type": "yarn",
    ".rope.scaling.factor": 4.0,
    ".rope.scaling.original_context_length": 16,
}
LINEAR_KEYS = {".rope.scaling.type": "linear", ".rope.scaling.factor": 4.0}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
CHANGES = [
    ("llama", LINEAR_KEYS, {"rope_parameters": LINEAR}),
    ("llama", {".rope.scaling.factor": 4.0}, {"rope_parameters": LINEAR}),
    ("llama", {".rope.scale_linear": 4.0}, {"rope_parameters": LINEAR}),
    ("qwen2", LINEAR_KEYS, {"rope_parameters": LINEAR}),
    (MIXTRAL, LINEAR_KEYS, {"rope_parameters": LINEAR}),
    (
        "gemma3",
        LINEAR_KEYS,
        {
            "rope_parameters": {
                "full_attention": LINEAR | {"rope_theta": 1e6},
                "sliding_attention": PLAIN,
            },
            "layer_types": ["sliding_attention", "full_attention"],
            "more_keys": {".attention.sliding_window_pattern": 2},
        },
    ),
    ("llama", YARN_KEYS, {"rope_parameters": yarn(4.0)}),
    (
        "olmo3",
        YARN_KEYS,
        {"rope_parameters": {"full_attention": yarn(4.0), "sliding_attention": PLAIN}},
    ),
    ("qwen3", YARN_KEYS, {"rope_parameters": yarn(4.0)}),
    (
        "qwen2",
        YARN_KEYS | {".rope.scaling.attn_factor": 0.5},
        {"rope_parameters": yarn(4.0, attention_factor=0.5 * (1 + 0.1 * math.log(4)))},
    ),
    (
        "llama",
        YARN_KEYS | {".rope.scaling.yarn_beta_fast": 4.0, ".rope.scaling.yarn_beta_slow": 0.5},
        {"rope_parameters": yarn(4.0, beta_fast=4.0, beta_slow=0.5)},
    ),
    ("llama", {".rope.freq_base": 500.0}, {"rope_parameters": PLAIN | {"rope_theta": 500.0}}),
    ("stablelm", {".rope.freq_base": 500.0}, {"rope_theta": 500.0}),
    ("stablelm", {".rope.dimension_count": 2}, {"partial_rotary_factor": 0.25}),
    ("nemotron", {".rope.dimension_count": 2}, {"partial_rotary_factor": 0.25}),
    ("phi3", {".rope.dimension_count": 4}, {"partial_rotary_factor": 0.5}),
    ("phi3", {".attention.sliding_window": 5}, {"sliding_window": 5}),
    ("gemma2", {".attention.sliding_window": 5}, {"sliding_window": 5}),
    ("gemma3", {".attention.sliding_window": 5}, {"sliding_window": 5}),
    (
        "gemma2",
        {".attention.sliding_window": 5, ".attention.sliding_window_pattern": [False, True]},
        {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    (
        "gemma3",
        {".rope.freq_base_swa": 100.0},
        {
            "rope_parameters": {
                "full_attention": PLAIN | {"rope_theta": 1e6},
                "sliding_attention": PLAIN | {"rope_theta": 100.0},
            }
        },
    ),
    ("gemma2", {".attn_logit_softcapping": 0.5}, {"attn_logit_softcapping": 0.5}),
    ("gemma2", {".final_logit_softcapping": 2.0}, {"final_logit_softcapping": 2.0}),
    ("gemma3", {".final_logit_softcapping": 2.0}, {"final_logit_softcapping": 2.0}),
    ("llama", {".attention.layer_norm_rms_epsilon": 0.5}, {"rms_norm_eps": 0.5}),
    ("gemma2", {".attention.layer_norm_rms_epsilon": 0.5}, {"rms_norm_eps": 0.5}),
    ("nemotron", {".attention.layer_norm_epsilon": 0.5}, {"norm_eps": 0.5}),
    ("starcoder2", {".attention.layer_norm_epsilon": 0.5}, {"norm_epsilon": 0.5}),
    ("stablelm", {".attention.layer_norm_epsilon": 0.5}, {"layer_norm_eps": 0.5}),
    ("gpt2", {".attention.layer_norm_epsilon": 0.5}, {"layer_norm_epsilon": 0.5}),
    ("qwen3moe", {".expert_weights_norm": False}, {"norm_topk_prob": False}),
    ("qwen2moe", {".expert_weights_norm": True}, {"norm_topk_prob": True}),
    ("qwen3moe", {".expert_used_count": 3}, {"num_experts_per_tok": 3}),
    (MIXTRAL, {".expert_used_count": 1}, {"num_experts_per_tok": 1}),
    ("qwen2", {".attention.head_count_kv": None}, {"num_key_value_heads": 4}),
]


@pytest.mark.parametrize(
    ("architecture", "values", "changes"), CHANGES, ids=[f"{c[0]}-{[*c[1]][-1]}" for c in CHANGES]
)
def test_a_setting_does_what_it_does_in_a_folder(
    tmp_path: Path, architecture: str, values: dict[str, Any], changes: dict[str, Any]
) -> None:
    changes = dict(changes)
    values = values | changes.pop("more_keys", {})
    path = tmp_path / "tiny.gguf"
    model = write(path, architecture, changes=changes, values=values)
    assert_near(logits_of(path), expected(model))
    plain = expected(tiny_model(architecture, attn_implementation="eager"))
    assert (plain - expected(model)).abs().max() > 1e-3


def test_queries_of_gemma_are_scaled_as_by_llama_cpp(tmp_path: Path) -> None:
    """By the size of a head, and in the largest model by the mean size."""
    for layers, scale in ((2, 8), (46, 32 // 4)):
        model = tiny_model("gemma2", num_hidden_layers=layers, head_dim=16 if layers == 46 else 8)
        write_gguf_of(model, tmp_path / "tiny.gguf", "gemma2")
        mixer = spec(tmp_path / "tiny.gguf").layers[0].mixer
        assert mixer.scaling == scale**-0.5


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


def divisors(rope, size=8):
    """`rope_freqs.weight` as llama.cpp's converter writes it."""
    logits_of = []
    for number in range(0, size, 2):
        length = 2 * math.pi * rope["rope_theta"] ** (number / size)
        turns = rope["original_max_position_embeddings"] / length
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        logits_of.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(logits_of, np.float32)


@pytest.mark.parametrize("architecture", ["llama", MIXTRAL])
def test_positions_of_llama_3_1_are_those_of_its_folder(tmp_path: Path, architecture: str) -> None:
    path, extra = tmp_path / "tiny.gguf", {"rope_freqs.weight": divisors(LLAMA3)}
    assert len({*extra["rope_freqs.weight"].tolist()}) > 2
    model = write(path, architecture, changes={"rope_parameters": LLAMA3}, extra=extra)
    assert_near(logits_of(path), expected(model))
    plain = tiny_model(architecture, attn_implementation="eager")
    assert (expected(plain) - expected(model)).abs().max() > 1e-2
    assert spec(path).max_positions == LENGTH


def test_positions_that_are_divided_are_scaled_as_well(tmp_path: Path) -> None:
    path, extra = tmp_path / "tiny.gguf", {"rope_freqs.weight": divisors(LLAMA3)}
    write(path, "llama", extra=extra, values=LINEAR_KEYS)
    scaled, _ = frequencies(rotary(path))
    write(path, "llama", extra=extra)
    plain, _ = frequencies(rotary(path))
    np.testing.assert_allclose(scaled * 4, plain, rtol=1e-6)


@pytest.mark.parametrize("has_type", [True, False])
def test_positions_of_phi_3_are_those_of_its_folder(tmp_path, has_type):
    short, long = [1.0, 1.1, 1.3, 2.0], [1.0, 2.0, 4.0, 8.0]
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": LENGTH // 2,
        "attention_factor": 1.25,
    }
    changes = {"rope_parameters": rope, "original_max_position_embeddings": LENGTH // 2}
    values = {
        ".rope.scaling.attn_factor": 1.25,
        ".rope.scaling.original_context_length": LENGTH // 2,
        ".rope.scaling.type": "longrope" if has_type else None,
    }
    extra = {
        "rope_factors_short.weight": np.array(short, np.float32),
        "rope_factors_long.weight": np.array(long, np.float32),
    }
    path = tmp_path / "tiny.gguf"
    model = write(path, "phi3", changes=changes, values=values, extra=extra)
    assert spec(path).max_positions == LENGTH // 2
    assert_near(logits_of(path), expected(model))


@pytest.mark.parametrize("bias", ["attention_bias", "mlp_bias"])
def test_biases_that_a_llama_may_have_are_read(tmp_path: Path, bias: str) -> None:
    path = tmp_path / "tiny.gguf"
    model = write(path, "llama", changes={bias: True})
    assert_near(logits_of(path), expected(model))


def test_a_name_makes_no_other_model_of_a_file(tmp_path: Path) -> None:
    """Models named Mistral are a llama without a window, unless a key says otherwise."""
    path = tmp_path / "tiny.gguf"
    model = write(path, "llama", values={"general.name": "mistral"})
    assert spec(path).family == "llama"
    assert_near(logits_of(path), expected(model))


def refused(path: Path, match: str) -> None:
    with pytest.raises(ModelLoadError, match=match) as caught:
        spec(path)
    assert str(path) in str(caught.value)


REFUSED = [
    ("llama", {".unheard_of": 3}, r"llama\.unheard_of \(3\) is one that pyengine does not read"),
    ("llama", {"vendor.note": "x"}, r"vendor\.note"),
    ("llama", {"qwen2.rope.freq_base": 5e5}, r"qwen2\.rope\.freq_base"),
    ("llama", {".attention.sliding_window": 16}, r"sliding_window \(16\) is not supported"),
    ("qwen2", {".attention.sliding_window": 16}, r"sliding_window \(16\) is not supported"),
    ("llama", {".attn_logit_softcapping": 5.0}, "attn_logit_softcapping"),
    ("llama", {".final_logit_softcapping": 5.0}, "final_logit_softcapping"),
    ("llama", {".attention.scale": 0.5}, r"attention\.scale"),
    ("llama", {".residual_scale": 0.5}, "residual_scale"),
    ("llama", {".embedding_scale": 12.0}, "embedding_scale"),
    ("llama", {".logit_scale": 8.0}, "logit_scale"),
    ("llama", {".attention.causal": False}, r"attention\.causal .*embeds texts"),
    ("llama", {".attention.clamp_kqv": 8.0}, "clamp_kqv"),
    ("llama", {".attention.max_alibi_bias": 8.0}, "ALiBi"),
    ("llama", {".attention.value_length": 16}, "value_length"),
    ("qwen3", {".attention.value_length": 16}, "value_length"),
    ("llama", {".rope.dimension_count": 4}, r"rope\.dimension_count .*heads of 8"),
    ("qwen2", {".rope.dimension_count": 4}, r"rope\.dimension_count"),
    ("llama", {".rope.dimension_sections": [2, 1, 1, 0]}, r"rope\.dimension_sections"),
    ("llama", {".rope.scaling.type": "longrope"}, r"rope\.scaling\.type"),
    ("llama", {".rope.scaling.type": "dynamic"}, r"rope\.scaling\.type"),
    ("llama", {".rope.scaling.type": "yarn"}, r"rope\.scaling\.type"),
    ("llama", {".rope.scaling.alpha": 1000.0}, r"rope\.scaling\.alpha"),
    ("llama", {".rope.scaling.attn_factor": 2.0}, "attn_factor"),
    ("llama", YARN_KEYS | {".rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier"),
    ("llama", YARN_KEYS | {".rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor"),
    ("llama", YARN_KEYS | {".rope.scaling.yarn_attn_factor": 3.0}, "yarn_attn_factor"),
    ("gpt2", {".rope.freq_base": 500.0}, r"gpt2\.rope\.freq_base"),
    ("llama", {".tensor_data_layout": "reversed"}, "tensor_data_layout"),
    ("llama", {".hidden_activation": "gelu"}, "hidden_activation"),
    ("llama", {".vocab_size": 9}, "vocab_size .*rows of token_embd"),
    ("llama", {".nextn_predict_layers": 1}, "nextn_predict_layers"),
    ("llama", {".tensor_data_layout": "jploski"}, "tensor_data_layout"),
    ("gemma2", {".attention.sliding_window": 0}, r"sliding_window \(0\)"),
    ("gemma3", {".attention.sliding_window": 0}, r"sliding_window \(0\)"),
    ("llama", {".attention.head_count": [4, 2]}, r"head_count .*as if layers differ"),
    ("llama", {".attention.head_count_kv": [2, 2]}, r"head_count_kv .*as if layers differ"),
    ("llama", {".feed_forward_length": [64, 64]}, "feed_forward_length .*as if layers differ"),
    ("gemma2", {".attention.sliding_window_pattern": [True]}, "one value for each of 2 layers"),
    ("llama", {".expert_used_count": 2}, "expert_used_count"),
    (MIXTRAL, {".expert_weights_scale": 2.5}, "expert_weights_scale"),
    (MIXTRAL, {".expert_weights_norm": False}, "expert_weights_norm"),
    (MIXTRAL, {".expert_gating_func": 2}, "expert_gating_func"),
    ("qwen3moe", {".expert_gating_func": 2}, "expert_gating_func"),
    ("qwen3moe", {".expert_shared_count": 1}, "expert_shared_count"),
    ("qwen3moe", {".expert_group_count": 2}, "expert_group_count"),
    ("qwen3moe", {".leading_dense_block_count": 1}, "leading_dense_block_count"),
    ("qwen3moe", {".expert_used_count": 5}, "expert_used_count"),
]


@pytest.mark.parametrize(
    ("architecture", "values", "match"), REFUSED, ids=[f"{c[0]}-{[*c[1]][-1]}" for c in REFUSED]
)
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, architecture: str, values: dict[str, Any], match: str
) -> None:
    write(tmp_path / "tiny.gguf", architecture, values=values)
    refused(tmp_path / "tiny.gguf", match)


NEUTRAL = [
    {"general.author": "x", "general.tags": ["a"], "general.sampling.mirostat": 0},
    {"quantize.imatrix.file": "x", "mradermacher.quantized_by": "x"},
    {".rope.scaling.type": "none", ".rope.scaling.factor": 4.0},
    {".rope.scaling.factor": 1.0, ".rope.scaling.finetuned": True},
    {".attention.sliding_window": LENGTH, ".attention.causal": True},
    {".attention.scale": 8**-0.5, ".residual_scale": 1.0, ".logit_scale": 1.0},
    {".tensor_data_layout": "Meta AI original pth", ".expert_count": 0, ".expert_used_count": 0},
    {".attention.key_length": 8, ".attention.value_length": 8, ".vocab_size": 8},
    {"tokenizer.ggml.mask_token_id": 3, "tokenizer.ggml.scores": [0.0] * 8},
    {".use_parallel_residual": True, ".attention.sliding_window": 0},
]


@pytest.mark.parametrize("values", NEUTRAL)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "phi3", "stablelm"])
def test_what_has_no_effect_is_accepted(tmp_path, architecture, values):
    path = tmp_path / "tiny.gguf"
    if architecture != "llama" and ".tensor_data_layout" in values:
        values = {key: value for key, value in values.items() if key != ".tensor_data_layout"}
    if architecture == "phi3":  # with a window, which none of its sequences exceeds
        values = {**values, ".attention.sliding_window": 0}
    model = write(path, architecture, values=values)
    assert_near(logits_of(path), expected(model))


def library_keys():
    """The keys of an architecture that the library gguf has names for."""
    from gguf import Keys

    groups = [group for group in vars(Keys).values() if isinstance(group, type)]
    names = {name for group in groups for name in vars(group).values() if isinstance(name, str)}
    return sorted(name for name in names if name.startswith("{arch}."))


def outcome(path: Path, header: Any, key: str, value: object) -> DecoderSpec | str:
    """The spec of a file with one more key, or the refusal."""
    values = header.values | {key: value}
    changed: Any = SimpleNamespace(
        values=values,
        tensors=header.tensors,
        architecture=header.architecture,
        main_type=header.main_type,
    )
    try:
        keys = HeaderKeys(path, changed)
        settings = gguf_settings(keys)
        for name in values:
            if name.startswith("tokenizer."):
                keys.raw(name)
        keys.refuse_unread()
        return spec_of(settings, "the header")
    except ModelLoadError as error:
        assert f"{header.architecture}." in str(error) or "the header" in str(error)
        return "refused"


def test_every_key_that_gguf_knows_is_read_or_idle_or_refused(tmp_path):
    path = tmp_path / "tiny.gguf"
    write(path, "llama")
    header = read_header(path)
    plain = outcome(path, header, "llama.pooling_type", 1)
    assert isinstance(plain, DecoderSpec)
    keys, idle = library_keys(), {key.format("llama") for key in _IDLE}
    assert len(keys) > 80
    for key in (name.replace("{arch}", "llama") for name in keys):
        for value in (
            3,
            0.37,
            True,
            False,
            "other",
            GGUFArray(2, (1, 2)),
            GGUFArray(2, (0.5, 2.0)),
        ):
            logits_of = outcome(path, header, key, value)
            assert logits_of != plain or key in idle or is_neutral(key, value), (key, value)


def is_neutral(key, value):
    return (key, value) in [
        ("llama.attention.causal", True),
        ("llama.rope.scaling.original_context_length", 3),  # of YaRN, which is not set
    ]


FLOATS = [
    ("llama", ".rope.freq_base"),
    ("llama", ".attention.layer_norm_rms_epsilon"),
    ("llama", ".rope.scaling.factor"),
    ("llama", ".rope.scaling.attn_factor"),
    ("llama", ".rope.scaling.yarn_beta_fast"),
    ("llama", ".rope.scaling.yarn_beta_slow"),
    ("llama", ".rope.scaling.yarn_attn_factor"),
    ("llama", ".rope.scaling.yarn_ext_factor"),
    ("gemma2", ".attn_logit_softcapping"),
    ("gemma2", ".final_logit_softcapping"),
    ("gemma3", ".rope.freq_base_swa"),
    ("stablelm", ".attention.layer_norm_epsilon"),
    ("stablelm", ".rope.freq_base"),
    ("qwen3moe", ".expert_weights_scale"),
    ("llama", ".logit_scale"),
]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, 0.0])
@pytest.mark.parametrize(("architecture", "key"), FLOATS)
def test_floats_that_no_model_has_are_refused_by_name(tmp_path, architecture, key, value):
    beside = YARN_KEYS if ".rope.scaling." in key else {}
    write(tmp_path / "tiny.gguf", architecture, values=beside | {key: value})
    refused(tmp_path / "tiny.gguf", key.replace(".", r"\."))


def test_every_float_of_a_header_is_finite(tmp_path: Path) -> None:
    """Also in arrays, and of unread keys."""
    for values in ({"general.note": math.nan}, {"tokenizer.ggml.scores": [0.0] * 7 + [math.inf]}):
        write(tmp_path / "tiny.gguf", "llama", values=values)
        refused(tmp_path / "tiny.gguf", f"{next(iter(values))}.*(is not a finite number|NaN)")


COUNTS = [
    ("llama", ".context_length"),
    ("llama", ".embedding_length"),
    ("llama", ".feed_forward_length"),
    ("llama", ".attention.head_count"),
    ("llama", ".attention.head_count_kv"),
    ("llama", ".attention.key_length"),
    ("llama", ".attention.value_length"),
    ("llama", ".rope.dimension_count"),
    ("llama", ".vocab_size"),
    ("llama", ".rope.scaling.original_context_length"),
    ("gemma2", ".attention.sliding_window"),
    ("gemma2", ".attention.sliding_window_pattern"),
    ("qwen2", ".attention.head_count"),
    ("qwen3moe", ".expert_count"),
    ("qwen3moe", ".expert_used_count"),
    ("qwen3moe", ".expert_feed_forward_length"),
]


@pytest.mark.parametrize("value", [0, -1, 2**32 - 1, 2**63, 1.5, "2", True])
@pytest.mark.parametrize(("architecture", "key"), COUNTS)
def test_counts_that_no_model_has_are_refused_by_name(tmp_path, architecture, key, value):
    write(tmp_path / "tiny.gguf", architecture, values={key: value})
    refused(tmp_path / "tiny.gguf", key.replace(".", r"\."))


def test_a_key_that_is_there_twice_is_refused(tmp_path):
    path = tmp_path / "tiny.gguf"
    write(path, "llama", values={"llama.rope.freq_basf": 5.0})
    path.write_bytes(path.read_bytes().replace(b"llama.rope.freq_basf", b"llama.rope.freq_base"))
    refused(path, r"has the key 'llama\.rope\.freq_base' twice")


def vector(*numbers):
    return np.array(numbers, np.float32)


@pytest.mark.parametrize(
    ("architecture", "extra", "match"),
    [
        ("llama", {"output.bias": np.ones(8)}, r"output\.bias, which its header does not ask for"),
        ("llama", {"blk.0.attn_q_norm.weight": np.ones(8)}, r"blk\.0\.attn_q_norm\.weight"),
        ("llama", {"blk.1.ffn_gate.bias": np.ones(64)}, r"blk\.1\.ffn_gate\.bias"),
        ("llama", {"blk.0.attn_output.scale": np.ones(1)}, r"attn_output\.scale"),
        ("llama", {"token_embd_norm.weight": np.ones(32)}, r"token_embd_norm\.weight"),
        ("qwen2", {"blk.0.attn_output.bias": np.ones(32)}, r"attn_output\.bias"),
        ("gemma2", {"blk.0.attn_q_norm.weight": np.ones(8)}, r"attn_q_norm\.weight"),
        ("llama", {"adapter.weight": np.ones((32, 32))}, r"adapter\.weight"),
        ("qwen2", {"rope_freqs.weight": vector(1, 2, 3, 4)}, r"rope_freqs\.weight .*'qwen2'"),
        ("gpt2", {"rope_freqs.weight": vector(1, 2, 3, 4)}, r"rope_freqs\.weight"),
        ("llama", {"rope_freqs.weight": vector(1, 2)}, r"rope_freqs\.weight has \[2\]"),
        ("llama", {"rope_freqs.weight": vector(1, 2, 3, 0)}, r"rope_freqs\.weight .*no frequency"),
        ("llama", {"rope_freqs.weight": vector(1, 2, 3, np.nan)}, r"rope_freqs\.weight"),
        ("llama", {"rope_factors_long.weight": vector(1, 2, 3, 4)}, r"rope_factors_long\.weight"),
        ("phi3", {"rope_factors_short.weight": vector(1, 2, 3, 4)}, r"rope_factors_short\.weight"),
    ],
)
def test_tensors_that_nothing_reads_are_refused_by_name(tmp_path, architecture, extra, match):
    write(tmp_path / "tiny.gguf", architecture, extra=extra)
    refused(tmp_path / "tiny.gguf", match)
