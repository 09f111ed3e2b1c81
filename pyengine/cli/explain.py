"""`pyengine explain`: the first difference of two prompts, and the blocks that they share."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from pyengine.cli.backend import libraries
from pyengine.cli.options import ModelOption, guarded
from pyengine.cli.prompts import LONGEST_LINE, read_text
from pyengine.cli.terminal import DIM, GREEN, RED, write
from pyengine.errors import InvalidRequestError

_SHOWN = 10  # tokens before the difference, and from it on


def explain(
    first: Annotated[Path, typer.Argument(metavar="A", help="File with a prompt.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="File with another one.")],
    model: ModelOption = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a cached block.")] = 16,
) -> None:
    """Show where two prompts differ first, and how many whole blocks they share.

    A file holds text, or a JSON list of token ids; then no model is needed. Text is read by the
    tokenizer of the model. Only whole blocks are found in the cache again, so tokens after the
    first difference are computed anew.
    """
    with guarded():
        prompts = [_read(path) for path in (first, second)]
        tokenizer = None
        if any(isinstance(prompt, str) for prompt in prompts):
            tokenizer = _tokenizer(model)
        ids = [_token_ids(prompt, tokenizer) for prompt in prompts]
        for text, style in comparison(ids[0], ids[1], block_size, tokenizer):
            write(text, style=style)


def comparison(
    first: Sequence[int], second: Sequence[int], block_size: int, tokenizer: Any
) -> Iterator[tuple[str, str]]:
    """Say what two prompts share and where they differ: texts and their styles."""
    from pyengine.request.prompts import common_prefix

    common = common_prefix(first, second)
    blocks = common // block_size
    yield f"A has {len(first)} tokens, B has {len(second)}; the first {common} are equal.\n", ""
    yield (
        f"They share {blocks} whole blocks of {block_size} tokens, {blocks * block_size} tokens.\n",
        "",
    )
    if common == len(first) == len(second):
        yield "The prompts are equal.\n", ""
    elif common in (len(first), len(second)):
        longer, shorter = ("B", "A") if common == len(first) else ("A", "B")
        yield f"{longer} goes on where {shorter} ends: there is no difference.\n", ""
    else:
        yield f"The first difference is at token {common}:\n", ""
        for name, ids, style in (("A", first, RED), ("B", second, GREEN)):
            yield f"  {name}  ", ""
            yield _shown(ids[max(0, common - _SHOWN) : common], tokenizer), DIM
            yield _shown(ids[common : common + _SHOWN], tokenizer), style
            yield "\n", ""
        yield "To share more, put the parts that change at the end of the prompts.\n", ""


def _shown(token_ids: Sequence[int], tokenizer: Any) -> str:
    """Tokens as text on one line; as ids without a tokenizer."""
    if tokenizer is None:
        return "".join(f"{token} " for token in token_ids)
    text: str = tokenizer.decode(list(token_ids))
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _read(path: Path) -> str | list[int]:
    """The prompt of a file: text, or a JSON list of token ids."""
    try:
        text = read_text(path, LONGEST_LINE)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{error}; A and B are files with prompts") from None
    if len(text) > LONGEST_LINE:
        raise InvalidRequestError(f"{path} has more than {LONGEST_LINE >> 20} MiB: no prompt")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, list) and all(type(token) is int and token >= 0 for token in value):
        return value
    return text


def _token_ids(prompt: str | list[int], tokenizer: Any) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    from pyengine.request.prompts import tokens_of

    return tokens_of(prompt, tokenizer)


def _tokenizer(model: str | None) -> Any:
    """The tokenizer of a model. Raises `InvalidRequestError` if it has none."""
    with libraries():
        from pyengine.models.loader import tokenizer_of
        from pyengine.models.source import resolve_source
    source = resolve_source(model)
    tokenizer = tokenizer_of(source)
    if tokenizer is None:
        raise InvalidRequestError(f"{source.name} has no tokenizer: give files of token ids")
    return tokenizer
