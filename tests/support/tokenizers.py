"""Small tokenizers of the kinds that models have, created for the tests."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from pyengine.models.tokenizer import Tokenizer as EngineTokenizer

CORPUS = [
    "The capital of France is Paris. The capital of Japan is Tokyo.",
    "日本語のテキストは、空白なしで書かれます。東京は日本の首都です。",
    "Emoji: 😀 😃 👩‍👩‍👧‍👦 🏳️‍🌈 and combining marks: e\u0301 a\u0308 n\u0303.",
    "Ärger, Öl, Übermut, straße; Привет, мир; مرحبا بالعالم",
]


class Decoder:
    """The part of a Hugging Face tokenizer that is used, and how much it was used."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.num_decoded = 0

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(
        self,
        token_ids: list[int],
        *,
        skip_special_tokens: bool = True,
        clean_up_tokenization_spaces: bool = False,
    ) -> str:
        assert not clean_up_tokenization_spaces
        self.num_decoded += len(token_ids)
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)


def byte_level(vocab_size: int) -> Decoder:
    """A tokenizer of the GPT-2 kind: tokens are bytes and merges of them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return Decoder(tokenizer)


def save_byte_level(folder: Path, vocab_size: int) -> None:
    """Put such a tokenizer into a model's folder."""
    save_tokenizer(folder, wrapped(byte_level(vocab_size).tokenizer, eos_token="<|end|>"))


def save_words(folder: Path) -> None:
    """Put a tokenizer of five words into a model's folder; <end> ends a text."""
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, "<end>": 3, "hello": 4}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    save_tokenizer(folder, wrapped(tokenizer, eos_token="<end>"))


def wrapped(tokenizer: Tokenizer, **special_tokens: str) -> EngineTokenizer:
    """The engine's tokenizer of a new one of the library.

    As the engine's loader does, it adds the special tokens that are not in the vocabulary.
    """
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True) for text in dict.fromkeys(special_tokens.values())]
    )
    return EngineTokenizer(tokenizer, special_tokens)


def save_tokenizer(folder: Path, tokenizer: EngineTokenizer) -> None:
    """Write the files of a tokenizer and its chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {**tokenizer.special_tokens_map}
    if isinstance(tokenizer.chat_template, str):
        (folder / "chat_template.jinja").write_text(tokenizer.chat_template, encoding="utf-8")
    elif tokenizer.chat_template is not None:
        named = tokenizer.chat_template.items()
        settings["chat_template"] = [{"name": name, "template": text} for name, text in named]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def byte_fallback() -> Decoder:
    """A tokenizer of the Llama-2 kind: words with a leading mark, unknown characters as bytes."""
    words = ["▁", "▁The", "▁capital", "▁of", "s", ".", ",", "▁Paris"]
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return Decoder(tokenizer)


def metaspace() -> Decoder:
    """A trained tokenizer of the Mistral kind: merges, and bytes for unknown characters.

    The mark of a space at the beginning of a text is dropped.
    """
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False)
    trained.train_from_iterator(CORPUS[:1], trainer)
    learnt = json.loads(trained.to_str())["model"]
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *learnt["vocab"]]
    tokenizer = Tokenizer(
        models.BPE(
            {piece: index for index, piece in enumerate(pieces)},
            [(left, right) for left, right in learnt["merges"]],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    tokenizer.pre_tokenizer = trained.pre_tokenizer
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return Decoder(tokenizer)


class Fast:
    """A tokenizer as transformers makes them on top of the tokenizers library."""

    def __init__(self, decoder: Decoder) -> None:
        self.backend_tokenizer = decoder.tokenizer

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        ids: list[int] = self.backend_tokenizer.encode(
            text, add_special_tokens=add_special_tokens
        ).ids
        return ids

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self.backend_tokenizer.decode(
            token_ids, skip_special_tokens=skip_special_tokens
        )
        return text


def characters() -> EngineTokenizer:
    """A tokenizer of the engine with a token for each character of ASCII: 97 of them.

    Token 2 ends a text.
    """
    pieces = ["Ġ", "Ċ", "<|end|>", *map(chr, range(33, 127))]
    tokenizer = Tokenizer(models.BPE({piece: at for at, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return wrapped(tokenizer, eos_token="<|end|>")
