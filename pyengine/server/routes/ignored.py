"""Fields without effect: listed in a response header, or refused with `--strict`."""

from collections.abc import Sequence
from typing import Any

from pyengine.server.errors import FieldError
from pyengine.server.schemas.fields import Effect, rules_of
from pyengine.server.settings import ServerSettings

IGNORED_HEADER = "x-pyengine-ignored"
"""Response header with the names of the request's fields that had no effect."""
_CODE = "unsupported_parameter"
_LONGEST_HEADER = 4096


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """The header with the names, the first 4,096 characters of them; none without names."""
    if not names:
        return {}
    text = ", ".join(dict.fromkeys(names))
    if len(text) > _LONGEST_HEADER:
        text = f"{text[:_LONGEST_HEADER].rpartition(', ')[0]}, ..."
    return {IGNORED_HEADER: text}


def ignored_fields(route: str, body: Any) -> list[str]:
    """The fields of a body that have no effect.

    Raises `ApiError` for a value that would require an unsupported answer.
    """
    rules, names = rules_of(route), []
    for name in type(body).model_fields:
        if name not in body.model_fields_set:
            continue
        rule, value = rules[name], getattr(body, name)
        match rule.effect_of(value, body):
            case Effect.REFUSED:
                raise FieldError(
                    name,
                    f"{name!r} with this value is not supported, and nothing was run: {rule.note}",
                    code=_CODE,
                )
            case Effect.IGNORED:
                names.append(name)
    options = body.stream_options
    if options is not None and options.include_obfuscation is not None:
        names.append("stream_options.include_obfuscation")
    return names


def check_ignored(names: Sequence[str], route: str, settings: ServerSettings) -> None:
    """Raise `ApiError` for fields without effect if the server is strict."""
    if not settings.strict or not names:
        return
    rule = rules_of(route).get(names[0])
    reason = f" ({rule.note})" if rule is not None else ""
    raise FieldError(
        names[0],
        f"{names[0]} has no effect{reason}, and this server refuses such fields (--strict): leave "
        "it out",
        code=_CODE,
    )
