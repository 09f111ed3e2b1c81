"""Small random models with MTP layers that predict further tokens, saved as released ones are."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from pyengine.utils.dtypes import Rows
from tests.support.checkpoints import (
    BASE,
    FAMILIES,
    read_weights,
    save_random,
    save_weights,
    write_json,
)

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
    sizes = {**SHAPES[family], **settings, "num_nextn_predict_layers": mtp_layers}
    save_random(folder, family, **sizes, num_hidden_layers=LAYERS + mtp_layers)
    weights = read_weights(folder)
    for name in weights:
        if "o_proj" in name or "down_proj" in name:
            weights[name] *= np.float32(0.005)
    random, size = np.random.default_rng(0), settings.get("hidden_size", BASE["hidden_size"])

    def normal(*shape: int) -> Rows:
        return random.standard_normal(shape, dtype=np.float32)

    for layer in range(LAYERS, LAYERS + mtp_layers):
        name = f"model.layers.{layer}"
        both = [np.eye(size, dtype=np.float32), normal(size, size) * np.float32(0.1 / size**0.5)]
        weights[f"{name}.eh_proj.weight"] = np.concatenate(both, 1)
        for norm in ("enorm", "hnorm"):
            weights[f"{name}.{norm}.weight"] = 1 + np.float32(0.1) * normal(size)
        weights[f"{name}.shared_head.norm.weight"] = weights["model.norm.weight"]
    save_weights(folder / "model.safetensors", weights)
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", {**config, "num_hidden_layers": LAYERS})


class Reference:
    """transformers' own model and MTP layers, without a cache from one call to the next."""

    def __init__(self, folder: Path, mtp_layers: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.modeling_layers import MtpModel

        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        layers = range(LAYERS, LAYERS + mtp_layers)
        model._keys_to_ignore_on_load_unexpected = [
            rf"model\.layers\.{layer}\." for layer in layers
        ]
        self.model = model.eval()
        self.mtp_layers: Any = MtpModel.from_pretrained(model).eval()

    def drafts(self, tokens: list[int]) -> list[int]:
        """The prediction of each head after `tokens`."""
        import torch

        with torch.inference_mode():
            return self._drafts(tokens)

    def _drafts(self, tokens: list[int]) -> list[int]:
        import torch
        from transformers.cache_utils import MtpCache

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
