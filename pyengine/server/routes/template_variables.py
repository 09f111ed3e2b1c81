"""Variables of the chat template that a request may set, by a field of its own or by name."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pyengine.engine.chat_template import template_reads
from pyengine.server.errors import ApiError
from pyengine.server.schemas.requests import ChatOptionFields
from pyengine.server.settings import ServerSettings

_OWN_FIELDS = ("reasoning_effort", "verbosity")
_THINKING = "enable_thinking"


@dataclass(frozen=True, slots=True)
class TemplateVariables:
    """The variables of a request, and its fields that the template does not read."""

    values: Mapping[str, Any]
    ignored: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls, body: ChatOptionFields, template: str, settings: ServerSettings
    ) -> "TemplateVariables":
        """The variables of a request. Raises `ApiError` for those that requests may not set."""
        allowed, values = settings.template_variable, dict(body.chat_template_kwargs or {})
        for name in values:
            if name not in allowed:
                raise ApiError(
                    400,
                    f"chat_template_kwargs[{name[:80]!r}]: this server lets requests set "
                    f"{', '.join(allowed) or 'none'}",
                    param="chat_template_kwargs",
                )
        ignored = []
        for name in _OWN_FIELDS:
            value = getattr(body, name)
            if value is None:
                continue
            if values.get(name, value) != value:
                raise ApiError(
                    400,
                    f"{name}={value!r}, and {values[name]!r:.80} in chat_template_kwargs: send one "
                    "of them",
                    param=name,
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

    vLLM 0.32 turns thinking on and off by the effort, too.
    """
    is_allowed = _THINKING in settings.template_variable and _THINKING not in values
    return is_allowed and template_reads(template, _THINKING)
