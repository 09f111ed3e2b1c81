"""The heads of a model that predict the tokens after the next one: multi-token prediction (MTP).

Gloeckle et al. (2024), arXiv:2404.19737, and DeepSeek-V3, section 2.2: each head is one more
decoder layer, which has the embedding of a token and the hidden state before it as its input, and
shares embedding and output with the model. Their weights stand in the model's files, as the layers
after its last; transformers leaves them out when it loads the model.
"""

from dataclasses import replace
from typing import Any

from pyengine.errors import ConfigurationError
from pyengine.models.checkpoint_files import check_weights
from pyengine.models.loader import LoadedModel, refuse_not_finite
from pyengine.models.transformers_calls import load_errors, quiet_transformers


def with_heads(loaded: LoadedModel) -> LoadedModel:
    """The same model with its heads.

    Raises `ConfigurationError` for a model that has none, and `ModelLoadError` for heads that are
    damaged or of an unsupported kind.
    """
    text = loaded.config.get_text_config()
    first, count = text.num_hidden_layers, getattr(text, "num_mtp_layers", None) or 0
    names = check_weights(loaded.path).tensors
    layers = [f".layers.{layer}." for layer in range(first, first + count)]
    if not any(layer in name for layer in layers for name in names):
        raise ConfigurationError(
            f"speculation='mtp': {loaded.name} has no heads that predict further tokens: neither "
            f"its configuration nor its files go beyond its {first} layers; use 'ngram', "
            "'suffix', or none"
        )
    with quiet_transformers(), load_errors(f"the MTP heads in {loaded.path} could not be loaded"):
        heads = _load(loaded.model, first, count)
    refuse_not_finite(heads, loaded.path)
    return replace(loaded, heads=heads)


def _load(model: Any, first: int, count: int) -> Any:
    """transformers' `MtpModel` over a model.

    transformers finds the heads by names that the model's class ignores, which are those of
    released checkpoints: here by the numbers of their layers, of whatever model of that kind.
    """
    import transformers
    from transformers.modeling_layers import MtpModel

    if not hasattr(MtpModel, "forward_layer"):
        raise ConfigurationError(
            f"speculation='mtp': transformers {transformers.__version__} cannot run a single head "
            "(MtpModel.forward_layer): install transformers 5.20 or later"
        )
    ours = [rf"model\.layers\.{layer}\." for layer in range(first, first + count)]
    known = model._keys_to_ignore_on_load_unexpected or []
    model._keys_to_ignore_on_load_unexpected = [*known, *ours]
    heads: Any = MtpModel.from_pretrained(model, device_map={"": model.device})
    return heads.eval()
