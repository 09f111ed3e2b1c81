"""The layer groups of a model in a folder."""

from pathlib import Path

from pyengine.executor.kv_cache_config import cache_specs
from pyengine.kv_cache.layer_groups import choose_layer_groups
from pyengine.models.loader import load_model


def groups_of(folder: Path) -> tuple[int | None, ...]:
    """The window of each group; None: all tokens are kept."""
    loaded = load_model(folder, device="cpu")
    windows = [layer.window for layer in loaded.layers]
    sizes = [spec.token_bytes for spec in cache_specs(loaded, loaded.dtype)]
    return choose_layer_groups(windows, sizes, loaded.max_model_len).windows
