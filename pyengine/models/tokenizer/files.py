"""The tokenizer of a model folder.

tokenizer.json is the tokenizer; tokenizer_config.json and its older companions name the special
tokens, add tokens, and hold chat templates. They are read as transformers reads them:
https://huggingface.co/docs/transformers/main/en/main_classes/tokenizer.

transformers reads folders without a tokenizer.json (SentencePiece models, vocabularies of other
kinds), those with one for each release of the library, and those that ask for code.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer

from pyengine.models.tokenizer.chat import Templates
from pyengine.models.tokenizer.fallback import load_with_transformers
from pyengine.models.tokenizer.tokenizer import NO_LIMIT, SPECIAL, Tokenizer
from pyengine.models.tokenizer_growth import check_growth
from pyengine.models.transformers_calls import load_errors, read_json, read_object, required_code
from pyengine.utils.validation import shown

_log = logging.getLogger(__name__)

_ANY_OF = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
"""A folder without any of these has no tokenizer."""
_NAMED = tuple(f"{name}_token" for name in SPECIAL)

_GPT2 = {name: "<|endoftext|>" for name in ("bos_token", "eos_token", "unk_token")}
_GEMMA = {f"{name}_token": f"<{name}>" for name in ("bos", "eos", "unk", "pad", "mask")}
_CLASS_DEFAULTS: Mapping[str, Mapping[str, str]] = {
    "GPT2Tokenizer": _GPT2,
    "GPTNeoXTokenizer": {**_GPT2, "pad_token": "<|padding|>"},
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "GemmaTokenizer": _GEMMA,
    "Qwen2Tokenizer": {name: "<|endoftext|>" for name in ("eos_token", "unk_token", "pad_token")},
    "CohereTokenizer": {
        **{"bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>", "unk_token": "<UNK>"},
        **{"pad_token": "<PAD>", "cls_token": "<CLS>", "sep_token": "<SEP>"},
        "mask_token": "<MASK_TOKEN>",
    },
}
"""Special tokens of transformers' classes, which files may leave out."""
_OF_BYTES = ("GPT2Tokenizer", "GPTNeoXTokenizer", "Qwen2Tokenizer", "CohereTokenizer")
"""Classes whose setting `add_prefix_space` counts, whatever tokenizer.json says."""
_FAMILY_CLASSES = {
    **dict.fromkeys(("gpt2", "starcoder2"), "GPT2Tokenizer"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), "GemmaTokenizer"),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), "Qwen2Tokenizer"),
    **dict.fromkeys(("cohere", "cohere2"), "CohereTokenizer"),
    "olmo": "GPTNeoXTokenizer",
}
"""Classes by the family of config.json, if the folder names none."""


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer in `folder`, or None without one.

    A `Tokenizer`, or one of transformers where only that can read the files. Raises
    `ModelLoadError` for files that are damaged or ask for their own code.
    """
    if not any((folder / name).is_file() for name in _ANY_OF):
        return None
    settings = _read_object(folder / "tokenizer_config.json")
    reason = fallback_reason(folder, settings)
    if reason is None:
        with load_errors(f"the tokenizer in {folder} could not be loaded"):
            tokenizer: Any = _of_folder(folder, settings)
    else:
        _log.info("transformers reads the tokenizer in %s, as %s", folder, reason)
        tokenizer = load_with_transformers(folder, settings, reason)
    with load_errors(f"the tokenizer in {folder} could not be loaded"):
        check_growth(tokenizer)
    return tokenizer


def fallback_reason(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Why only transformers can read the folder's tokenizer; None if pyengine can.

    `settings` are those of tokenizer_config.json.
    """
    if not (folder / "tokenizer.json").is_file():
        return "it has no tokenizer.json"
    if required_code(dict(settings), "AutoTokenizer"):
        return "tokenizer_config.json asks for Python code"
    if settings.get("fast_tokenizer_files"):
        return "it has a tokenizer.json for each release of transformers"
    if settings.get("fix_mistral_regex"):
        return "fix_mistral_regex asks for another splitting of words"
    return None


def _of_folder(folder: Path, settings: dict[str, Any]) -> Tokenizer:
    backend = RustTokenizer.from_file(str(folder / "tokenizer.json"))
    padding = backend.padding or {}
    listed = settings.get("added_tokens_decoder")
    if listed is None:
        settings = settings | _read_object(folder / "special_tokens_map.json")
    named = {name: settings[name] for name in _NAMED if name in settings}
    named.setdefault("pad_token", padding.get("pad_token"))
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    further = {
        name: value
        for name, value in settings.items()
        if name.endswith("_token") and name not in named and isinstance(value, str)
    }
    if isinstance(extra, dict):
        further, extra = further | extra, []
    named |= further
    special = {name: _token(name, value) for name, value in named.items()}
    extras = [_token("extra_special_tokens", value) for value in extra]
    added = (
        _listed_tokens(listed) if listed is not None else _legacy_tokens(folder, special, extras)
    )
    _add(backend, added, special, extras)
    kind = _class_name(folder, settings)
    if kind in _OF_BYTES:
        _set_prefix(backend, settings.get("add_prefix_space"))
    backend.encode_special_tokens = bool(settings.get("split_special_tokens", False))
    tokenizer = Tokenizer(
        backend,
        {**_class_defaults(kind, backend), **_texts(special)},
        extra_special_tokens=[str(token.content) for token in extras if token is not None],
        chat_template=_templates(folder, settings),
        cleans_up_spaces=settings.get("clean_up_tokenization_spaces") is True,
    )
    longest = settings.get("model_max_length", settings.get("max_len"))
    tokenizer.model_max_length = NO_LIMIT if longest is None else longest
    return tokenizer


def _read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty without the file."""
    return read_object(path) if path.is_file() else {}


def _texts(special: Mapping[str, AddedToken | None]) -> dict[str, str | None]:
    return {name: None if token is None else token.content for name, token in special.items()}


def _token(name: str, value: Any) -> AddedToken | None:
    """A special token as files write it: its text, or an object with its settings."""
    if value is None:
        return None
    if isinstance(value, str):
        return AddedToken(value, special=True)
    if isinstance(value, dict):
        return _added({**value, "special": True})
    raise ValueError(f"tokenizer_config.json says {name}={shown(value)}: it is not a token")


def _added(value: Any) -> AddedToken:
    """A token by its settings in a file."""
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise ValueError(f"an added token is {shown(value)}: it has no content")
    return AddedToken(
        **{name: item for name, item in value.items() if name not in ("__type", "id")}
    )


def _listed_tokens(listed: Any) -> list[AddedToken]:
    """The tokens of `added_tokens_decoder`, by their numbers."""
    if not isinstance(listed, dict):
        raise ValueError(f"tokenizer_config.json says added_tokens_decoder={shown(listed)}")
    numbered = sorted((int(number), _added(value)) for number, value in listed.items())
    return [token for _, token in numbered]


def _legacy_tokens(
    folder: Path, special: Mapping[str, AddedToken | None], extras: list[AddedToken | None]
) -> list[AddedToken]:
    """The tokens of added_tokens.json, by their numbers."""
    known = {token.content for token in (*special.values(), *extras) if token is not None}
    listed = _read_object(folder / "added_tokens.json")
    numbered = sorted((number, text) for text, number in listed.items())
    return [
        AddedToken(text, normalized=text not in known, special=text in known)
        for _, text in numbered
    ]


def _add(
    backend: RustTokenizer,
    added: list[AddedToken],
    special: Mapping[str, AddedToken | None],
    extras: list[AddedToken | None],
) -> None:
    """Add the tokens that the backend does not have with the same settings."""
    present = backend.get_added_tokens_decoder().values()
    same, texts = {repr(token) for token in present}, {token.content for token in present}
    new = [token for token in added if repr(token) not in same]
    texts |= {token.content for token in new}
    named = {token.content for token in special.values() if token is not None}
    for token in new:
        token.special = token.special or token.content in named
    for other in (*special.values(), *extras):
        if other is not None and other.content not in texts:
            texts.add(other.content)
            new.append(other)
    if new:
        backend.add_tokens(new)


def _class_name(folder: Path, settings: Mapping[str, Any]) -> str:
    """The class of transformers' tokenizers that the folder, or its family, has."""
    config = read_json(folder / "config.json")
    kind = settings.get("tokenizer_class") or config.get("tokenizer_class")
    return str(kind or _FAMILY_CLASSES.get(str(config.get("model_type")))).removesuffix("Fast")


def _class_defaults(kind: str, backend: RustTokenizer) -> dict[str, str]:
    """Special tokens that tokenizers of a class have, if they are in the vocabulary."""
    defaults = _CLASS_DEFAULTS.get(kind, {})
    return {name: text for name, text in defaults.items() if backend.token_to_id(text) is not None}


def _set_prefix(backend: RustTokenizer, is_added: Any) -> None:
    """Set whether a space is added before the first word, in vocabularies of bytes."""
    first: Any = backend.pre_tokenizer
    is_several = isinstance(first, pre_tokenizers.Sequence)
    steps = list(first) if is_several else [first]
    if type(is_added) is bool:
        for step in steps:
            if isinstance(step, pre_tokenizers.ByteLevel):
                step.add_prefix_space = is_added


def _templates(folder: Path, settings: Mapping[str, Any]) -> Templates:
    """The chat templates: separate files come first, then the configuration's."""
    templates = {
        path.stem: path.read_text("utf-8")
        for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))
    }
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = (folder / "chat_template.jinja").read_text("utf-8")
    if templates:
        return templates["default"] if templates.keys() == {"default"} else templates
    listed = settings.get("chat_template")
    if listed is None:  # a processor of images and text keeps it here
        listed = _read_object(folder / "chat_template.json").get("chat_template")
    if listed is None or isinstance(listed, str):
        return listed
    named = listed
    if isinstance(listed, list) and all(isinstance(entry, dict) for entry in listed):
        named = {entry.get("name"): entry.get("template") for entry in listed}
    if not isinstance(named, dict) or not all(
        isinstance(text, str) for item in named.items() for text in item
    ):
        raise ValueError(
            f"tokenizer_config.json says chat_template={shown(listed)}: it must be a text, or a "
            "list of names and texts"
        )
    return named
