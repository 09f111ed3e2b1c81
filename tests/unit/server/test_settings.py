"""The server's settings: safe defaults, and impossible values."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from pyengine.errors import ConfigurationError
from pyengine.server.settings import ServerSettings
from pyengine.utils.settings import option_of


def test_by_default_it_serves_this_machine_alone() -> None:
    settings = ServerSettings()
    assert (settings.host, settings.port, settings.api_key) == ("127.0.0.1", 8000, ())


def test_every_field_has_a_help_text() -> None:
    for field in dataclasses.fields(ServerSettings):
        assert option_of(field).help[-1] not in ".:", field.name


def test_keys_are_not_shown() -> None:
    assert "secret" not in repr(ServerSettings(api_key=("secret",)))
    with pytest.raises(ConfigurationError) as error:
        ServerSettings(api_key="secret")  # type: ignore[arg-type]
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"port": 65536}, "port=65536"),
        ({"port": -1}, "port=-1"),
        ({"host": 5}, "host=5"),
        ({"max_body_mib": 0}, "max_body_mib=0"),
        ({"max_body_mib": 33}, "must be at least twice max_body_mib=33"),
        ({"header_timeout": 0}, "header_timeout=0"),
        ({"max_connections": 0}, "max_connections=0"),
        ({"max_priority": -1}, "max_priority=-1"),
        ({"body_timeout": float("nan")}, "body_timeout=nan"),
        ({"drain_timeout": float("inf")}, "drain_timeout=inf"),
        ({"ssl_keyfile": Path("x")}, "belong together"),
        ({"api_key": ("a b",)}, "ASCII"),
        ({"api_key": ("ä",)}, "ASCII"),
        ({"api_key": ("",)}, "at least one character"),
        ({"root_path": "llm"}, "root_path='llm'"),
        ({"root_path": "/"}, "root_path='/'"),
        ({"keep_alive": 0}, "keep_alive=0"),
        ({"max_answer_tokens": 0}, "max_answer_tokens=0"),
    ],
)
def test_values_that_cannot_be(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        ServerSettings(**settings)
