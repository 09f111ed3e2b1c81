"""Adapters as callers name them."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyengine.errors import AdapterError
from pyengine.utils.validation import is_integer, shown

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:+@-]{0,127}")


@dataclass(frozen=True, slots=True, init=False)
class LoRARequest:
    """A LoRA adapter: a name, and the PEFT folder that it is read from when it is first used.

    `LoRARequest(name, path)`, or as in vLLM `LoRARequest(lora_name, lora_int_id, lora_path)`. The
    number is kept and has no effect. Without a path the adapter must be loaded already.
    """

    lora_name: str
    lora_path: str | None
    lora_int_id: int | None

    def __init__(
        self,
        lora_name: str,
        *rest: Any,
        lora_int_id: int | None = None,
        lora_path: str | Path | None = None,
    ) -> None:
        """Raises `AdapterError` for a name or a path that cannot be one."""
        given = list(rest)
        if given and lora_int_id is None and (is_integer(given[0]) or len(given) > 1):
            lora_int_id = given.pop(0)
        if given and lora_path is None:
            lora_path = given.pop(0)
        if given:
            raise AdapterError(f"{shown(given[0])} is no part of a LoRARequest: give name and path")
        object.__setattr__(self, "lora_name", checked_name(lora_name))
        if lora_path is not None and not isinstance(lora_path, str | Path):
            raise AdapterError(f"lora_path={shown(lora_path)}: it must be a folder")
        object.__setattr__(self, "lora_path", None if lora_path is None else str(lora_path))
        if lora_int_id is not None and not is_integer(lora_int_id):
            raise AdapterError(f"lora_int_id={shown(lora_int_id)}: it must be an integer, or None")
        object.__setattr__(self, "lora_int_id", lora_int_id)


def checked_name(name: Any) -> str:
    """A name of an adapter. Raises `AdapterError` for one that cannot be, a path for example."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise AdapterError(
            f"{shown(name)} is no name of an adapter: it must have up to 128 letters, digits and "
            "'._:+@-', the first a letter or digit; the folder goes into lora_path"
        )
    return name
