"""The options for sampling, and messages of the engine in the words of the command line."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from pyengine.config import EngineSettings
from pyengine.server.settings import ServerSettings
from pyengine.utils.settings import flags_of


@dataclass(frozen=True, slots=True)
class SamplingOption:
    """Default, help, type and short form of the option for a field of `SamplingParams`."""

    default: Any
    help: str
    kind: Any
    short: str = ""

    def flags(self, name: str) -> tuple[str, ...]:
        """The forms of the option for the field `name`, the long one first."""
        return (f"--{name.replace('_', '-')}", *([self.short] if self.short else []))


_Option = SamplingOption

SAMPLING: Mapping[str, SamplingOption] = {
    "max_tokens": _Option(256, "Maximum of new tokens per prompt.", int, "-n"),
    "min_tokens": _Option(0, "Minimum of new tokens.", int),
    "temperature": _Option(0.0, "Sampling temperature; 0: greedy.", float),
    "top_p": _Option(1.0, "Sample from the most likely tokens of this total probability.", float),
    "top_k": _Option(0, "Sample from the K most likely tokens; 0: all.", int),
    "min_p": _Option(0.0, "Minimum probability relative to the most likely token.", float),
    "repetition_penalty": _Option(1.0, "Above 1: repeat less.", float),
    "presence_penalty": _Option(0.0, "Above 0: penalize tokens that have occurred.", float),
    "frequency_penalty": _Option(0.0, "Above 0: penalize tokens by their frequency.", float),
    "stop": _Option(None, "Stop at this text; repeatable.", list[str] | None),
    "ignore_eos": _Option(False, "Continue after the end-of-sequence token.", bool),
}
"""Fields of `SamplingParams` that the commands offer."""

FORMS: Mapping[str, SamplingOption] = {
    "json_schema": _Option(None, "Answer with JSON of the schema in this file.", Path | None),
    "json_object": _Option(False, "Answer with a JSON object.", bool),
    "regex": _Option(None, "Answer with text that matches this expression.", str | None),
    "choice": _Option(None, "Answer with one of these texts; repeatable.", list[str] | None),
    "grammar": _Option(None, "Answer by the grammar in this file (Lark or GBNF).", Path | None),
}
"""Structured outputs: one field of `StructuredOutputs` each."""

_VALUE = (
    r"""=(?:'(?P<single>[^']*)'|"(?P<double>[^"]*)"|(?P<plain>\.\.\.|[^\s;:,()]*[^\s;:,().]))"""
)
"""A value as Python prints it, or three dots."""


def in_options(text: str) -> str:
    """Replace names of settings in a message by their options: `--max-model-len 8`.

    A name without an underscore may be a word of the sentence: it needs a value.
    """
    known = "|".join(sorted(map(re.escape, _flags()), key=len, reverse=True))
    pattern = rf"(?<![-\w./'\"`])(?P<name>{known})(?:{_VALUE}|(?![\w='\"(`]))"
    return re.sub(r",? or None\b( for [^;:]*)?", "", re.sub(pattern, _replaced, text))


@cache
def _flags() -> Mapping[str, tuple[str, ...]]:
    """The flags of each setting. If it has two, the second one turns it off."""
    flags = {name: option.flags(name)[:1] for name, option in {**SAMPLING, **FORMS}.items()}
    flags |= {f"structured_outputs.{name}": flags[name] for name in FORMS}
    flags["structured_outputs.json"] = flags["json_schema"]
    for field in (*fields(EngineSettings), *fields(ServerSettings)):
        flag, *_ = flags[field.name] = flags_of(field)
        flags[flag.removeprefix("--").replace("-", "_")] = flags[field.name]
    return flags


def _replaced(found: re.Match[str]) -> str:
    name = found["name"]
    flags = _flags()[name]
    value = next((text for text in found.group("single", "double", "plain") if text), None)
    if "=" not in found[0]:
        return flags[0] if "_" in name else name
    if value == "True":
        return flags[0]
    if value in ("False", "None"):
        return flags[1] if value == "False" and flags[1:] else f"no {flags[0]}"
    if flags[0].endswith("-gib") and not name.endswith("_gib") and str(value).isdecimal():
        value = f"{int(str(value)) / (1 << 30):g}"
    return f"{flags[0]} {value}" if value and " " not in value else f"{flags[0]} '{value or ''}'"
