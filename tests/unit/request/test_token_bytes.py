"""Bytes of single tokens: those of all tokens of a text are the text, whatever the tokenizer."""

import gc
from random import Random
from typing import Any
from weakref import ref

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from pyengine.request.token_bytes import TokenTexts, token_texts
from tests.support import tokenizers
from tests.support.chat import of_transformers
from tests.support.tokenizers import wrapped

TEXTS = [
    "The capital of Japan is 東京, of Poland Łódź.",
    "😀 👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301",
    "  two  spaces\n\n\tand lines ",
    "Привет, мир; مرحبا بالعالم",
    "\N{REPLACEMENT CHARACTER} as itself",
]


def deepseek() -> Any:
    """Byte-level within a sequence, with added tokens of other characters."""
    tokenizer = tokenizers.byte_level(400).tokenizer
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken("<end▁of▁text>", special=True)])
    tokenizer.add_tokens([AddedToken("an added one", special=False)])
    return wrapped(tokenizer)


KINDS: dict[str, Any] = {
    "byte-level": lambda: wrapped(tokenizers.byte_level(300).tokenizer),
    "byte-level, merges": lambda: wrapped(tokenizers.byte_level(600).tokenizer),
    "a sequence": deepseek,
    "byte fallback": lambda: wrapped(tokenizers.byte_fallback().tokenizer),
    "metaspace": lambda: wrapped(tokenizers.metaspace().tokenizer),
    "byte-level of transformers": lambda: of_transformers(
        wrapped(tokenizers.byte_level(300).tokenizer)
    ),
}


def joined(tokenizer: Any, ids: list[int]) -> bytes:
    texts = token_texts(tokenizer, skip_special_tokens=False)
    return b"".join(texts(token)[1] for token in ids)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_all_tokens_are_the_text(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]()
    ids = tokenizer.encode(text, add_special_tokens=False)
    decoded = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    found = joined(tokenizer, ids).decode()
    if kind in ("byte fallback", "metaspace"):  # they drop a space at the beginning
        assert found in (decoded, " " + decoded)
    else:
        assert found == decoded
    if kind.startswith(("byte-level", "a sequence")):
        assert joined(tokenizer, ids) == text.encode()


@pytest.mark.parametrize(
    "kind", ["byte-level", "byte-level, merges", "a sequence", "byte-level of transformers"]
)
def test_so_are_those_of_any_tokens(kind: str) -> None:
    """Tokenizers with byte fallback lose whole runs of bytes that are no text."""
    tokenizer, random = KINDS[kind](), Random(3)
    for _ in range(200):
        ids = [random.randrange(len(tokenizer)) for _ in range(12)]
        decoded = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        assert joined(tokenizer, ids).decode(errors="replace") == decoded


def test_parts_of_a_character_have_their_own_bytes() -> None:
    tokenizer = KINDS["byte-level"]()
    ids = tokenizer.encode("😀", add_special_tokens=False)
    assert len(ids) > 1
    texts = TokenTexts(tokenizer, skip_special_tokens=True)
    assert b"".join(texts(token)[1] for token in ids) == "😀".encode()
    assert {texts(token)[0] for token in ids} == {"\N{REPLACEMENT CHARACTER}"}
    byte = KINDS["byte fallback"]()
    texts = TokenTexts(byte, skip_special_tokens=True)
    assert texts(byte.convert_tokens_to_ids("<0xE6>")) == ("\N{REPLACEMENT CHARACTER}", b"\xe6")
    assert texts(byte.convert_tokens_to_ids("▁Paris")) == (" Paris", b" Paris")


def test_special_tokens_that_the_text_omits_have_no_bytes() -> None:
    tokenizer = tokenizers.characters()
    assert TokenTexts(tokenizer, skip_special_tokens=True)(2) == ("<|end|>", b"")
    assert TokenTexts(tokenizer, skip_special_tokens=False)(2) == ("<|end|>", b"<|end|>")
    assert TokenTexts(tokenizer, skip_special_tokens=True)(5_000) == ("", b"")


def word_piece() -> Any:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "play": 1, "##ing": 2}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return wrapped(tokenizer)


class NotOfTheLibrary:
    def decode(self, ids: list[int]) -> str:
        return "".join(f"<{token}>" for token in ids)


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [(word_piece(), ("play", b"play")), (NotOfTheLibrary(), ("<1>", b"<1>"))],
    ids=["word pieces", "another library"],
)
def test_other_tokenizers_have_the_bytes_of_their_texts(tokenizer: Any, expected: Any) -> None:
    assert TokenTexts(tokenizer, skip_special_tokens=True)(1) == expected


def test_a_tokenizer_is_not_kept() -> None:
    tokenizer = KINDS["byte-level"]()
    assert token_texts(tokenizer, skip_special_tokens=True)(5)
    same = token_texts(tokenizer, skip_special_tokens=True)
    assert same is token_texts(tokenizer, skip_special_tokens=True)
    gone = ref(tokenizer)
    del tokenizer, same
    gc.collect()
    assert gone() is None
