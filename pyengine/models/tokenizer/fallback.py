"""Tokenizers of transformers, for files that the library `tokenizers` cannot read."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyengine.errors import ModelLoadError
from pyengine.models.transformers_calls import (
    load_errors,
    quiet_transformers,
    remote_code,
    required_code,
)
from pyengine.utils.packaging import is_installed, needs_extra


def load_with_transformers(folder: Path, settings: Mapping[str, Any], reason: str) -> Any:
    """transformers' tokenizer of the folder; `settings` are those of tokenizer_config.json.

    Raises `ModelLoadError` for a folder without a vocabulary, or that needs its own code. If
    transformers is not installed, the error gives the `reason` why it is needed.
    """
    if not is_installed("transformers"):
        raise ModelLoadError(
            needs_extra("torch", f"the tokenizer in {folder} ({reason})", "transformers")
        )
    import transformers
    from transformers import AutoTokenizer

    path = folder / "tokenizer_config.json"
    if code := required_code(dict(settings), "AutoTokenizer"):
        named = str(settings.get("tokenizer_class")).removesuffix("Fast")
        if not (hasattr(transformers, named) or hasattr(transformers, f"{named}Fast")):
            raise remote_code(path, code)
    with load_errors(f"the tokenizer in {folder} could not be loaded"), quiet_transformers():
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        files = sorted({*(tokenizer.vocab_files_names or {}).values()})
        known = (*files, "tokenizer.json", "tekken.json")
        if files and not any((folder / name).is_file() for name in known):
            raise ModelLoadError(
                f"the tokenizer in {folder} has no vocabulary: none of {', '.join(files)} is "
                "there; download the model again, or without tokenizer_config.json give token ids"
            )
        return tokenizer
