"""Tokenizers of every kind, trained for the tests, and texts that tell them apart."""

from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from tests.support.tokenizers import CORPUS

TEXTS = [
    "",
    " ",
    "Hello, world! It's 2026.",
    "  two  spaces \n\n\tand tabs  ",
    "The capital of France is Paris .",
    "日本語 東京 ÄÖÜ e\u0301 😀👩‍👩‍👧‍👦",
    "a<|end|>b <|end|> c<|odd|>d <|odd|> e",
    " <|plain|>x <|plain|> y<unk></s><s>",
    "word wordy WORD don't we're she'll 1234567",
    "\u2581marked \u2581\u2581 text\u0000\ufffd",
]


def _byte_level(split: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, plain]) if split else plain
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _qwen() -> Tokenizer:
    words = r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+"
    tokenizer = _byte_level(pre_tokenizers.Split(Regex(words), behavior="isolated"))
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _with_bos() -> Tokenizer:
    tokenizer = _byte_level()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    ids = {name: tokenizer.token_to_id(name) for name in ("<s>", "</s>")}
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A <s> $B", special_tokens=[*ids.items()]
    )
    return tokenizer


def _words() -> Tokenizer:
    """Of the kind that Llama 2 has."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    spaces = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(
        [
            *(decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=special, max_token_length=8, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["<unk>", "[CLS]", "[SEP]"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return tokenizer


def _word_level() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


KINDS = {
    "byte level": _byte_level,
    "qwen": _qwen,
    "with bos": _with_bos,
    "words": _words,
    "unigram": _unigram,
    "word piece": _word_piece,
    "word level": _word_level,
}

ODD = [
    AddedToken("<|odd|>", lstrip=True, rstrip=True, special=True),
    AddedToken("<|plain|>", special=False, normalized=False),
    AddedToken("word", single_word=True, normalized=True),
    AddedToken("東京", rstrip=True, normalized=False),
    AddedToken("France", lstrip=True, normalized=True),
]
"""Added tokens with every setting."""
