"""The table of fields is complete, matches the server, and is what the docs show."""

import re
import typing
from typing import Any

import pytest

from pyengine.request import chat_messages
from pyengine.server.schemas.fields import (
    CHAT,
    COMPLETIONS,
    FIELDS,
    OTHER_NAMES,
    Effect,
    FieldRule,
    rules_of,
)
from pyengine.server.schemas.requests import ChatCompletionRequest, CompletionRequest
from tests.support import api_fields
from tests.support.docs import ROOT, table
from tools.field_table import DOCUMENT, with_tables

FORMS: dict[str, Any] = {CHAT: ChatCompletionRequest, COMPLETIONS: CompletionRequest}
OURS = {"cache_priority", "explain_cache", "speculate"}
TEXT = DOCUMENT.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("route", "names"),
    [
        (CHAT, api_fields.OPENAI_CHAT),
        (COMPLETIONS, api_fields.OPENAI_COMPLETIONS),
        (CHAT, api_fields.VLLM_CHAT),
        (COMPLETIONS, api_fields.VLLM_COMPLETIONS),
    ],
)
def test_every_field_of_the_apis_has_a_rule(route: str, names: list[str]) -> None:
    assert len(names) > 15
    assert sorted(set(names) - set(rules_of(route))) == []


def test_no_rule_is_made_up() -> None:
    known = {*api_fields.OPENAI_CHAT, *api_fields.OPENAI_COMPLETIONS}
    known |= {*api_fields.VLLM_CHAT, *api_fields.VLLM_COMPLETIONS}
    for route in FORMS:
        assert set(rules_of(route)) - known == OURS


@pytest.mark.parametrize("route", FORMS)
def test_what_is_not_refused_is_declared(route: str) -> None:
    """What is refused whatever its value is no field of the form, all others are."""
    rules, declared = rules_of(route), set(FORMS[route].model_fields)
    always = {name for name, rule in rules.items() if rule.effect is Effect.REFUSED}
    always -= {name for name, rule in rules.items() if rule.special}
    assert declared == set(rules) - always
    assert always


def test_every_group_has_each_field_of_a_route_once() -> None:
    names = [
        (rule.name, route) for rules in FIELDS.values() for rule in rules for route in rule.routes
    ]
    assert len(names) == len(set(names)) > 100


def test_what_is_not_honoured_says_why() -> None:
    rules = [rule for several in FIELDS.values() for rule in several]
    assert [
        rule.name for rule in rules if rule.effect is not Effect.HONOURED and not rule.note
    ] == []
    assert [
        rule.name for rule in rules if bool(rule.special) != (rule.is_special is not None)
    ] == []


def test_a_special_value_has_an_effect_of_its_own() -> None:
    rule = FieldRule(
        name="x",
        effect=Effect.REFUSED,
        note="",
        special="1",
        is_special=lambda value, _: value == 1,
    )
    assert rule.effect_of(1, None) is Effect.IGNORED
    assert rule.effect_of(2, None) is Effect.REFUSED


def test_no_hint_suggests_the_word_that_was_sent() -> None:
    for name, hint in OTHER_NAMES.items():
        words = set(re.findall(r"\w+", hint))
        assert name not in words, hint
        assert not any(name in rules_of(route) for route in FORMS)


def test_the_page_is_what_the_code_says() -> None:
    assert with_tables(TEXT) == TEXT, "python -m tools.field_table writes it"
    said = {row[0] for row in re.findall(r"^\| `(\w+)` \|()", TEXT, re.MULTILINE)}
    for route in FORMS:
        assert set(rules_of(route)) <= said


def test_the_page_names_every_key_of_messages() -> None:
    rows = table("docs/reference/request-fields.md", "key", "of")
    for of, keys in (
        ("messages", chat_messages._MESSAGE_KEYS | chat_messages._INERT_KEYS),
        ("parts", chat_messages._PART_KEYS | chat_messages._INERT_PART_KEYS | {"refusal"}),
    ):
        said = [name for row in rows if row[1] == of for name in re.findall(r"\w+", row[0])]
        assert sorted(said) == sorted(keys)
    for role in chat_messages._ROLES:
        assert f"`{role}`" in TEXT


def test_the_page_names_the_versions() -> None:
    assert f"openai {api_fields.OPENAI_VERSION}" in TEXT
    assert f"vLLM {api_fields.VLLM_VERSION}" in TEXT


def test_other_pages_link_to_it() -> None:
    for page in ("docs/guides/serving.md", "docs/guides/coming-from-vllm.md"):
        assert "request-fields.md)" in (ROOT / page).read_text(encoding="utf-8")


def test_the_lists_are_those_of_the_openai_package() -> None:
    pytest.importorskip("openai")
    from openai.types import completion_create_params as of_completions
    from openai.types.chat import completion_create_params as of_chats

    for module, names in (
        (of_chats, api_fields.OPENAI_CHAT),
        (of_completions, api_fields.OPENAI_COMPLETIONS),
    ):
        real = set(typing.get_type_hints(module.CompletionCreateParamsBase)) | {"stream"}
        assert real - set(names) == set()
