"""Prompts become token ids, or are refused by what is wrong with them."""

from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from pyengine.errors import InvalidRequestError
from pyengine.request.prompts import as_list, match_params, parse_prompt, salt_namespace
from pyengine.sampling_params import SamplingParams
from tests.support import chat
from tests.support.chat import chat_tokenizer
from tests.support.without_torch import tensors


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return chat_tokenizer(chat.CHATML)


@pytest.mark.parametrize(
    "prompt",
    [
        [3, 4, 5],
        (3, 4, 5),
        range(3, 6),
        iter([3, 4, 5]),
        np.array([3, 4, 5], np.uint8),
        *tensors([3, 4, 5]),
        [np.int64(3), 4, np.uint16(5)],
        {"prompt_token_ids": [3, 4, 5]},
        MappingProxyType({"prompt_token_ids": (3, 4, 5)}),
    ],
    ids=lambda prompt: type(prompt).__name__,
)
def test_token_ids_in_every_form_are_one_array(prompt: Any) -> None:
    parsed = parse_prompt(prompt, None)
    assert np.asarray(parsed.token_ids).dtype == np.int64
    assert list(parsed.token_ids) == [3, 4, 5]
    assert (parsed.text, parsed.namespace) == (None, b"")


def test_an_array_is_copied() -> None:
    given = np.array([3, 4, 5])
    parsed = parse_prompt(given, None)
    given[0] = 9
    assert list(parsed.token_ids) == [3, 4, 5]


def test_text_is_encoded_and_kept(tokenizer: Any) -> None:
    for prompt in ("Hello 東京", {"prompt": "Hello 東京"}):
        parsed = parse_prompt(prompt, tokenizer)
        assert list(parsed.token_ids) == tokenizer.encode("Hello 東京")
        assert parsed.text == "Hello 東京"


def test_given_ids_are_not_encoded_again(tokenizer: Any) -> None:
    parsed = parse_prompt({"prompt": "Hello", "prompt_token_ids": [7]}, tokenizer)
    assert (list(parsed.token_ids), parsed.text) == ([7], "Hello")


def test_a_salt_is_a_namespace() -> None:
    assert (
        parse_prompt({"prompt_token_ids": [1], "cache_salt": "é"}, None).namespace == "é".encode()
    )
    assert salt_namespace(None) == b""


def test_one_prompt_or_several() -> None:
    assert as_list("text") == ["text"]
    assert as_list({"prompt": "text"}) == [{"prompt": "text"}]
    assert as_list([1, 2]) == [[1, 2]]
    assert as_list([[1, 2], "text"]) == [[1, 2], "text"]
    assert as_list(item for item in ("a", "b")) == ["a", "b"]
    assert [list(row) for row in as_list(np.array([[1, 2], [3, 4]]))] == [[1, 2], [3, 4]]  # type: ignore[arg-type]
    assert as_list([]) == []


class _OnADevice:
    """An array that cannot be had here."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("it is on a device")


BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "None": (None, "None .NoneType. is no prompt"),
    "a float": (1.5, "1.5 .float. is no prompt"),
    "bytes": (b"ab", "b'ab' .bytes. is no prompt"),
    "a set": ({1}, "is no prompt"),
    "floats": ([1.0], "found 1.0 .float. at position 0"),
    "a bool": ([1, True], "found True .bool. at position 1"),
    "None among ids": ([1, None], "found None .NoneType. at position 1"),
    "two dimensions": (np.zeros((2, 2), int), r"token ids of shape \(2, 2\): one prompt has one"),
    "no dimension": (np.array(5), r"an array of int64 and shape \(\) is no prompt"),
    "an array of text": (np.array(["a"]), "an array of <U1"),
    "out of reach": (_OnADevice(), "_OnADevice cannot be read as token ids: it is on a device"),
    "above int64": ([0, 2**63], "token id 9223372036854775808 .int. at position 1"),
    "below int64": ([-(2**64)], "at position 0 of the prompt is outside of any vocabulary"),
    "above int64, unsigned": (np.array([2**64 - 1], np.uint64), "18446744073709551615 is outside"),
    "nothing in a mapping": ({}, r"has 'prompt' or 'prompt_token_ids', this one has \[\]"),
    "a salt alone": ({"cache_salt": "x"}, r"this one has \['cache_salt'\]"),
    "unknown": ({"prompt": "x", "multi_modal_data": {}}, "'multi_modal_data' in a prompt is not"),
    "an unknown number": ({"prompt": "x", 5: 1}, "5 in a prompt is not known"),
    "no text": ({"prompt": [1]}, r"'prompt' is \[1\] .list.: it must be text"),
    "text as ids": ({"prompt_token_ids": "text"}, "'text' .str. is no prompt"),
    "an empty salt": ({"prompt": "x", "cache_salt": ""}, "cache_salt='' .str.: it must be text of"),
    "a number as salt": ({"prompt": "x", "cache_salt": 5}, "cache_salt=5 .int."),
    "half a character as salt": ({"prompt": "x", "cache_salt": "\ud800"}, "is no valid Unicode"),
    "half a character": ("ab\ud83d", r"the text has '\\ud83d' at position 2"),
}


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS.values(), ids=BAD_PROMPTS)
def test_what_is_no_prompt_is_refused(prompt: Any, message: str, tokenizer: Any) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        parse_prompt(prompt, tokenizer)


def test_text_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="'Hello' is text and this model has no tokenize"):
        parse_prompt("Hello", None)


def test_parameters_for_all_or_one_each() -> None:
    default, other = SamplingParams(max_tokens=3), SamplingParams(max_tokens=4)
    assert match_params(None, 2, default) == [default] * 2
    assert match_params(other, 2, default) == [other] * 2
    assert match_params((item for item in (other, default)), 2, other) == [other, default]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": 0}, "sampling_params holds 'temperature' .str."),
        ([SamplingParams(), None], "sampling_params holds None"),
        (5, "sampling_params holds 5 .int."),
        ([SamplingParams()], "1 sampling_params for 2 prompts"),
        ([SamplingParams()] * 3, "3 sampling_params for 2 prompts"),
    ],
)
def test_other_parameters_are_refused(given: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        match_params(given, 2, SamplingParams())
