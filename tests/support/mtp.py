"""Small random models with MTP layers that predict further tokens, saved as released ones are."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from tests.unit.executor.hand_made import random_model
from tests.unit.executor.test_model_runner import FAMILIES

LAYERS = 2
_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": LAYERS,
}
SHAPES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**FAMILIES["deepseek_v3"], **_EXPERTS},
    "glm4_moe": {**_EXPERTS, "head_dim": 16, "use_qk_norm": True},
}


def save_with_mtp_layers(family: str, folder: Path, mtp_layers: int, **settings: Any) -> None:
    """Save a model whose MTP layers are often right: the next token depends mostly on the last
    one.

    The MTP layers are saved as the layers after the last, by the same names as the others.
    """
    sizes = {**SHAPES[family], **settings}
    model = random_model(
        family, **sizes, num_hidden_layers=LAYERS + mtp_layers, num_nextn_predict_layers=mtp_layers
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.mul_(0.005)
    model.save_pretrained(folder)
    path, size = folder / "model.safetensors", model.config.hidden_size
    tensors = load_file(path)
    for layer in range(LAYERS, LAYERS + mtp_layers):
        both = torch.cat([torch.eye(size), 0.1 * torch.randn(size, size) / size**0.5], 1)
        norms = {name: 1 + 0.1 * torch.randn(size) for name in ("enorm", "hnorm")}
        tensors |= {f"model.layers.{layer}.{name}.weight": item for name, item in norms.items()}
        tensors[f"model.layers.{layer}.eh_proj.weight"] = both
        tensors[f"model.layers.{layer}.shared_head.norm.weight"] = torch.ones(size)
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = LAYERS
    (folder / "config.json").write_text(json.dumps(config))


class Reference:
    """transformers' own model and MTP layers, without a cache from one call to the next."""

    def __init__(self, folder: Path, mtp_layers: int) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        layers = range(LAYERS, LAYERS + mtp_layers)
        model._keys_to_ignore_on_load_unexpected = [
            rf"model\.layers\.{layer}\." for layer in layers
        ]
        self.model = model.eval()
        self.mtp_layers: Any = MtpModel.from_pretrained(model).eval()

    @torch.inference_mode()
    def drafts(self, tokens: list[int]) -> list[int]:
        """The prediction of each head after `tokens`."""
        ids = torch.tensor([tokens])
        hidden = self.model.model(ids[:, :-1], use_cache=False).last_hidden_state
        found, _, _ = self.mtp_layers(
            input_ids=ids[:, 1:],
            last_hidden_states=hidden,
            attention_mask=None,
            position_ids=torch.arange(1, len(tokens))[None],
            mtp_cache=MtpCache(config=self.model.config.get_mtp_config()),
        )
        drafts: list[int] = found[0].tolist()
        return drafts
