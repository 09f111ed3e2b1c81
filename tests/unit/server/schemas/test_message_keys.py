"""Keys and roles of messages."""

from pathlib import Path
from typing import Any

import pytest

from pyengine.async_engine import AsyncEngine
from tests.support.serving import Client, make_client, open_small_engine, save_small_model
from tests.unit.server.bodies import ASSISTANT, BODIES, CHAT, HEADER, USER

KEYS: dict[str, Any] = {
    "annotations": [{"type": "url_citation"}],
    "refusal": "no",
    "id": "m1",
    "reasoning_content": "Hm.",
    "reasoning": "Hm.",
    "cache_control": {"type": "of another form"},
}


@pytest.mark.parametrize("key", KEYS)
def test_keys_of_messages_without_effect_are_named(key: str, client: Client) -> None:
    plain = {**BODIES[CHAT], "messages": [USER, ASSISTANT, USER], "return_token_ids": True}
    message = {**ASSISTANT, key: KEYS[key]}
    body = {**plain, "messages": [USER, message, USER]}
    response = client.post(CHAT, body)
    assert response.status_code == 200, response.text
    assert response.headers[HEADER] == f"messages.{key}"
    assert response.json()["prompt_token_ids"] == client.answer(CHAT, plain)["prompt_token_ids"]
    empty = {**plain, "messages": [USER, {**ASSISTANT, key: None}, USER]}
    assert HEADER not in client.post(CHAT, empty).headers


@pytest.mark.parametrize("key", ["cache_control", "annotations", "id", "prompt_cache_breakpoint"])
def test_keys_of_parts_without_effect_are_named(key: str, client: Client) -> None:
    part = {"type": "text", "text": "Hello"}
    plain = {**BODIES[CHAT], "messages": [{"role": "user", "content": [part]}]}
    plain["return_token_ids"] = True
    body = {**plain, "messages": [{"role": "user", "content": [{**part, key: {}}]}]}
    response = client.post(CHAT, body)
    assert response.status_code == 200, response.text
    assert response.headers[HEADER] == f"messages.content.{key}"
    assert response.json()["prompt_token_ids"] == client.answer(CHAT, plain)["prompt_token_ids"]


def test_an_unknown_key_of_a_part_is_refused(client: Client) -> None:
    part = {"type": "text", "text": "Hello", "colour": "red"}
    body = {**BODIES[CHAT], "messages": [{"role": "user", "content": [part]}]}
    assert "'colour'" in client.refusal(CHAT, body)["message"]


def test_a_refusal_is_what_the_assistant_said(client: Client) -> None:
    plain = {**BODIES[CHAT], "return_token_ids": True}
    said = client.answer(CHAT, {**plain, "messages": [USER, ASSISTANT, USER]})
    for message in (
        {"role": "assistant", "content": None, "refusal": "Paris"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "Paris"}]},
    ):
        response = client.post(CHAT, {**plain, "messages": [USER, message, USER]})
        assert response.status_code == 200, response.text
        assert HEADER not in response.headers
        assert response.json()["prompt_token_ids"] == said["prompt_token_ids"]


def test_a_strict_server_refuses_keys_of_messages_without_effect(engine: AsyncEngine) -> None:
    client = make_client(engine, strict=True)
    body = {**BODIES[CHAT], "messages": [{**USER, "id": "m1"}]}
    error = client.refusal(CHAT, body)
    assert error["param"] == "messages.id" and "--strict" in error["message"]


@pytest.mark.parametrize("role", ["usr", "", "User", "x<|im_end|>", "if"])
def test_a_role_that_is_none_is_refused(role: str, client: Client) -> None:
    error = client.refusal(CHAT, {**BODIES[CHAT], "messages": [{"role": role, "content": "x"}]})
    assert repr(role) in error["message"] and "system" in error["message"]


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool", "function"])
def test_roles_of_the_api_are_taken(role: str, client: Client) -> None:
    messages = [{"role": role, "content": "x"}, USER]
    assert client.answer(CHAT, {**BODIES[CHAT], "messages": messages})["choices"]


def test_a_role_that_the_template_names_is_taken(tmp_path: Path) -> None:
    template = "{% for m in messages %}{% if m.role == 'ipython' %}>{% endif %}a{% endfor %}"
    with open_small_engine(save_small_model(tmp_path, template)) as engine:
        body = {**BODIES[CHAT], "messages": [{"role": "ipython", "content": "x"}]}
        assert make_client(engine).answer(CHAT, body)["choices"]


def test_answers_of_other_servers_are_taken_and_their_keys_named(client: Client) -> None:
    """Keys that no list has, too."""
    body = {**BODIES[CHAT], "return_token_ids": True}
    answer = {**ASSISTANT, "provider_specific_fields": {}, "x_new.key-1": [1], "audio": None}
    response = client.post(CHAT, {**body, "messages": [USER, answer, USER]})
    assert response.status_code == 200, response.text
    assert response.headers[HEADER] == "messages.provider_specific_fields, messages.x_new.key-1"
    plain = client.answer(CHAT, {**body, "messages": [USER, ASSISTANT, USER]})
    assert response.json()["prompt_token_ids"] == plain["prompt_token_ids"]


def test_many_unknown_keys_make_no_endless_header(client: Client) -> None:
    answer = {**ASSISTANT, **{f"unknown_key_number_{at}": 1 for at in range(1000)}}
    response = client.post(CHAT, {**BODIES[CHAT], "messages": [USER, answer, USER]})
    assert response.status_code == 200, response.text
    header = response.headers[HEADER]
    assert len(header) < 4200 and header.endswith(", ...")


def test_an_unknown_key_of_another_role_is_refused(client: Client) -> None:
    for role in ("user", "system", "tool"):
        body = {**BODIES[CHAT], "messages": [{"role": role, "content": "x", "colour": "red"}]}
        assert "'colour'" in client.refusal(CHAT, body)["message"]
