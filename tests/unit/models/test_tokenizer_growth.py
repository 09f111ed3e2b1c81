"""Tokenizers whose replacements multiply are refused before any text is encoded."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, decoders, normalizers

from pyengine.errors import ModelLoadError
from pyengine.models.tokenizer import load_tokenizer
from tests.support.chat import CHATML, chat_tokenizer
from tests.support.tokenizers import save_tokenizer


def saved(folder: Path, **parts: Any) -> Path:
    tokenizer = chat_tokenizer(CHATML)
    for name, part in parts.items():
        setattr(tokenizer.backend_tokenizer, name, part)
    save_tokenizer(folder, tokenizer)
    return folder


def doubled(kind: Any, count: int) -> list[Any]:
    return [kind.Replace("a", "aa")] * count


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": normalizers.Sequence(doubled(normalizers, 10))},
        {"normalizer": normalizers.Sequence([normalizers.Sequence(doubled(normalizers, 5))] * 3)},
        {"normalizer": normalizers.Replace("a", "a" * 2000)},
        {"normalizer": normalizers.Sequence([normalizers.Replace(Regex(""), "x" * 40)] * 2)},
        {"decoder": decoders.Sequence(doubled(decoders, 10))},
    ],
    ids=["ten", "nested", "a long one", "regular expressions", "decoder"],
)
def test_replacements_that_multiply_are_refused(parts: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"times as long; the limit is 1000"):
        load_tokenizer(saved(tmp_path, **parts))


def test_ordinary_normalizers_are_loaded(tmp_path: Path) -> None:
    ordinary = [
        normalizers.Replace("``", '"'),
        normalizers.NFKC(),
        normalizers.Lowercase(),
        normalizers.Prepend("▁"),
        normalizers.Replace(" ", "▁"),
        normalizers.Replace(Regex(" {2,}"), " "),
    ]
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    folder = saved(
        tmp_path,
        normalizer=normalizers.Sequence(ordinary),
        decoder=decoders.Sequence(parts),
    )
    assert load_tokenizer(folder).encode("a  b", add_special_tokens=False)
    assert (
        len(json.loads((folder / "tokenizer.json").read_text())["normalizer"]["normalizers"]) == 6
    )
