"""The tokenizer of a GGUF file, by the keys of its header that begin with `tokenizer.`.

Vocabularies are of two kinds: bytes (`gpt2`), and words of SentencePiece (`llama`, `gemma4`).
Defaults are those of llama.cpp:
https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as RustTokenizer

from pyengine.models.gguf_file import GGUFFile
from pyengine.models.gguf_header import GGUFArray
from pyengine.models.gguf_keys import HeaderKeys
from pyengine.models.tokenizer.chat import Templates
from pyengine.models.tokenizer.ends import ends_by_text
from pyengine.models.tokenizer.gguf_splits import SPLITS
from pyengine.models.tokenizer.tokenizer import Tokenizer
from pyengine.models.tokenizer.word_merges import merges_of_words
from pyengine.models.tokenizer_growth import check_growth
from pyengine.models.transformers_calls import load_errors

_ENDS = tuple(f"{name}_token_id" for name in ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"))
_TOKENS, _MERGES = "tokenizer.ggml.tokens", "tokenizer.ggml.merges"
_NAMES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Special tokens, by the names of their keys."""
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
"""Types of tokens: for unknown text, of no text, and of text that is never split."""
_KINDS = ("gpt2", "llama", "gemma4")
_GEMMA = ("gemma", "gemma2", "gemma3", "gemma4")
_COMPOSED = (*("qwen2", "qwen2moe", "qwen3", "qwen3moe"), "qwen35")
"""Architectures and pre-tokenizers whose text is composed (NFC), as in Qwen's tokenizer.json."""
_SPACE = "\u2581"
_STRIPPING = ("phi-3", "phi3")
"""Models by `general.name` whose special tokens take the spaces after them, as in llama.cpp."""
_KEEP_SPACES = ("<unk>", "<s>", "<|endoftext|>")
"""Special tokens of these models that do not."""


class GGUFTokens(NamedTuple):
    """A tokenizer, and the ids of the tokens that end an answer, `eos_token_id` first."""

    tokenizer: Tokenizer
    end_token_ids: tuple[int, ...]


def tokenizer_of_gguf(file: GGUFFile) -> GGUFTokens:
    """The tokenizer of an open file, by its header.

    Raises `ModelLoadError` for keys of the tokenizer that are not supported, by name.
    """
    vocabulary = _Vocabulary(file)
    with load_errors(f"{file.path}: the tokens of its header make no tokenizer"):
        backend = _byte_level(vocabulary) if vocabulary.kind == "gpt2" else _words(vocabulary)
    ends = ends_by_text(vocabulary.ids)
    special = vocabulary.special_tokens
    extra = [*vocabulary.texts_of_type(_CONTROL), *ends]
    _add_tokens(backend, vocabulary, {*special.values(), *extra})
    _set_first_and_last(backend, vocabulary)
    named = [vocabulary.token_id(name) for name in _ENDS]
    if named[0] is None and "eos_token" in special:
        named[0] = vocabulary.ids[special["eos_token"]]
    ids = [*named, *vocabulary.several_ends(), *ends.values()]
    tokenizer = Tokenizer(
        backend, special, extra_special_tokens=extra, chat_template=vocabulary.templates()
    )
    vocabulary.keys.refuse_unread()
    check_growth(tokenizer)
    return GGUFTokens(tokenizer, tuple(dict.fromkeys(end for end in ids if end is not None)))


class _Vocabulary:
    """The tokens of a file, and what its header says about them."""

    def __init__(self, file: GGUFFile) -> None:
        self.file, self.architecture = file, file.header.architecture
        self.keys = keys = HeaderKeys(file.path, file.header)
        for key in file.header.values:
            if not key.startswith("tokenizer."):
                keys.raw(key)  # read with the model
        self.kind = keys.text("tokenizer.ggml.model")
        if self.kind not in _KINDS:
            raise keys.refusal(
                "tokenizer.ggml.model", f"is none of {', '.join(_KINDS)}, which can be read"
            )
        self.split_name = keys.text("tokenizer.ggml.pre")
        self.is_gemma = self.kind == "gemma4" or self.architecture in _GEMMA
        self._spaces: set[str] = set()
        self.texts = self._texts()
        self.ids = {text: number for number, text in enumerate(self.texts)}
        if len(self.ids) < len(self.texts):
            twice = next(text for at, text in enumerate(self.texts) if self.ids[text] != at)
            raise keys.refusal(_TOKENS, f"has the token {twice!r} twice")
        self._types = self.numbers("token_type", "iu")
        self._check_ids(HeaderKeys(file.path, file.header))
        self.special_tokens = self._special_tokens()
        self._refuse_unsupported()

    def _texts(self) -> list[str]:
        """The texts of all tokens; those without one get names, as in llama.cpp."""
        array = self.keys.raw(_TOKENS)
        if not isinstance(array, GGUFArray) or not array.is_of_strings or not array.length:
            raise self.keys.refusal(_TOKENS, "is not an array of strings")
        texts = self.file.texts(array)
        for number, text in enumerate(texts):
            if not text:
                texts[number] = f"[EMPTY_{number}]"
        if self.is_gemma and self.kind == "llama":  # tokens of spaces only are written as such
            spaces = {number: text for number, text in enumerate(texts) if not text.strip(" ")}
            marks = {_SPACE * len(text) for text in spaces.values()}
            self._spaces = marks.difference(texts)
            for number, text in spaces.items():
                if (mark := _SPACE * len(text)) in self._spaces:
                    texts[number] = mark
        return texts

    def numbers(self, name: str, kinds: str) -> Any:
        """An array of a number for each token, of NumPy's `kinds`; None if it is missing."""
        key = f"tokenizer.ggml.{name}"
        array = self.keys.raw(key)
        if array is None:
            return None
        is_array = isinstance(array, GGUFArray) and array.length >= len(self.texts)
        if not is_array or array.dtype is None or array.dtype.kind not in kinds:
            raise self.keys.refusal(key, f"has not one number for each of {len(self.texts)} tokens")
        return self.file.numbers(array)[: len(self.texts)]

    def _check_ids(self, keys: HeaderKeys) -> None:
        """Raise for ids beyond the vocabulary, also of keys without an effect."""
        for key in keys.header.values:
            if key.startswith("tokenizer.ggml.") and key.endswith("_token_id"):
                keys.count(key, low=0, high=len(self.texts) - 1)

    def _refuse_unsupported(self) -> None:
        for name in ("remove_extra_whitespaces", "add_sep_token"):
            self.keys.expect(f"tokenizer.ggml.{name}", (False,), "is not supported")
        for name in ("lowercase", "strip_accents"):
            self.keys.expect(f"tokenizer.ggml.normalizer.{name}", (False,), "is not supported")
        suppressed = self.keys.raw("tokenizer.ggml.suppress_tokens")
        is_empty = isinstance(suppressed, GGUFArray) and not suppressed.length
        if suppressed is not None and not is_empty:
            raise self.keys.refusal("tokenizer.ggml.suppress_tokens", "is not supported")

    def token_id(self, name: str) -> int | None:
        """The id that a key names."""
        return self.keys.count(f"tokenizer.ggml.{name}", low=0)

    def several_ends(self) -> Sequence[int]:
        """The ids in `eos_token_ids`, a key of some programs."""
        key, last = "tokenizer.ggml.eos_token_ids", len(self.texts) - 1
        value = self.keys.raw(key)
        if value is None:
            return ()
        ids = value.values if isinstance(value, GGUFArray) else (value,)
        if ids is None or any(type(token) is not int or not 0 <= token <= last for token in ids):
            raise self.keys.refusal(key, f"has ids that are not in the range from 0 to {last}")
        return ids

    def _special_tokens(self) -> dict[str, str]:
        """The texts of special tokens by name, such as `bos_token`."""
        ids = {name: self.token_id(f"{key}_token_id") for name, key in _NAMES.items()}
        if self.kind == "llama":  # llama.cpp's defaults
            is_unknown = self._types is not None and self._types[0] == _UNKNOWN
            defaults = {"bos": 1, "eos": 2, **({"unk": 0} if is_unknown else {})}
            for name, default in defaults.items():
                if ids[name] is None and default < len(self.texts):
                    ids[name] = default
        return {f"{name}_token": self.texts[at] for name, at in ids.items() if at is not None}

    def texts_of_type(self, kind: int) -> list[str]:
        """The texts of all tokens of a type."""
        if self._types is None:
            return []
        texts = [self.texts[at] for at in np.flatnonzero(self._types == kind)]
        return [text for text in texts if text not in self._spaces]

    def strips_spaces(self, text: str) -> bool:
        """True if the spaces after this special token belong to it."""
        name = str(self.file.header.values.get("general.name")).lower()
        return text not in _KEEP_SPACES and any(part in name for part in _STRIPPING)

    def merges(self) -> list[tuple[str, str]] | None:
        """The pairs of tokens that are merged, the first ones first; None if none are listed."""
        array = self.keys.raw(_MERGES)
        if array is None:
            return None
        if not isinstance(array, GGUFArray) or not array.is_of_strings:
            raise self.keys.refusal(_MERGES, "is not an array of strings")
        pairs = []
        for merge in self.file.texts(array):
            at = merge.find(" ", 1)
            if at < 0:
                raise self.keys.refusal(_MERGES, f"has {merge[:80]!r}, which is not a pair")
            pairs.append((merge[:at], merge[at + 1 :]))
        return pairs

    def templates(self) -> Templates:
        """The chat template; several have names."""
        names = self.keys.raw("tokenizer.chat_templates")
        if names is not None and not (isinstance(names, GGUFArray) and names.is_of_strings):
            raise self.keys.refusal("tokenizer.chat_templates", "is not an array of strings")
        templates = {"default": self.keys.text("tokenizer.chat_template")}
        for key in self.file.header.values:
            if key.startswith("tokenizer.chat_template."):
                templates[key.removeprefix("tokenizer.chat_template.")] = self.keys.text(key)
        named = {name: text for name, text in templates.items() if text is not None}
        return named.get("default") if named.keys() <= {"default"} else named


def _byte_level(vocabulary: _Vocabulary) -> RustTokenizer:
    """A vocabulary of bytes, as GPT-2's: each byte is written as a letter."""
    keys = vocabulary.keys
    split = SPLITS.get(vocabulary.split_name or "default")
    if split is None:
        raise keys.refusal("tokenizer.ggml.pre", "names a pre-tokenizer that is not known here")
    for name in ("add_space_prefix", "scores"):
        keys.raw(f"tokenizer.ggml.{name}")  # for vocabularies of words
    merges = vocabulary.merges()
    if merges is None:
        raise keys.refusal(_MERGES, "is missing, and a vocabulary of bytes needs it")
    model = models.BPE(vocabulary.ids, merges, ignore_merges=split.has_whole_words)
    backend = RustTokenizer(model)
    if vocabulary.architecture in _COMPOSED or vocabulary.split_name in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    splitters: list[Any] = [
        pre_tokenizers.Digits(individual_digits=True)
        if expression == r"\p{N}"
        else pre_tokenizers.Split(Regex(expression), behavior="isolated")
        for expression in split.expressions
    ]
    last: Any = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.is_gpt2)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splitters, last])
    backend.decoder = decoders.ByteLevel()
    return backend


def _words(vocabulary: _Vocabulary) -> RustTokenizer:
    """A vocabulary of SentencePiece's words, with bytes for what it lacks.

    A mark takes the place of each space, and precedes the first word where the file says so.
    """
    is_gemma, keys = vocabulary.is_gemma, vocabulary.keys
    has_prefix = keys.flag("tokenizer.ggml.add_space_prefix")
    if has_prefix is None:
        has_prefix = not is_gemma
    scores = vocabulary.numbers("scores", "fi")
    merges = vocabulary.merges()
    if merges is None:
        # The order of Gemma's tokens is that of its merges; its scores are not.
        merges = merges_of_words(vocabulary.texts, None if is_gemma else scores)
    unknown = vocabulary.special_tokens.get("unk_token")
    model = models.BPE(vocabulary.ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = RustTokenizer(model)
    if is_gemma or vocabulary.architecture == "phi3":  # as their tokenizer.json
        first: list[Any] = [normalizers.Prepend(_SPACE)] if has_prefix else []
        spaces: Any = normalizers.Replace(" ", _SPACE)
        backend.normalizer = normalizers.Sequence([*first, spaces])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement=_SPACE, prepend_scheme="first" if has_prefix else "never", split=False
        )
    last: list[Any] = [decoders.Strip(content=" ", left=1)] if has_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    )
    return backend


def _add_tokens(backend: RustTokenizer, vocabulary: _Vocabulary, special: set[str]) -> None:
    """Add the tokens that are found in a text before it is split.

    Tokens that end an answer are special, whatever the file says, as in llama.cpp.
    """
    added: list[Any] = [
        AddedToken(text, special=True, normalized=False, rstrip=vocabulary.strips_spaces(text))
        for text in sorted(special, key=vocabulary.ids.__getitem__)
    ]
    backend.add_special_tokens(added)
    whole = [text for text in vocabulary.texts_of_type(_USER_DEFINED) if text not in special]
    plain: list[Any] = [AddedToken(text, special=False, normalized=False) for text in whole]
    backend.add_tokens(plain)


def _set_first_and_last(backend: RustTokenizer, vocabulary: _Vocabulary) -> None:
    """Set whether prompts begin with BOS and end with EOS."""
    keys, split = vocabulary.keys, SPLITS.get(vocabulary.split_name or "")
    first, last = (keys.flag(f"tokenizer.ggml.add_{name}_token") for name in ("bos", "eos"))
    for name, is_added in (("bos", first), ("eos", last)):
        if is_added and f"{name}_token" not in vocabulary.special_tokens:
            raise keys.refusal(
                f"tokenizer.ggml.add_{name}_token", f"needs tokenizer.ggml.{name}_token_id"
            )
    if first is None and vocabulary.kind == "gpt2":
        first = split is not None and split.starts_with_bos
    elif first is None:
        first = vocabulary.kind == "llama"
    if vocabulary.kind == "gemma4":
        first = False  # as in transformers: templates begin with it
    bos = vocabulary.special_tokens.get("bos_token") if first else None
    eos = vocabulary.special_tokens.get("eos_token") if last else None
    if bos is None and eos is None:
        return
    single = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    backend.post_processor = processors.TemplateProcessing(
        single=single,
        pair=[*single, *([bos] if bos else []), "$B", *([eos] if eos else [])],
        special_tokens=[(text, vocabulary.ids[text]) for text in {bos, eos} if text],
    )
