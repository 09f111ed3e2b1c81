"""How the vocabularies of GGUF files split text before they merge bytes, by `tokenizer.ggml.pre`.

llama.cpp knows the same names (https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp).
The expressions are those of the models' own tokenizer.json.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Split(NamedTuple):
    """Expressions that split text one after the other: a match is a separate piece.

    With `is_gpt2`, the pieces are split as GPT-2 does then. `starts_with_bos` is the default of
    `add_bos_token`. With `has_whole_words`, words of the vocabulary are not merged.
    """

    expressions: tuple[str, ...] = ()
    is_gpt2: bool = False
    has_whole_words: bool = False
    starts_with_bos: bool = False


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(digits: str, *, start: str = f"{_CONTRACTIONS}|{_WORD}", end: str = _SPACES) -> str:
    return rf"{start}|{digits}|{_SYMBOLS}|{end}"


def _cased(digits: str, *, contractions: str = "") -> str:
    """Words whose capitals come first."""
    start = r"[^\r\n\p{L}\p{N}]?"
    words = f"{start}{_UPPER}*{_LOWER}+{contractions}|{start}{_UPPER}+{_LOWER}*{contractions}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


_LLAMA3 = _words(r"\p{N}{1,3}")
_QWEN2 = _words(r"\p{N}")
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_GPT4O = _cased(r"\p{N}{1,3}", contractions=f"{_CONTRACTIONS}?")
_JAIS2 = _words(
    r"\p{N}{1,3}",
    end=r"\s*[\r\n]+|"
    + "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4))
    + r"|\s{1,2}(?!\S)|\s{1}",
)
_SEED = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_EXAONE_MOE = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_MARKED_WORDS = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
)
_DEEPSEEK3 = (r"\p{N}{1,3}", _CJK, f"{_MARKED_WORDS}|{_SPACES}")
_IDEOGRAPHS = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c"
    "\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
)

_GPT2 = Split(is_gpt2=True)
_DIGITS = Split((r"\p{N}",), is_gpt2=True)
_WHOLE_LLAMA3 = Split((_LLAMA3,), has_whole_words=True, starts_with_bos=True)


def _named(names: str, split: Split) -> dict[str, Split]:
    return dict.fromkeys(names.split(), split)


SPLITS: Mapping[str, Split] = {
    **_named("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2", _WHOLE_LLAMA3),
    **_named("jina-v5-nano", _WHOLE_LLAMA3),
    **_named("dbrx smaug-bpe glm4 chatglm-bpe", Split((_LLAMA3,))),
    **_named("minicpm5", Split((r"\p{N}{1,3}", _words(r"\p{N}+")), has_whole_words=True)),
    **_named("jais-2", Split((_JAIS2,))),
    **_named("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan", Split((_QWEN2,))),
    **_named("solar-open grok-2", Split((_QWEN2,))),
    **_named("qwen35", Split((_QWEN35,))),
    **_named("ufakzeka", Split((_words(r"\p{N}", start=_WORD),))),
    **_named("seed-coder", Split((_SEED,))),
    **_named("bailingmoe bailingmoe2 llada-moe", Split((_BAILING,))),
    **_named("exaone-moe", Split((_EXAONE_MOE,))),
    **_named("laguna", Split((r"[^\n]+|[\n]+", _QWEN2))),
    **_named("tekken", Split((_cased(r"\p{N}"),), has_whole_words=True, starts_with_bos=True)),
    **_named("gpt-4o llama4 kanana2 talkie minimax-m2", Split((_GPT4O,))),
    **_named(
        "tiny_aya cohere2moe",
        Split((r"\d{1,3}(?=(?:\d{3})*\b)", _cased(r"\p{N}", contractions=f"{_CONTRACTIONS}?"))),
    ),
    **_named(
        "youtu",
        Split((_YOUTU, _cased(r"\p{N}", contractions=f"{_CONTRACTIONS}?")), has_whole_words=True),
    ),
    **_named("deepseek-v3 hunyuan-dense joyai-llm hy_v4", Split(_DEEPSEEK3)),
    **_named(
        "deepseek-llm",
        Split(
            (
                r"[\r\n]",
                r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
                "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
                r"\s+$",
                _IDEOGRAPHS,
                r"\p{N}+",
            )
        ),
    ),
    **_named(
        "deepseek-coder", Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _IDEOGRAPHS, r"\p{N}"))
    ),
    **_named("gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum", _GPT2),
    **_named("modern-bert mpt olmo jais trillion granite-docling exaone4", _GPT2),
    **_named("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", _DIGITS),
    **_named(
        "falcon",
        Split(
            (
                r"[\p{P}\$\+<=>\^~\|`]+",
                r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
                "[0-9][0-9][0-9]",
            )
        ),
    ),
    **_named("poro-chat bloom gpt3-finnish", Split((_BLOOM,))),
    **_named("viking", Split((_BLOOM, r"\p{N}"))),
    **_named("superbpe", Split((r"\p{N}+", r"(?=(\d{3})+(?!\d))"))),
    "default": _GPT2,
}
"""Splits by name; files without a name, or with "default", split as GPT-2 does."""
