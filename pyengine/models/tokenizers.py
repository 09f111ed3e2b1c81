"""The tokenizer in a model folder."""

from pathlib import Path
from typing import Any

from pyengine.errors import ModelLoadError
from pyengine.models.tokenizer_growth import check_growth
from pyengine.models.transformers_calls import (
    code_asked_for,
    load_errors,
    read_json,
    remote_code,
)

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def load_tokenizer(folder: Path, *, is_plain: bool = False) -> Any:
    """The tokenizer in `folder`, or None without one.

    Folders made of GGUF files need no class of a family, which loses settings of the file.
    """
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    import transformers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    path = folder / "tokenizer_config.json"
    settings = read_json(path)
    if asked := code_asked_for(settings, "AutoTokenizer"):
        named = str(settings.get("tokenizer_class")).removesuffix("Fast")
        if not (hasattr(transformers, named) or hasattr(transformers, f"{named}Fast")):
            raise remote_code(path, asked)
    plain = PreTrainedTokenizerFast.__name__
    is_plain = is_plain and settings.get("tokenizer_class") == plain
    kind: Any = PreTrainedTokenizerFast if is_plain else AutoTokenizer
    with load_errors(f"the tokenizer in {folder} could not be loaded"):
        tokenizer: Any = kind.from_pretrained(folder, trust_remote_code=False)
        wanted = sorted({*(tokenizer.vocab_files_names or {}).values()})
        if wanted and not any((folder / name).is_file() for name in (*wanted, "tekken.json")):
            raise ModelLoadError(
                f"the tokenizer in {folder} has no vocabulary: none of {', '.join(wanted)} is "
                "there; download the model again, or without tokenizer_config.json give token ids"
            )
        check_growth(tokenizer)
        return tokenizer
