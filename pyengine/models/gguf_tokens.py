"""The tokenizer of a GGUF file, with the tokens that end an answer.

Some files name the end of a turn (`eot_token_id`) or of a message to a tool (`eom_token_id`).
llama.cpp finds such tokens by their text in other files. Source of the lists below:
https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp
"""

import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pyengine.models.gguf_header import GGUFArray, GGUFHeader
from pyengine.models.gguf_keys import HeaderKeys

_ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>"),
    *("<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
    *("<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "[e~["),
    "<\N{FULLWIDTH VERTICAL LINE}end\N{LOWER ONE EIGHTH BLOCK}of\N{LOWER ONE EIGHTH BLOCK}sentence"
    "\N{FULLWIDTH VERTICAL LINE}>",
)
"""Texts of tokens that end an answer."""

_FILL_IN_ENDS = (
    *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),
)
"""Texts of tokens that end the completion of code."""

_END_KEYS = tuple(
    f"tokenizer.ggml.{name}_token_id"
    for name in ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
)

_SEVERAL_ENDS = "tokenizer.ggml.eos_token_ids"

_WHOLE_WORDS = (
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    *("jina-v5-nano", "tekken"),
)
"""Pre-tokenizers (`tokenizer.ggml.pre`) whose vocabularies ignore merges for known words."""
_STARTS_WITH_BOS = (*_WHOLE_WORDS, "chameleon")
"""Pre-tokenizers whose vocabularies add BOS to prompts by default."""

_GPT2_SPLITS = ("gpt-2", "phi-2", "mpt", "olmo", "jais", "mellum", "exaone4", "a.x-4.0")
"""Pre-tokenizers that split text as GPT-2 does."""
_DIGIT_SPLITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")
"""Pre-tokenizers that split off each digit, and then split text as GPT-2 does."""
_SAME_SPLITS = {"stablelm2": "qwen2"}

_SPACE = "\u2581"
_SAMPLING = "general.sampling"


def gguf_tokenizer(copy: Path, header: GGUFHeader, config: Any) -> Any:
    """transformers' tokenizer of the file whose header is at `copy`, alone in its folder.

    Its class is that of the family of `config`: families normalise text in ways that have no key.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # AutoTokenizer reads transformers' configuration of the file.
    is_known = header.architecture != "gpt-oss"
    kind: Any = AutoTokenizer if is_known else PreTrainedTokenizerFast
    found = kind.from_pretrained(copy.parent, gguf_file=copy.name, trust_remote_code=False)
    with tempfile.TemporaryDirectory(prefix="pyengine-") as folder:
        config.save_pretrained(folder)
        found.save_pretrained(folder)
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def default_sampling(keys: HeaderKeys) -> dict[str, float]:
    """The file's defaults for requests, by their names in generation_config.json.

    Other keys of the group (`mirostat`, `xtc_threshold`) have no counterpart here.
    """
    found = {
        "temperature": keys.number(f"{_SAMPLING}.temp", zero=True),
        "top_k": keys.count(f"{_SAMPLING}.top_k", low=0),
        "top_p": keys.number(f"{_SAMPLING}.top_p", most=1.0),
        "min_p": keys.number(f"{_SAMPLING}.min_p", most=1.0, zero=True),
        "repetition_penalty": keys.number(f"{_SAMPLING}.penalty_repeat"),
    }
    return {name: value for name, value in found.items() if value is not None}


def check_token_ids(keys: HeaderKeys) -> None:
    """Raise for ids beyond the vocabulary, and for types or scores of fewer tokens.

    Marks keys as read: pass an object of its own.
    """
    tokens = keys.raw("tokenizer.ggml.tokens")
    if not isinstance(tokens, GGUFArray):
        raise ValueError("it has no tokenizer.ggml.tokens")
    last = tokens.length - 1
    for key in ("tokenizer.ggml.token_type", "tokenizer.ggml.scores"):
        found = keys.raw(key)
        if found is not None and not (isinstance(found, GGUFArray) and found.length > last):
            raise keys.refusal(key, f"has not one value for each of {tokens.length} tokens")
    for key in keys.header.values:
        if key.startswith("tokenizer.ggml.") and key.endswith("_token_id"):
            keys.count(key, low=0, high=last)
    several = _several_ends(keys)
    if any(type(token) is not int or not 0 <= token <= last for token in several):
        raise keys.refusal(_SEVERAL_ENDS, f"has ids that are not in the range from 0 to {last}")


def _several_ends(keys: HeaderKeys) -> Sequence[object]:
    """The ids in `eos_token_ids`, a key of some programs."""
    found = keys.raw(_SEVERAL_ENDS)
    if isinstance(found, GGUFArray) and found.values is not None:
        return found.values
    return () if found is None else (found,)


def end_token_ids(keys: HeaderKeys, tokenizer: Any) -> list[int]:
    """Ids of the tokens that end an answer, `eos_token_id` first.

    Tokens that are known by their text become special tokens, as in llama.cpp.
    """
    named = [keys.count(key, low=0) for key in _END_KEYS]
    for name in ("bos", "unknown", "padding"):
        keys.count(f"tokenizer.ggml.{name}_token_id", low=0)
    by_text = _ends_by_text(tokenizer.get_vocab())
    special = {*tokenizer.all_special_ids}
    plain = [text for text, token in by_text.items() if token not in special]
    if plain:
        from tokenizers import AddedToken

        added: list[Any] = [AddedToken(text, special=True, normalized=False) for text in plain]
        tokenizer.add_tokens(added, special_tokens=True)
    ids: list[Any] = [*named, *_several_ends(keys), *by_text.values()]
    if named[0] is None:
        ids.insert(0, tokenizer.eos_token_id)
    return list(dict.fromkeys(token for token in ids if token is not None))


def _ends_by_text(vocabulary: Mapping[str, int]) -> dict[str, int]:
    """Ids of the tokens that end an answer, by their entries in the vocabulary."""
    spelled = {text: _spelled(text, vocabulary) for text in _ENDS + _FILL_IN_ENDS}
    found = {token: vocabulary[token] for token in spelled.values() if token in vocabulary}
    if found.keys() >= {"<|call|>", "<|return|>"} or found.keys() >= {"<|calls|>", "<|flush|>"}:
        found.pop("<|end|>", None)  # ends a message, after which others of the answer follow
    if "<|tool_response>" in found:
        found.pop("</s>", None)  # Gemma 4's is no end
    return found


def _spelled(text: str, vocabulary: Mapping[str, int]) -> str:
    """The entry for a text; vocabularies of bytes have a letter for each byte."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    if text in vocabulary or text.isascii():
        return text
    table: Any = bytes_to_unicode
    letters: dict[int, str] = table()
    return "".join(letters[byte] for byte in text.encode())


def complete_tokenizer(keys: HeaderKeys, tokenizer: Any) -> None:
    """Apply the file's settings to a tokenizer of transformers, with llama.cpp's defaults.

    Raises `ModelLoadError` for settings of the tokenizer that are not supported.
    """
    model = keys.text("tokenizer.ggml.model")
    split = keys.text("tokenizer.ggml.pre")
    for key in ("tokens", "merges", "scores", "token_type", "precompiled_charsmap"):
        keys.raw(f"tokenizer.ggml.{key}")  # transformers builds the tokenizer of them
    keys.text("tokenizer.chat_template")
    _set_first_and_last(keys, tokenizer, model, split)
    _set_split(keys, tokenizer, model, split)
    _set_prefix(keys, tokenizer, model)
    keys.expect("tokenizer.ggml.remove_extra_whitespaces", (False,), "is not supported")
    keys.expect("tokenizer.ggml.add_sep_token", (False,), "is not supported")
    for name in ("lowercase", "strip_accents"):
        keys.expect(f"tokenizer.ggml.normalizer.{name}", (False,), "is not supported")
    suppressed = keys.raw("tokenizer.ggml.suppress_tokens")
    if isinstance(suppressed, GGUFArray) and suppressed.length:
        raise keys.refusal("tokenizer.ggml.suppress_tokens", "is not supported")


def _set_first_and_last(
    keys: HeaderKeys, tokenizer: Any, model: str | None, split: str | None
) -> None:
    """Set BOS and EOS, and whether prompts begin and end with them."""
    if model == "llama":  # llama.cpp's defaults
        tokenizer.bos_token = tokenizer.bos_token or tokenizer.convert_ids_to_tokens(1)
        tokenizer.eos_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(2)
    first = keys.flag("tokenizer.ggml.add_bos_token")
    last = keys.flag("tokenizer.ggml.add_eos_token")
    if first is None:
        first = model == "llama" or (model == "gpt2" and split in _STARTS_WITH_BOS)
    elif model == "gemma4":
        first = False  # as transformers: templates begin with it
    tokenizer.add_bos_token, tokenizer.add_eos_token = first, bool(last)


def _set_split(keys: HeaderKeys, tokenizer: Any, model: str | None, split: str | None) -> None:
    """Set the pre-tokenizer that the file names; without a name, the family's stays."""
    from tokenizers import Regex, pre_tokenizers

    if model != "gpt2" or split in (None, "default"):
        return
    first: list[Any] = []
    has_regex = split in _GPT2_SPLITS or split in _DIGIT_SPLITS
    if split in _DIGIT_SPLITS:
        first = [pre_tokenizers.Digits(individual_digits=True)]
    elif not has_regex:
        known, split = _splits(), _SAME_SPLITS.get(split, split)
        if split not in known:
            raise keys.refusal(
                "tokenizer.ggml.pre",
                f"names a pre-tokenizer that transformers {version('transformers')} does not have",
            )
        first = [pre_tokenizers.Split(Regex(known[split]), behavior="isolated")]
    last: Any = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=has_regex)
    backend: Any = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence([*first, last])
    backend.model.ignore_merges = split in _WHOLE_WORDS


def _splits() -> Mapping[str, str]:
    """transformers' regular expressions for pre-tokenizers, by name."""
    try:
        from transformers.integrations.gguf import gguf_tokenizer_mapping as mapping
    except ImportError:  # older releases know those of some families
        from transformers.models.qwen2 import tokenization_qwen2

        return {"qwen2": tokenization_qwen2.PRETOKENIZE_REGEX}
    known: Mapping[str, str] = mapping.GGUF_PRE_TOKENIZER_SPLITS
    return known


def _set_prefix(keys: HeaderKeys, tokenizer: Any, model: str | None) -> None:
    """Set whether a space precedes the first word, in SentencePiece vocabularies."""
    from tokenizers import decoders, normalizers, pre_tokenizers

    has_prefix = keys.flag("tokenizer.ggml.add_space_prefix")
    if model != "llama" or has_prefix is None:
        return
    backend: Any = tokenizer.backend_tokenizer
    if type(backend.pre_tokenizer).__name__ == "Metaspace":
        scheme = "first" if has_prefix else "never"
        backend.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement=_SPACE, prepend_scheme=scheme, split=False
        )
    else:
        first: list[Any] = [normalizers.Prepend(_SPACE)] if has_prefix else []
        spaces: Any = normalizers.Replace(" ", _SPACE)
        backend.normalizer = normalizers.Sequence([*first, spaces])
    last: list[Any] = [decoders.Strip(content=" ", left=1)] if has_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    )
