"""Chat template variables that a request sets, by a separate field or `chat_template_kwargs`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pyengine.request.chat_messages import template_reads
from pyengine.server.errors import FieldError
from pyengine.server.schemas.requests import ChatOptionFields
from pyengine.server.settings import ServerSettings

_OWN_FIELDS = ("reasoning_effort", "verbosity")
_THINKING = "enable_thinking"


@dataclass(frozen=True, slots=True)
class TemplateVariables:
    """The template variables of a request, and its fields that the template does not read."""

    values: Mapping[str, Any]
    ignored: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls, body: ChatOptionFields, template: str, settings: ServerSettings
    ) -> "TemplateVariables":
        """The variables of a request. Raises `ApiError` for a variable that is not allowed."""
        allowed, values = settings.template_variable, dict(body.chat_template_kwargs or {})
        for name in values:
            if name not in allowed:
                raise FieldError(
                    "chat_template_kwargs",
                    f"chat_template_kwargs[{name[:80]!r}] is not allowed; this server allows "
                    f"{', '.join(allowed) or 'none'}",
                )
        ignored = []
        for name in _OWN_FIELDS:
            value = getattr(body, name)
            if value is None:
                continue
            if values.get(name, value) != value:
                raise FieldError(
                    name,
                    f"{name}={value!r} differs from {values[name]!r:.80} in chat_template_kwargs: "
                    "send one of them",
                )
            if name in allowed and template_reads(template, name):
                values[name] = value
            elif name == "reasoning_effort" and _sets_thinking(values, template, settings):
                values[_THINKING] = value != "none"
            else:
                ignored.append(name)
        return cls(values, ignored)


def _sets_thinking(values: Mapping[str, Any], template: str, settings: ServerSettings) -> bool:
    """True if the template reads `enable_thinking` and the request does not set it.

    vLLM 0.32 also maps the reasoning effort to thinking on or off.
    """
    is_allowed = _THINKING in settings.template_variable and _THINKING not in values
    return is_allowed and template_reads(template, _THINKING)
