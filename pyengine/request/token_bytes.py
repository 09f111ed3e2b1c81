"""The bytes of single tokens, which may be parts of characters."""

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary, ref

from pyengine.request.detokenizer import rust_tokenizer, text_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

TokenText: TypeAlias = tuple[str, bytes]
"""The text of a token, with U+FFFD for parts of characters, and its bytes in texts."""

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MAX_KNOWN = 1 << 16
_WITHOUT_EFFECT = ("Fuse", "Strip")
"""Decoders that change only the beginning or the end of a text, or nothing."""


def _byte_level() -> dict[str, int]:
    """The byte of each character of GPT-2's tokenizer."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    shifted = {chr(256 + index): byte for index, byte in enumerate(others)}
    return {**{chr(byte): byte for byte in plain}, **shifted}


_BYTE_LEVEL = _byte_level()


class TokenTexts:
    """The text and the bytes of each token of a tokenizer. Thread-safe.

    The bytes of an answer's tokens add up to its text. They are exact for tokenizers of GPT-2's
    kind (bytes) and of SentencePiece's (words, and single bytes). For others they are those of
    the token's own text.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool) -> None:
        """With `skip_special_tokens`, special tokens have no bytes: the text omits them."""
        self._backend = rust_tokenizer(tokenizer)
        self._decode = None if self._backend is None else _decode_by(self._backend)
        self._tokenizer = ref(tokenizer)
        special = getattr(tokenizer, "all_special_ids", ()) if skip_special_tokens else ()
        self._skipped = frozenset(special)
        self._known: dict[int, TokenText] = {}

    def __call__(self, token: int) -> TokenText:
        """The text and the bytes of a token; empty for ids that the tokenizer does not have."""
        known = self._known.get(token)
        if known is None:
            known = self._find(token)
            if len(self._known) >= _MAX_KNOWN:
                self._known = {}
            self._known[token] = known
        return known

    def _find(self, token: int) -> TokenText:
        if self._decode is None or self._backend is None:
            text = text_of(self._tokenizer(), token)
            data = text.encode(errors="replace")
        else:
            data = self._decode(self._backend.id_to_token(token) or "")
            text = data.decode(errors="replace")
        return text, b"" if token in self._skipped else data


_texts: "WeakKeyDictionary[Any, dict[bool, TokenTexts]]" = WeakKeyDictionary()


def token_texts(tokenizer: Any, *, skip_special_tokens: bool) -> TokenTexts:
    """The texts of a tokenizer's tokens, the same object for the same tokenizer."""
    several = _texts.setdefault(tokenizer, {})
    texts = several.get(skip_special_tokens)
    if texts is None:
        texts = TokenTexts(tokenizer, skip_special_tokens=skip_special_tokens)
        several[skip_special_tokens] = texts
    return texts


def _decode_by(backend: "RustTokenizer") -> Callable[[str], bytes] | None:
    """How the tokenizer's decoder turns a token into bytes.

    None for decoders whose tokens are no byte strings, such as WordPiece's.
    """
    if backend.decoder is None:
        return None
    pending = [json.loads(backend.decoder.__getstate__())]
    has_bytes = is_byte_level = False
    replaced: list[tuple[str, str]] = []
    while pending:
        step = pending.pop()
        match step:
            case {"type": "Sequence", "decoders": list(steps)}:
                pending += reversed(steps)
            case {"type": "ByteLevel"}:
                is_byte_level = True
            case {"type": "ByteFallback"}:
                has_bytes = True
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                replaced.append((old, new))
            case {"type": "Metaspace", "replacement": str(old)}:
                replaced.append((old, " "))
            case {"type": kind} if kind in _WITHOUT_EFFECT:
                pass
            case _:
                return None
    if is_byte_level:
        return None if has_bytes or replaced else _decode_byte_level

    def decode(token: str) -> bytes:
        byte = _BYTE.fullmatch(token) if has_bytes else None
        if byte is not None:
            return bytes([int(byte[1], 16)])
        for old, new in replaced:
            token = token.replace(old, new)
        return token.encode(errors="replace")

    return decode if has_bytes or replaced else None


def _decode_byte_level(token: str) -> bytes:
    """The bytes of a token; an added token with other characters is text."""
    values = [_BYTE_LEVEL.get(character, -1) for character in token]
    return token.encode(errors="replace") if -1 in values else bytes(values)
