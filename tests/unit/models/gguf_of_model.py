"""GGUF files of transformers' models, written as llama.cpp's converter writes them.

Where transformers is not installed, the models have the weights that the decoder reads.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import numpy as np

from pyengine.models.decoder.families import TABLE
from pyengine.models.loader import dummy_weight_shapes
from tests.support.checkpoints import write_json
from tests.support.without_torch import MISSING
from tests.unit.models.tiny_gguf import add_value

VOCAB = 8
LENGTH = 64
"""Positions."""
TOKENS = ["<|im_start|>", "<|im_end|>", "a", "b", "c", "ab", "bc", "abc"]
TYPES = [3, 3, 1, 1, 1, 1, 1, 1]
MERGES = ["a b", "b c", "a bc"]

TURNED = ("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight")
"""GPT-2's matrices whose rows are its columns."""

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_HEAD = {"head_dim": 8}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_GEMMA = {"query_pre_attn_scalar": 8, "sliding_window": 16, **_HEAD}
_GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
    "attention_multiplier": 0.2,
}
_EXPERTS_OF_TWO = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CONFIGS = {
    "llama": ("llama", {}),
    "mixtral": (
        "mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_theta": 1e4},
    ),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", _HEAD),
    "qwen2moe": (
        "qwen2_moe",
        {"shared_expert_intermediate_size": 96, **_MIXTURE},
    ),
    "qwen3moe": ("qwen3_moe", {"norm_topk_prob": True, **_MIXTURE, **_HEAD}),
    "gemma2": ("gemma2", _GEMMA),
    "gemma3": ("gemma3_text", _GEMMA),
    "phi3": ("phi3", {}),
    "starcoder2": ("starcoder2", {"tie_word_embeddings": False}),
    "stablelm": ("stablelm", {"partial_rotary_factor": 0.5}),
    "nemotron": ("nemotron", {"partial_rotary_factor": 0.5, **_HEAD}),
    "gpt2": ("gpt2", {"n_inner": 64}),
    "gemma": ("gemma", _HEAD),
    "granite": ("granite", _GRANITE),
    "granitemoe": (
        "granitemoe",
        {**_EXPERTS_OF_TWO, **_GRANITE},
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "rope_theta": 1e4}),
    "olmo2": ("olmo2", {}),
    "olmo3": (
        "olmo3",
        {
            "num_hidden_layers": 4,
            "sliding_window": 5,
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": 1e4}
                for kind in ("full_attention", "sliding_attention")
            },
        },
    ),
    "exaone4": (
        "exaone4",
        {"num_hidden_layers": 4, "sliding_window": 5, "sliding_window_pattern": 4},
    ),
    "seed_oss": ("seed_oss", {"attention_bias": True, **_HEAD}),
    "glm4": ("glm4", {"attention_bias": True, **_HEAD}),
    "cohere2": (
        "cohere2",
        {"num_hidden_layers": 4, "sliding_window": 5, "logit_scale": 0.5, **_HEAD},
    ),
    "minimax-m2": (
        "minimax_m2",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rotary_dim": 4,
            "rope_theta": 1e4,
            **_HEAD,
        },
    ),
}
_RENAMED = {"block_sparse_moe.experts": "mlp.experts", "block_sparse_moe.router": "mlp.gate"}
_MATRICES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
"""Matrices of experts whose files have other names."""
NAMES = {"mixtral": "llama", "olmo3": "olmo2"}
"""Architectures of the file that have another name."""
PAIRS = ("llama", "mixtral", "granite", "granitemoe", "smollm3")
"""Architectures whose queries and keys the converter orders so that pairs rotate."""
LAYER_NORMS = ("gpt2", "starcoder2", "stablelm", "nemotron", "cohere2")
_PARTLY = ("stablelm", "nemotron", "glm4", "minimax-m2")
_EXPERTS = ("mixtral", "qwen2moe", "qwen3moe", "granitemoe", "minimax-m2")
_SLIDING = ("gemma2", "gemma3", "exaone4", "cohere2", "olmo3")


def tiny_model(architecture, **changes):
    """A model of random float weights, and of the family's settings with `changes`."""
    family, settings = CONFIGS[architecture]
    sizes = dict(_SIZES)
    if architecture == "gpt2":
        del sizes["intermediate_size"], sizes["num_key_value_heads"]
    if MISSING:
        changes.pop("attn_implementation", None)
        return WrittenModel(family, {**sizes, **settings, **changes})
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(family, **{**sizes, **settings, **changes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.2 if parameter.ndim == 1 else 0.0, 0.25)
    return model.eval()


class WrittenModel:
    """The configuration and the weights of a model, as transformers' models give them."""

    def __init__(self, family, settings):
        values = {"model_type": family, **settings}
        theta = values.pop("rope_theta", 1e4)
        plain = {"rope_type": "default", "rope_theta": theta}
        if family == "gemma3_text":
            whole = {**plain, "rope_theta": 1e6}
            rope = {"full_attention": whole, "sliding_attention": plain}
        else:
            rope = plain
        if family != "gpt2":
            values.setdefault("rope_parameters", rope)
        self._values = values
        defaults = TABLE[family].defaults
        known = {name: defaults[name] for name in ("rms_norm_eps", "tie_word_embeddings")}
        self.config = SimpleNamespace(
            **{**known, **values}, to_json_string=lambda **_: json.dumps(values)
        )

    def state_dict(self):
        with TemporaryDirectory() as folder:
            write_json(Path(folder) / "config.json", self._values)
            shapes = dummy_weight_shapes(Path(folder))
        random = np.random.default_rng(0)
        return joined_experts(
            {
                name: np.float32(0.2 if len(shape) == 1 else 0.0)
                + random.standard_normal(shape, np.float32) * np.float32(0.25)
                for name, shape in shapes.items()
            }
        )


def joined_experts(weights):
    """Weights of a folder by the names of transformers' modules, whose experts are one tensor."""
    tensors, parts = {}, {}
    for name, values in weights.items():
        layer, is_expert, end = name.partition(".experts.")
        layer = layer.replace("block_sparse_moe", "mlp")
        if is_expert:
            number, matrix, _ = end.split(".")
            parts.setdefault((layer, _MATRICES.get(matrix, matrix)), {})[int(number)] = values
        elif name.endswith("input_linear.weight"):
            tensors[f"{name.removesuffix('input_linear.weight')}experts.gate_up_proj"] = values
        elif name.endswith("output_linear.weight"):
            tensors[f"{name.removesuffix('output_linear.weight')}experts.down_proj"] = values
        else:
            tensors[layer.replace("mlp.router.layer.", "mlp.gate.")] = values
    stacked = {
        key: np.stack([experts[number] for number in sorted(experts)])
        for key, experts in parts.items()
    }
    for (layer, matrix), values in stacked.items():
        if matrix == "gate_proj":
            gate_up = values, stacked[layer, "up_proj"]
            tensors[f"{layer}.experts.gate_up_proj"] = np.concatenate(gate_up, 1)
        elif matrix == "down_proj":
            tensors[f"{layer}.experts.down_proj"] = values
    return tensors


def header_of(model, architecture):
    """The keys of the architecture that llama.cpp's converter writes, without scaling."""
    config = model.config
    values = sizes_of(config, architecture)
    if architecture in _SLIDING:
        values["attention.sliding_window"] = config.sliding_window
    if architecture == "stablelm":
        values["use_parallel_residual"] = False
    if architecture == "gemma3":
        values["rope.freq_base"] = 1000000.0
    if architecture in _EXPERTS:
        values["expert_count"] = 4
        values["expert_used_count"] = config.num_experts_per_tok
    if architecture in ("qwen2moe", "qwen3moe"):
        values["expert_feed_forward_length"] = config.moe_intermediate_size
    if architecture == "qwen2moe":
        values["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    if architecture == "minimax-m2":
        values["expert_gating_func"] = 2
    return values | scales_of(config)


def sizes_of(config, architecture):
    """Those that every architecture has."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    values = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": getattr(config, "intermediate_size", 64),
        "attention.head_count": config.num_attention_heads,
    }
    if architecture in LAYER_NORMS:
        values["attention.layer_norm_epsilon"] = 1e-5
    else:
        values["attention.layer_norm_rms_epsilon"] = config.rms_norm_eps
    if architecture != "gpt2":
        values["attention.head_count_kv"] = config.num_key_value_heads
        values["rope.dimension_count"] = head
        values["rope.freq_base"] = 10000.0
        values |= {"attention.key_length": head, "attention.value_length": head}
    if architecture in _PARTLY:
        values["rope.dimension_count"] = head // 2
    return values


def scales_of(config):
    """The keys of factors."""
    names = {
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
        "attention_multiplier": "attention.scale",
        "logit_scale": "logit_scale",
    }
    return {key: getattr(config, name) for name, key in names.items() if hasattr(config, name)}


def tensors_of(model, architecture):
    """The weights of a model by the names of the file, with llama.cpp's changes."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    name = NAMES.get(architecture, architecture)
    arch = next(key for key, value in MODEL_ARCH_NAMES.items() if value == name)
    table = get_tensor_name_map(arch, model.config.num_hidden_layers)
    texts = {}
    tied = model.config.tie_word_embeddings
    for own, weight in model.state_dict().items():
        values = np.asarray(weight)
        if own == "lm_head.weight" and tied:
            continue
        if own.endswith("e_score_correction_bias"):
            texts[f"blk.{own.split('.')[2]}.exp_probs_b.bias"] = values
            continue
        for part_name, moved in _RENAMED.items():
            own = own.replace(part_name, moved)  # noqa: PLW2901
        end = own.rpartition(".")[2]
        for target, part in split_experts(own, values):
            target_stem = target.removesuffix(f".{end}") if end in ("weight", "bias") else target
            known = table.get_name(target_stem)
            assert known is not None, target
            suffix = end if end in ("weight", "bias") else "weight"
            texts[f"{known}.{suffix}"] = changed(model, architecture, known, suffix, part)
    return {key: np.ascontiguousarray(values) for key, values in texts.items()}


def split_experts(name, values):
    """transformers joins the gates of experts with what they multiply."""
    if not name.endswith("experts.gate_up_proj"):
        return [(name, values)]
    gate, up = np.split(values, 2, 1)
    stem = name.removesuffix("gate_up_proj")
    return [(f"{stem}gate_proj", gate), (f"{stem}up_proj", up)]


def changed(model, architecture, name, suffix, values):
    config = model.config
    if architecture in PAIRS and name.endswith(("attn_q", "attn_k")):
        heads = config.num_attention_heads if "_q" in name else config.num_key_value_heads
        pairs = values.reshape(heads, 2, -1, *values.shape[1:])
        return pairs.swapaxes(1, 2).reshape(values.shape)
    if architecture in ("gemma", "gemma2", "gemma3", "nemotron") and name.endswith("norm"):
        return values + 1 if architecture != "nemotron" or suffix == "weight" else values
    if architecture == "gpt2" and f"{name}.{suffix}".endswith(TURNED):
        return values.T
    if name.endswith("ffn_gate_inp_shexp"):
        return values[0]
    return values


def write_gguf_of(model, path, architecture, *, kind="F32", values=None, extra=None, tokens=None):
    """Write `model` to `path`.

    `values` are more keys, those that begin with a dot of the architecture; None removes one.
    `extra` are more tensors, `kind` is the type of matrices, `tokens` another vocabulary.
    """
    from gguf import GGMLQuantizationType, GGUFWriter, quantize

    name = NAMES.get(architecture, architecture)
    writer = GGUFWriter(path, name)
    keys = {f".{key}": value for key, value in header_of(model, architecture).items()}
    keys |= {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens or TOKENS,
        "tokenizer.ggml.token_type": TYPES,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    for key, value in (keys | (values or {})).items():
        if value is not None:
            add_value(writer, f"{name}{key}" if key.startswith(".") else key, value)
    for key, numbers in (tensors_of(model, architecture) | (extra or {})).items():
        is_float = numbers.ndim == 1 or "_inp." in key or key.endswith("bias")
        to = GGMLQuantizationType["F32" if is_float else kind]
        writer.add_tensor(key, quantize(np.asarray(numbers, np.float32), to), raw_dtype=to)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write(path, architecture, *, changes=None, **file):
    """Write a small model of the architecture to `path`, and return it."""
    model = tiny_model(architecture, **{"attn_implementation": "eager", **(changes or {})})
    write_gguf_of(model, path, architecture, **file)
    return model
