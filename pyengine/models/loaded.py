"""A model that is ready to run: what the engine knows of it, and what the runner calls."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pyengine.attention.needs import LayerNeeds
from pyengine.kv_cache.states import StateSpec
from pyengine.models.decoder.adapters import AdapterTables
from pyengine.models.decoder.product_choice import ProductChooser
from pyengine.models.kv_scales import Scales
from pyengine.models.model import Model
from pyengine.models.pooling import PoolingConfig
from pyengine.utils.devices import Device
from pyengine.utils.dtypes import DType


def callable_model(model: Model) -> Model:
    """`model` as the runner calls it, with arrays or tensors as inputs of a step."""
    if model.takes_arrays:
        return model
    from pyengine.models.tensor_model import TensorModel

    return TensorModel(model)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model, ready to run, with its tokenizer and its limits.

    - `layers`: the attention of every layer that has its own KV cache, in order.
      The last `num_mtp_layers` predict tokens after the next one; then `model` is an `MTPModel`.
    - `states`: those of every layer that keeps one, in order.
    - `tokenizer`: None for a folder without one: then prompts are token ids.
    - `eos_token_ids` end a generation.
    - `max_model_len`: the number of positions; `vocab_size`: the number of token ids.
    - `kv_shards`: a model that is divided over processes has 1 / `kv_shards` of its KV heads here.
    - `dtype_reason`: why the weights are of `dtype`.
    - `default_sampling`: the fields of `SamplingParams` that generation_config.json sets.
    - `properties`: those that its KV depends on, for a store.
    - `quantization`: the formats of the weights that are quantised: all of them unless
      `has_float_linears`. `products` has chosen how those are multiplied.
    - `has_torch_products`: torch multiplies, so the last bits depend on the number of threads.
    - `torch_computes`: between token ids and logits torch computes, too, not our kernels alone.
    - `kv_scales`: those of an 8-bit KV cache.
    - `path`: the model's folder, or its GGUF file.
    - `load_format`: with "dummy", weights are random.
    - `pooling`: the defaults of its embeddings, and its classifier.
    - `adapters`: the tables for adapters; None: it was loaded without.
    """

    model: Model
    layers: tuple[LayerNeeds, ...]
    tokenizer: Any
    path: Path
    name: str
    eos_token_ids: frozenset[int]
    max_model_len: int
    vocab_size: int
    hidden_size: int
    device: Device
    dtype: DType
    dtype_reason: str = ""
    kv_shards: int = 1
    default_sampling: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    num_mtp_layers: int = 0
    properties: tuple[tuple[str, bytes], ...] = ()
    quantization: str = "none"
    has_float_linears: bool = True
    has_torch_products: bool = True
    torch_computes: bool = True
    products: ProductChooser | None = None
    states: tuple[StateSpec, ...] = ()
    kv_scales: Scales = field(default_factory=lambda: MappingProxyType({}))
    load_format: str = "auto"
    pooling: PoolingConfig = field(default_factory=PoolingConfig)
    adapters: AdapterTables | None = None
