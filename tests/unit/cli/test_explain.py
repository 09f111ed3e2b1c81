"""`pyengine explain`: the first difference of two prompts, and the blocks that they share."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pyengine.cli.app import app
from pyengine.cli.explain import comparison
from pyengine.cli.terminal import DIM, GREEN, RED
from pyengine.request.prompts import common_prefix
from tests.support.tokenizers import characters


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["explain", *arguments])


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "a.json", tmp_path / "b.json"


def compared(files: tuple[Path, Path], first: list[int], second: list[int]) -> str:
    for path, ids in zip(files, (first, second), strict=True):
        path.write_text(json.dumps(ids))
    result = run(*map(str, files), "--block-size", "4")
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize(
    ("first", "second", "common"),
    [
        ([], [], 0),
        ([1], [], 0),
        ([1, 2, 3], [1, 2, 3], 3),
        ([1, 2, 3], [1, 2], 2),
        ([1, 2, 3], [1, 9, 3], 1),
        ([1], [2], 0),
    ],
)
def test_the_common_prefix(first: list[int], second: list[int], common: int) -> None:
    assert common_prefix(first, second) == common_prefix(second, first) == common


def test_token_ids_need_no_model(files: tuple[Path, Path]) -> None:
    shown = compared(files, list(range(20)), [*range(10), 77, *range(11, 20)])
    assert shown == (
        "A has 20 tokens, B has 20; the first 10 are equal.\n"
        "They share 2 whole blocks of 4 tokens, 8 tokens.\n"
        "The first difference is at token 10:\n"
        "  A  0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 \n"
        "  B  0 1 2 3 4 5 6 7 8 9 77 11 12 13 14 15 16 17 18 19 \n"
        "To share more, put the parts that change at the end of the prompts.\n"
    )


def test_prompts_without_a_difference(files: tuple[Path, Path]) -> None:
    assert "The prompts are equal.\n" in compared(files, [1, 2], [1, 2])
    assert "B goes on where A ends" in compared(files, [1, 2], [1, 2, 3])
    assert "A goes on where B ends" in compared(files, [1, 2, 3], [1, 2])


def test_texts_around_the_difference() -> None:
    tokenizer = characters()
    ids = [tokenizer.encode(f"it is Tuesday 14:0{minute}, hi") for minute in (1, 2)]
    pieces = list(comparison(*ids, 16, tokenizer))
    texts = {style: text for text, style in pieces if style}
    assert texts == {DIM: "esday 14:0", RED: "1, hi", GREEN: "2, hi"}


def test_a_text_is_read_with_the_tokenizer_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyengine.cli.explain._tokenizer", lambda model: characters())
    (tmp_path / "a.txt").write_text("same one")
    (tmp_path / "b.txt").write_text("same\ntwo")
    shown = run(str(tmp_path / "a.txt"), str(tmp_path / "b.txt")).stdout
    assert "the first 4 are equal" in shown and "\x1b" not in shown
    assert "  B  same\\ntwo\n" in shown  # on one line


@pytest.mark.parametrize(
    ("content", "words"), [(b"\xff", "is not UTF-8 text"), (None, "A and B are files")]
)
def test_files_that_are_no_prompts(
    files: tuple[Path, Path], content: bytes | None, words: str
) -> None:
    files[0].write_text("[1]")
    if content is not None:
        files[1].write_bytes(content)
    result = run(*map(str, files))
    assert result.exit_code == 2 and words in result.stderr
