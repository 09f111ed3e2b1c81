"""Random models in the shapes of real ones, and what a step of theirs must at least read.

A decode step reads every weight once (of an embedding that is not also the output layer, only the
rows of its tokens) and the keys and values of every sequence. At a given bandwidth this takes a
time that no engine beats: the roofline (Williams, Waterman and Patterson, "Roofline", 2009). For
dense models; of a mixture of experts not every weight is read.
"""

from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from pyengine.models.transformers_calls import quiet_transformers


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """The sizes of a dense decoder that determine its memory traffic, in elements."""

    layers: int
    hidden: int
    intermediate: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    bytes_per_element: int = 2

    @classmethod
    def of(cls, config: Any, bytes_per_element: int = 2) -> "ModelSize":
        """From a transformers configuration with gated MLPs, as llama and qwen3 have."""
        head_dim = getattr(config, "head_dim", None)
        return cls(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            query_heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=head_dim or config.hidden_size // config.num_attention_heads,
            vocabulary=config.vocab_size,
            tied=config.tie_word_embeddings,
            bytes_per_element=bytes_per_element,
        )

    @property
    def layer_weights(self) -> int:
        """Matrix elements of one layer: attention and MLP; norms are left out."""
        attention = 2 * self.hidden * self.head_dim * (self.query_heads + self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one position in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.bytes_per_element

    @property
    def weight_bytes(self) -> int:
        """Bytes that every step reads: all layers and the output layer."""
        elements = self.layers * self.layer_weights + self.vocabulary * self.hidden
        return elements * self.bytes_per_element

    def decode_bytes(self, batch: int, context: float) -> float:
        """Bytes of a step in which `batch` sequences decode a token over `context` positions."""
        embeddings = batch * self.hidden * self.bytes_per_element
        return self.weight_bytes + embeddings + batch * context * self.kv_bytes_per_token

    def prefill_flops(self, length: int) -> float:
        """Floating-point operations for a prompt of `length`, of which the last row is sampled.

        Two per weight and token; four per query and visible key of each head and dimension.
        """
        visible = length * (length + 1) / 2
        attention = 4 * self.layers * self.query_heads * self.head_dim * visible
        weights = 2 * self.layers * self.layer_weights * length
        return weights + attention + 2 * self.vocabulary * self.hidden


def roofline_tokens_per_second(
    size: ModelSize, batch: int, context: float, bandwidth: float
) -> float:
    """Decoded tokens per second if memory of `bandwidth` bytes/s were all that took time."""
    return batch * bandwidth / size.decode_bytes(batch, context)


@dataclass(frozen=True)
class Shape:
    """The sizes of a real model, to be filled with random weights."""

    name: str
    family: str
    settings: dict[str, Any]

    @cached_property
    def config(self) -> Any:
        """Its transformers configuration."""
        from transformers import AutoConfig

        return AutoConfig.for_model(self.family, **self.settings)

    @property
    def size(self) -> ModelSize:
        """The sizes that determine reads and computation."""
        return ModelSize.of(self.config)

    def model(self, device: str) -> Any:
        """A transformers model in bfloat16, made on the device."""
        from transformers import AutoModelForCausalLM

        models: Any = AutoModelForCausalLM
        torch.manual_seed(0)
        with torch.device(device), quiet_transformers():
            config = deepcopy(self.config)  # its model may change it
            model = models.from_config(config, dtype=torch.bfloat16)
        return model.eval()


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            "Qwen3-0.6B",
            "qwen3",
            {
                "vocab_size": 151_936,
                "hidden_size": 1024,
                "intermediate_size": 3072,
                "num_hidden_layers": 28,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "max_position_embeddings": 40_960,
                "tie_word_embeddings": True,
            },
        ),
        Shape(
            "Llama-3.1-8B",
            "llama",
            {
                "vocab_size": 128_256,
                "hidden_size": 4096,
                "intermediate_size": 14_336,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "max_position_embeddings": 131_072,
                "tie_word_embeddings": False,
            },
        ),
        Shape(
            "tiny",  # to see on a CPU that the benchmark runs
            "qwen3",
            {
                "vocab_size": 512,
                "hidden_size": 128,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "head_dim": 64,
                "max_position_embeddings": 1024,
                "tie_word_embeddings": True,
            },
        ),
    )
}
