"""Tokenizers of GGUF files: their tokens are those of transformers' reader of such files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from pyengine.errors import ModelLoadError
from pyengine.models.gguf_file import GGUFFile
from pyengine.models.source import embedded_gguf
from pyengine.models.tokenizer import GGUFTokens, tokenizer_of_gguf
from pyengine.models.tokenizer.gguf_splits import SPLITS
from pyengine.models.tokenizer.word_merges import merges_of_words
from tests.unit.models.tokenizer.gguf_files import (
    CONTROL,
    NORMAL,
    USER_DEFINED,
    byte_level_values,
    words_values,
    write_vocabulary,
)
from tests.unit.models.tokenizer.kinds import KINDS, TEXTS

MESSAGES = [{"role": "user", "content": "Hello 東京"}]
MORE = [
    "a 1234!!   b\n\n c's C'S don't ÄöÜaB ab12cd\r\n\t x...y (z) -- 日本語テキスト",
    "<|im_start|>user\nhi<|im_end|>\n<think> x </think>y <|im_end|>",
    "   leading, trailing   ",
]
ADDED = {"<|im_start|>": CONTROL, "<|im_end|>": CONTROL, "<think>": USER_DEFINED}
ADDED["<|endoftext|>"] = CONTROL  # transformers' class adds it


def opened(path: Path) -> GGUFTokens:
    with GGUFFile.open(path) as file:
        return tokenizer_of_gguf(file)


def of_transformers(path: Path) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name)


def check_equal(path: Path, texts: list[str] | None = None) -> GGUFTokens:
    tokens, theirs = opened(path), of_transformers(path)
    ours = tokens.tokenizer
    assert ours.get_vocab() == theirs.get_vocab()
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        assert getattr(ours, name) == getattr(theirs, name), name
        assert getattr(ours, f"{name}_id") == getattr(theirs, f"{name}_id")
    for text in texts or [*TEXTS, *MORE]:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special), text
            for skipped in (True, False):
                kept = {"skip_special_tokens": skipped}
                assert ours.decode(ids, **kept) == theirs.decode(ids, **kept)
    assert ours.chat_template == theirs.chat_template
    return tokens


def test_the_embedded_model() -> None:
    tokens = check_equal(embedded_gguf())
    ours, theirs = tokens.tokenizer, of_transformers(embedded_gguf())
    assert tokens.end_token_ids == (2, 0, 4)  # <|im_end|>, <|endoftext|>, <reponame>
    for prompt in (True, False):
        kept = {"tokenize": False, "add_generation_prompt": prompt}
        assert ours.apply_chat_template(MESSAGES, **kept) == theirs.apply_chat_template(
            MESSAGES, **kept
        )


OF_TRANSFORMERS = (
    *("gpt-2", "llama-bpe", "falcon3", "dbrx", "smaug-bpe", "tekken", "qwen2", "qwen35"),
    *("deepseek-r1-qwen", "gpt-4o", "llama4", "minimax-m2", "pixtral", None, "default"),
)


@pytest.mark.parametrize("split", OF_TRANSFORMERS)
def test_vocabularies_of_bytes(split: str | None, tmp_path: Path) -> None:
    values = byte_level_values(KINDS["byte level"](), **ADDED)
    values |= {"pre": split, "add_bos_token": True, "add_eos_token": True}
    values["tokenizer.chat_template"] = "{{ messages[0].content }}"
    path = write_vocabulary(tmp_path / "tiny.gguf", values)
    # transformers composes characters for Qwen's class only, which it takes by the architecture.
    texts = [text for text in (*TEXTS, *MORE) if "e\u0301" not in text]
    if split in ("llama-bpe", "falcon3", "tekken", "pixtral"):
        return _check_whole_words(path, texts)
    ends = check_equal(path, texts).end_token_ids
    assert ends == (
        0,
        values["tokens"].index("<|im_end|>"),
        values["tokens"].index("<|endoftext|>"),
    )


def _check_whole_words(path: Path, texts: list[str]) -> None:
    """Words of the vocabulary are not merged, which transformers does not know."""
    ours, theirs = opened(path).tokenizer, of_transformers(path)
    theirs.backend_tokenizer.model.ignore_merges = True
    for text in texts:
        assert ours.encode(text) == theirs.encode(text)


@pytest.mark.parametrize("name", SPLITS)
def test_every_split_keeps_the_text(name: str, tmp_path: Path) -> None:
    values = byte_level_values(KINDS["byte level"](), **ADDED) | {"pre": name}
    ours = opened(write_vocabulary(tmp_path / "tiny.gguf", values)).tokenizer
    for text in [*TEXTS, *MORE]:
        composed = "e\u0301" in text and name in ("qwen2", "qwen35")
        assert composed or ours.decode(ours.encode(text, add_special_tokens=False)) == text
    assert not composed


SPLIT_WORDS = {
    "gpt-2": ["a", "\u01201234", "!!", "\u0120\u0120", "\u0120b"],
    "smollm": ["a", "\u0120", "1", "2", "3", "4", "!!", "\u0120\u0120", "\u0120b"],
    "llama-bpe": ["a", "\u0120", "123", "4", "!!", "\u0120\u0120", "\u0120b"],
    "stablelm2": ["a", "\u0120", "1", "2", "3", "4", "!!", "\u0120\u0120", "\u0120b"],
    "deepseek-v3": ["a", "\u0120", "123", "4", "!!", "\u0120\u0120", "\u0120b"],
    "deepseek-coder": ["a", "\u0120", "1", "2", "3", "4", "!!", "\u0120\u0120", "\u0120b"],
    "falcon": ["a", "\u0120", "123", "4", "!!", "\u0120\u0120", "\u0120b"],
    "bloom": ["a", "\u01201234", "!!\u0120\u0120", "\u0120b"],
    "viking": ["a", "\u0120", "1", "2", "3", "4", "!!\u0120\u0120", "\u0120b"],
}


@pytest.mark.parametrize("name", SPLIT_WORDS)
def test_text_is_split_as_the_name_says(name: str, tmp_path: Path) -> None:
    values = byte_level_values(KINDS["byte level"]()) | {"pre": name}
    ours = opened(write_vocabulary(tmp_path / "tiny.gguf", values)).tokenizer
    splitter: Any = ours.backend_tokenizer.pre_tokenizer
    assert [word for word, _ in splitter.pre_tokenize_str("a 1234!!   b")] == SPLIT_WORDS[name]


@pytest.mark.parametrize("architecture", ["llama", "phi3", "gemma2", "gemma3", "mixtral"])
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"add_bos_token": False},
        {"add_eos_token": True},
        {"padding_token_id": 2, "eos_token_id": 3},
        {"has_merges": True},
    ],
)
def test_vocabularies_of_words(architecture: str, values: dict[str, Any], tmp_path: Path) -> None:
    known = {"<|im_end|>": CONTROL, "<think>": USER_DEFINED}
    if architecture in ("gemma2", "gemma3"):  # transformers' class adds them
        known |= dict.fromkeys(("<bos>", "<eos>", "<pad>", "<mask>"), CONTROL)
        known["  "] = NORMAL
    every = words_values(KINDS["words"](), **known) | values
    if every.pop("has_merges", False):
        every["merges"] = [" ".join(pair) for pair in merges_of_words(every["tokens"])]
    path = write_vocabulary(tmp_path / "tiny.gguf", every, architecture=architecture)
    if "  " in known and "merges" not in every:
        every["tokens"][every["tokens"].index("  ")] = "\u2581\u2581"
    check_equal(path)


def test_merges_of_words_are_those_of_transformers() -> None:
    from transformers.tokenization_utils_base import generate_merges

    texts = [text for text in KINDS["words"]().get_vocab() if not text.startswith("<")]
    scores_by_text = {text: -at for at, text in enumerate(texts)}
    vocabulary = {text: at for at, text in enumerate(texts)}
    assert merges_of_words(texts) == generate_merges(vocabulary, scores_by_text)
    for seed in range(3):
        scores = np.random.default_rng(seed).integers(-20, 0, len(texts)).astype(np.float32)
        known = dict(zip(texts, scores.tolist(), strict=True))
        assert merges_of_words(texts, scores) == generate_merges(vocabulary, known)


@pytest.mark.parametrize(
    ("general", "expected"),
    [({}, "a\n"), ({"general.name": "Phi-3 Mini"}, "a")],
)
def test_special_tokens_of_phi_3_take_the_spaces_after_them(
    general: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    values = words_values(KINDS["words"](), **{"<|user|>": CONTROL}) | general
    ours = opened(write_vocabulary(tmp_path / "t.gguf", values, architecture="phi3")).tokenizer
    ids = ours.encode("<|user|>\n<s> a", add_special_tokens=False)
    assert (ours.encode("\n", add_special_tokens=False)[-1] in ids) == (expected == "a\n")
    assert ours.decode(ids[-2:]).endswith("a")


def test_several_templates_have_names(tmp_path: Path) -> None:
    values = byte_level_values(KINDS["byte level"]()) | {
        "tokenizer.chat_template": "d",
        "tokenizer.chat_templates": ["rag", "tool_use"],
        "tokenizer.chat_template.rag": "r",
        "tokenizer.chat_template.tool_use": "t",
    }
    ours = opened(write_vocabulary(tmp_path / "tiny.gguf", values)).tokenizer
    assert ours.chat_template == {"default": "d", "rag": "r", "tool_use": "t"}
    said = [
        ours.apply_chat_template(MESSAGES, tokenize=False, **options)
        for options in ({}, {"tools": []}, {"chat_template": "rag"})
    ]
    assert said == ["d", "t", "r"]


def test_keys_without_an_effect_have_none(tmp_path: Path) -> None:
    values = byte_level_values(KINDS["byte level"](), **ADDED)
    plain = opened(write_vocabulary(tmp_path / "a.gguf", values))
    idle = {
        **{"add_space_prefix": True, "scores": [0.5] * len(values["tokens"])},
        **{"token_type_count": 2, "mask_token_id": 3, "fim_pre_token_id": 4},
        **{"remove_extra_whitespaces": False, "add_sep_token": False, "suppress_tokens": None},
        "precompiled_charsmap": [1, 2, 3],
        "tokenizer.huggingface.json": "{}",
    }
    other = opened(write_vocabulary(tmp_path / "b.gguf", values | idle))
    assert plain.end_token_ids == other.end_token_ids
    assert plain.tokenizer.backend_tokenizer.to_str() == other.tokenizer.backend_tokenizer.to_str()


def test_tokens_that_are_written_as_text_are_found_in_text(tmp_path: Path) -> None:
    """transformers spells them in letters of bytes, so text never has them."""
    end = "<\uff5cend\u2581of\u2581sentence\uff5c>"
    values = byte_level_values(KINDS["byte level"](), **{end: NORMAL, "東京 ": USER_DEFINED})
    tokenizer = opened(write_vocabulary(tmp_path / "a.gguf", values))
    ids = tokenizer.tokenizer.encode(f"東京 {end}")
    assert ids == [401, 400] and tokenizer.end_token_ids == (0, 400)
    assert tokenizer.tokenizer.decode(ids) == f"東京 {end}"
    assert tokenizer.tokenizer.decode(ids, skip_special_tokens=True) == "東京 "


def test_tokens_without_text_keep_their_places(tmp_path: Path) -> None:
    values = byte_level_values(KINDS["byte level"](), x=NORMAL)
    values["tokens"][-1] = ""
    ours = opened(write_vocabulary(tmp_path / "a.gguf", values)).tokenizer
    assert len(ours) == len(values["tokens"])


REFUSED = [
    ({"model": "t5"}, r"model \('t5'\) is none of gpt2, llama, gemma4"),
    ({"model": None}, r"tokenizer\.ggml\.model"),
    ({"model": 3}, r"model \(3\) is not a string"),
    ({"pre": "unheard-of"}, r"tokenizer\.ggml\.pre \('unheard-of'\)"),
    ({"pre": 3}, r"tokenizer\.ggml\.pre \(3\) is not a string"),
    ({"add_bos_token": 1}, r"add_bos_token \(1\) is neither true nor false"),
    ({"add_eos_token": True, "eos_token_id": None}, r"add_eos_token .*needs .*eos_token_id"),
    ({"add_bos_token": True, "bos_token_id": None}, r"add_bos_token .*needs .*bos_token_id"),
    ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces"),
    ({"add_sep_token": True}, "add_sep_token"),
    ({"tokenizer.ggml.normalizer.lowercase": True}, r"normalizer\.lowercase"),
    ({"tokenizer.ggml.normalizer.strip_accents": True}, r"normalizer\.strip_accents"),
    ({"suppress_tokens": [3]}, "suppress_tokens"),
    ({"unheard_of": True}, r"tokenizer\.ggml\.unheard_of"),
    ({"unheard_of_token_id": 3}, r"tokenizer\.ggml\.unheard_of_token_id"),
    ({"eot_token_id": 9999}, r"eot_token_id \(9999\)"),
    ({"mask_token_id": 9999}, r"mask_token_id \(9999\)"),
    ({"eos_token_ids": [1, 9999]}, r"eos_token_ids .* range from 0 to 399"),
    ({"eos_token_ids": 9999}, r"eos_token_ids .* range from 0 to 399"),
    ({"tokens": None}, r"tokenizer\.ggml\.tokens"),
    ({"tokens": "a"}, r"tokenizer\.ggml\.tokens"),
    ({"tokens": [1, 2]}, r"tokenizer\.ggml\.tokens"),
    ({"tokens": ["a", "b", "a"], "merges": ["a b"]}, r"tokens .*has the token 'a' twice"),
    ({"token_type": [3, 3]}, r"token_type .*each of 400 tokens"),
    ({"token_type": ["a"] * 400}, r"token_type .*each of 400 tokens"),
    ({"merges": None}, r"merges .*is missing"),
    ({"merges": [1, 2]}, r"merges .*not an array of strings"),
    ({"merges": ["ab"]}, r"merges .*'ab', which is not a pair"),
    ({"merges": ["no such"]}, r"its header make no tokenizer"),
    ({"tokenizer.chat_template": 3}, r"chat_template \(3\) is not a string"),
    ({"tokenizer.chat_template.rag": 3}, r"chat_template\.rag \(3\) is not a string"),
    ({"tokenizer.chat_templates": "rag"}, r"chat_templates"),
]


@pytest.mark.parametrize(("values", "match"), REFUSED)
def test_what_is_not_supported_is_refused_by_name(
    values: dict[str, Any], match: str, tmp_path: Path
) -> None:
    every = byte_level_values(KINDS["byte level"]()) | values
    with pytest.raises(ModelLoadError, match=match):
        opened(write_vocabulary(tmp_path / "tiny.gguf", every))


def test_words_need_scores_of_numbers(tmp_path: Path) -> None:
    every = words_values(KINDS["words"]()) | {"scores": 1.0}
    with pytest.raises(ModelLoadError, match=r"scores .*each of \d+ tokens"):
        opened(write_vocabulary(tmp_path / "tiny.gguf", every))
