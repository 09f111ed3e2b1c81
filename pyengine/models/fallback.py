"""Families without a decoder of ours: transformers' modules, run as they are.

transformers calls our attention through its `AttentionInterface`. Nothing of the module is changed.
This is the only module that builds models of transformers; a family of the table never needs it.
"""

import copy
import json
import logging
import re
from dataclasses import replace
from math import isfinite, prod
from pathlib import Path
from typing import Any

import torch

from pyengine.attention.context import PagedContext
from pyengine.attention.dispatch import CompiledModel, register_paged_attention
from pyengine.attention.needs import LayerNeeds
from pyengine.errors import ConfigurationError, ModelLoadError
from pyengine.models.checkpoint_files import WeightHeaders, check_number_formats, check_weights
from pyengine.models.config import DRAWN, default_sampling, max_model_len, read_config
from pyengine.models.decoder.dummy import refuse_quantised
from pyengine.models.kv_scales import is_kv_scale, read_kv_scales
from pyengine.models.loaded import LoadedModel
from pyengine.models.placement import DtypeChoice, check_dummy_memory, choose_dtype, kv_shards
from pyengine.models.pooling import read_pooling
from pyengine.models.source import ModelSource
from pyengine.models.tokenizer import eos_token_ids, load_tokenizer
from pyengine.models.transformers_calls import load_errors, quiet_transformers, read_object
from pyengine.models.unsupported import missing
from pyengine.utils.devices import Device, for_torch
from pyengine.utils.dtypes import itemsize, torch_dtype

_log = logging.getLogger(__name__)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SEED = 0
_LAYER = re.compile(r"\.(\d+)\.")


class FallbackModel:
    """A module of transformers over a paged KV cache. See `Model`.

    The module is switched to paged attention permanently; it refuses plain calls.
    """

    takes_arrays = False

    def __init__(self, module: Any, layers: tuple[LayerNeeds, ...], reason: str) -> None:
        self.name = type(module).__name__
        self.origin = f"transformers ({reason})"
        self.device: Device = next(module.parameters()).device
        self.module, self._layers = module, layers
        config = module.config.to_dict()
        for of_the_folder in ("_name_or_path", "transformers_version"):
            config.pop(of_the_folder, None)
        self.settings = f"{self.name} {json.dumps(config, sort_keys=True, default=str)}"
        name = register_paged_attention()
        if not getattr(module, "_supports_attention_backend", False):
            raise ConfigurationError(
                f"{self.name} does not dispatch its attention through transformers' "
                "AttentionInterface: it cannot run on a paged KV cache"
            )
        module.set_attn_implementation(name)

    def __call__(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        paged: PagedContext | CompiledModel,
    ) -> torch.Tensor:
        """See `Model`."""
        logits: torch.Tensor = self._run(ids, positions, rows, paged).logits[0]
        return logits

    def with_hidden(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        hidden_rows: torch.Tensor,
        paged: PagedContext,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Model.with_hidden`."""
        output = self._run(ids, positions, rows, paged, output_hidden_states=True)
        return output.logits[0], output.hidden_states[-1][0, hidden_rows]

    def _run(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        paged: PagedContext | CompiledModel,
        **more: bool,
    ) -> Any:
        output = self.module(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=rows,
            paged=paged,
            **more,
        )
        if isinstance(paged, PagedContext):
            self.check_attended(paged)
        return output

    def check_attended(self, context: PagedContext) -> None:
        """See `Model.check_attended`: a layer may keep its state elsewhere."""
        if context.attended != len(self._layers):
            raise ConfigurationError(
                f"{self.name} attended in {context.attended} of {len(self._layers)} layers: the "
                "others keep a state that paged attention does not hold; this model is not "
                "supported"
            )


def load_fallback(
    source: ModelSource,
    device: Device,
    dtype: str | torch.dtype,
    *,
    reason: str,
    shards: int = 1,
) -> LoadedModel:
    """The model of a folder as a module of transformers; `reason` says why it is not ours.

    With `shards` above 1, every process of torch's default group calls this at the same time and
    gets its part of the model. Raises `ModelLoadError` for what transformers cannot load, and for
    models that a paged KV cache does not hold.
    """
    with quiet_transformers():
        folder = source.folder
        if source.load_format == "dummy":
            return _load_dummy(source, device, dtype, reason)
        headers = check_weights(folder)
        config = read_config(folder, headers)
        quantised = getattr(config, "quantization_config", None) is not None
        check_number_formats(headers, folder, quantised=quantised)
        choice = _dtype_choice(config, dtype, device)
        transposed = _refuse_other_sizes(config, headers, folder)
        way_out = f"{transposed}; transformers was asked, as {reason}"
        with load_errors(f"the model in {folder} could not be loaded", way_out=way_out):
            module = _load_weights(
                folder, config, torch_dtype(choice.dtype), _placement(device, shards)
            )
        refuse_not_finite(module, folder)
        return replace(
            _loaded(source, module, device, choice, reason),
            kv_shards=kv_shards(config, shards),
            kv_scales=read_kv_scales(folder, headers),
        )


def check_fallback(folder: Path) -> None:
    """Raise `ModelLoadError` if transformers' module for the model in `folder` cannot run here.

    Builds the module without its weights; only their headers are read.
    """
    headers = check_weights(folder)
    config = read_config(folder, headers)
    with load_errors(f"the model in {folder} could not be loaded"), quiet_transformers():
        refuse_unpageable(empty_model(config), folder)


def _load_dummy(
    source: ModelSource, device: Device, dtype: str | torch.dtype, reason: str
) -> LoadedModel:
    """The model of a folder with random weights; only its configuration is read.

    Every process draws the same weights on the same kind of device.
    """
    folder = source.folder
    config = _unpacked_config(folder)
    choice = _dtype_choice(config, dtype, device)
    count = sum(map(prod, fallback_shapes(folder).values()))
    check_dummy_memory(count, 8 * itemsize(choice.dtype), device)
    own = for_torch(device)
    devices = [own] if device.type == "cuda" else []
    failed = load_errors(f"the model in {folder} could not be built")
    with failed, torch.random.fork_rng(devices), own:
        torch.manual_seed(_SEED)
        module = _from_config(config, dtype=torch_dtype(choice.dtype)).eval().requires_grad_(False)
    refuse_unpageable(module, folder)
    refuse_not_finite(module, folder)
    return replace(_loaded(source, module, device, choice, reason), load_format="dummy")


def fallback_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the weights in transformers' module; tied ones count once."""
    with load_errors(f"the model in {folder} could not be built"), quiet_transformers():
        model = empty_model(_unpacked_config(folder))
    return {
        name: tuple(parameter.shape)
        for name, parameter in model.named_parameters()
        if name not in model.all_tied_weights_keys
    }


def _dtype_choice(config: Any, dtype: str | torch.dtype, device: Device) -> DtypeChoice:
    saved: torch.dtype | None = getattr(config.get_text_config(), "dtype", None)
    name = None if saved is None else str(saved).removeprefix("torch.")
    return choose_dtype(dtype, name, device)


def _unpacked_config(folder: Path) -> Any:
    """The configuration in `folder`, which needs no weights, of a model that is not quantised."""
    path = folder / "config.json"
    refuse_quantised(read_object(path).get("quantization_config"), path)
    config = read_config(folder, DRAWN)
    spread = getattr(config.get_text_config(), "initializer_range", 0.0)
    if not isfinite(spread):
        raise ModelLoadError(
            f"{path} says initializer_range={spread}, the standard deviation of random weights: "
            "it must be finite"
        )
    return config


def empty_model(config: Any) -> Any:
    """The module of `config` without memory for its weights: on torch's device "meta"."""
    from transformers.initialization import no_init_weights

    with torch.device("meta"), no_init_weights():
        return _from_config(copy.deepcopy(config))


def _from_config(config: Any, **settings: Any) -> Any:
    from transformers import AutoModelForCausalLM

    build: Any = AutoModelForCausalLM.from_config
    return build(config, trust_remote_code=False, **settings)


def _loaded(
    source: ModelSource, module: Any, device: Device, choice: DtypeChoice, reason: str
) -> LoadedModel:
    """A module with its tokenizer and its limits."""
    folder = source.folder
    tokenizer = load_tokenizer(folder)
    text, layers = module.config.get_text_config(), attending_layers(module)
    end = getattr(module.generation_config, "eos_token_id", None)
    return LoadedModel(
        model=FallbackModel(module, layers, reason),
        layers=layers,
        tokenizer=tokenizer,
        path=folder,
        name=source.name,
        eos_token_ids=eos_token_ids(folder, tokenizer, text.vocab_size, default=end),
        max_model_len=max_model_len(text, folder),
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        device=device,
        dtype=choice.dtype,
        dtype_reason=choice.reason,
        default_sampling=default_sampling(folder),
        pooling=read_pooling(folder),
    )


def attending_layers(module: Any) -> tuple[LayerNeeds, ...]:
    """The attention of every layer of a module of transformers.

    Heads, sizes, windows and softcaps are in its configuration. Sinks are parameters, which no
    configuration speaks of: a layer has them if its attention module does.
    """
    text = module.config.get_text_config()
    is_heterogeneous = getattr(text, "is_heterogeneous", False)
    layers = text.per_layer_config if is_heterogeneous else [text] * text.num_hidden_layers
    with_sinks = {
        part.layer_idx
        for part in module.modules()
        if hasattr(part, "layer_idx") and getattr(part, "sinks", None) is not None
    }
    return tuple(
        _attending(layer, number, number in with_sinks) for number, layer in enumerate(layers)
    )


def _attending(layer: Any, number: int, sinks: bool) -> LayerNeeds:
    """A layer by its configuration; keys of latent attention arrive expanded to every head."""
    heads = layer.num_attention_heads
    if getattr(layer, "kv_lora_rank", None) is not None:
        kv_heads, head_dim = heads, layer.qk_nope_head_dim + layer.qk_rope_head_dim
    else:
        kv_heads = getattr(layer, "num_key_value_heads", None) or heads
        head_dim = getattr(layer, "head_dim", None) or layer.hidden_size // heads
    return LayerNeeds(
        query_heads=heads,
        kv_heads=kv_heads,
        head_dim_k=head_dim,
        head_dim_v=getattr(layer, "v_head_dim", None) or head_dim,
        window=_window(layer, number),
        softcap=getattr(layer, "attn_logit_softcapping", None),
        sinks=sinks,
    )


def _window(config: Any, layer: int) -> int | None:
    """The window of a layer: `layer_types` marks sliding ones, without it all of them slide."""
    window = getattr(config, "sliding_window", None)
    if not isinstance(window, int) or window < 1 or not getattr(config, "use_sliding_window", True):
        return None
    types = getattr(config, "layer_types", None)
    return window if types is None or types[layer] == "sliding_attention" else None


def _placement(device: Device, shards: int) -> dict[str, Any]:
    """Keyword arguments that place the weights: on one device, or a part in every process."""
    if shards > 1:
        from transformers.distributed.configuration_utils import DistributedConfig

        return {"distributed_config": DistributedConfig(tp_plan="auto", tp_size=shards)}
    return {} if device.type == "cpu" else {"device_map": {"": for_torch(device)}}


def _load_weights(folder: Path, config: Any, dtype: torch.dtype, placement: dict[str, Any]) -> Any:
    """The model of `config` with the weights of the folder, ready to run."""
    from transformers import AutoModelForCausalLM

    loading: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        trust_remote_code=False,
        dtype=dtype,
        use_safetensors=True,
        output_loading_info=True,
        **placement,
    )
    model, info = loading
    refuse_unpageable(model, folder)
    _refuse_other_tensors(model, info, folder)
    model.eval()
    return model


def _refuse_other_sizes(config: Any, headers: WeightHeaders, folder: Path) -> str:
    """Raise if the model of `config` has more weights than the files, or tensors of other sizes.

    transformers would fill such tensors with random numbers before it fails. Returns the message
    for a later failure: other shapes of the same size may be intended.
    """
    with load_errors(f"{folder / 'config.json'} cannot be used"):
        model = empty_model(config)
        num_weights = sum(parameter.numel() for parameter in model.parameters())
    if num_weights > headers.num_bits:
        raise ModelLoadError(
            f"{folder / 'config.json'} describes a model of {num_weights} weights, and the files "
            f"have {headers.num_bytes} bytes: the two are not of the same model"
        )
    if getattr(config, "quantization_config", None) is not None:
        return ""  # packed: another shape by the same name
    transposed = ""
    for name, item in model.named_parameters():
        stored = headers.tensors.get(name)
        if stored is None or stored.shape == tuple(item.shape):
            continue
        differ = (
            f"the weights {name} in {folder} have the shape {list(stored.shape)}, and "
            f"config.json asks for {list(item.shape)}: the two are not of the same model"
        )
        if prod(stored.shape) != item.numel():
            raise ModelLoadError(differ)
        transposed = transposed or f"; {differ}"
    return transposed


def _refuse_other_tensors(model: Any, info: Any, folder: Path) -> None:
    """Raise if files and model have different tensors; log those that are unused.

    transformers fills missing tensors with random numbers. Layers beyond the number in config.json
    are left out, so half a model would answer; MTP layers are left out on purpose.
    """
    missing = sorted(info["missing_keys"])
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelLoadError(
            f"the weights in {folder} lack {missing[0]}{more}, which config.json asks for: "
            "the two are not of the same model, or a file is missing"
        )
    unread = sorted(name for name in info["unexpected_keys"] if not is_kv_scale(name))
    text = model.config.get_text_config()
    stacks = {_LAYER.sub(".#.", name, count=1) for name in model.state_dict()}
    last = text.num_hidden_layers + (getattr(text, "num_nextn_predict_layers", None) or 0)
    for name in unread:
        layer = _LAYER.search(name)
        if layer and int(layer[1]) >= last and _LAYER.sub(".#.", name, count=1) in stacks:
            raise ModelLoadError(
                f"the weights in {folder} have a layer {layer[1]} ({name}), and config.json says "
                f"num_hidden_layers={text.num_hidden_layers}: the two are not of the same model"
            )
    if unread:
        _log.warning(
            "%s: %d tensors are not part of a %s and are left out: %s",
            *(folder, len(unread), type(model).__name__),
            ", ".join(unread[:3]) + (", ..." if len(unread) > 3 else ""),
        )


@torch.no_grad()
def refuse_not_finite(model: Any, folder: Path) -> None:
    """Raise for weights that are NaN or infinite: every answer would be token 0.

    One sum per tensor, which reads all weights: a tenth of a second for 135 million of them in
    memory. All processes of a divided model call this together, and all of them raise.
    """
    weights = [
        (name, tensor) for name, tensor in model.named_parameters() if tensor.dtype in _DTYPES
    ]
    sums = [_of_all(tensor.sum()) for _, tensor in weights]
    for (name, tensor), total in zip(weights, sums, strict=True):
        if not total.isfinite() and _of_all(tensor.isfinite().logical_not().sum()):
            raise ModelLoadError(
                f"the weights {name} in {folder} hold NaN or infinity, in {tensor.dtype}: the "
                "file is damaged, or dtype='bfloat16' or 'float32' is what the model needs"
            )


def _of_all(number: Any) -> torch.Tensor:
    """The sum over all processes of a divided model."""
    # torch 2.9 shows each process its part of a DTensor only.
    whole: torch.Tensor = number.full_tensor() if hasattr(number, "full_tensor") else number
    return whole


def refuse_unpageable(model: Any, folder: Path) -> None:
    """Raise for a model whose layers keep a state, or attend to later tokens.

    Attention that is not causal is marked in its module (`is_causal`) or in the configuration. Its
    mask never reaches our attention, so its answers would be nonsense.
    """
    name = f"{type(model).__name__} ({folder})"
    if getattr(model, "_is_stateful", False):
        raise ModelLoadError(
            f"{name} keeps a recurrent state; pyengine has no {missing(model.config.model_type)}"
        )
    looking_ahead = [
        layer
        for layer in model.get_decoder().modules()
        if getattr(layer, "layer_idx", None) is not None
        and getattr(layer, "is_causal", True) is False
    ]
    if looking_ahead or not getattr(model.config.get_text_config(), "is_causal", True):
        raise ModelLoadError(
            f"{name} attends to later tokens too: it is made to embed or classify text, not to "
            "generate it, and is not supported"
        )
