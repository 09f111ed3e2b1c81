"""The options for sampling, and messages of the engine in the words of the command line."""

import re
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from pyengine.config import EngineSettings
from pyengine.server.settings import ServerSettings
from pyengine.utils.settings import flags_of

SAMPLING: Mapping[str, tuple[Any, str, Any]] = {
    "max_tokens": (256, "Maximum of new tokens per prompt.", int),
    "min_tokens": (0, "Minimum of new tokens.", int),
    "temperature": (0.0, "Sampling temperature; 0: greedy.", float),
    "top_p": (1.0, "Sample from the most likely tokens of this total probability.", float),
    "top_k": (0, "Sample from the K most likely tokens; 0: all.", int),
    "min_p": (0.0, "Minimum probability relative to the most likely token.", float),
    "repetition_penalty": (1.0, "Above 1: repeat less.", float),
    "presence_penalty": (0.0, "Above 0: penalize tokens that have occurred.", float),
    "frequency_penalty": (0.0, "Above 0: penalize tokens by their frequency.", float),
    "stop": (None, "Stop at this text; repeatable.", list[str] | None),
    "ignore_eos": (False, "Continue after the end-of-sequence token.", bool),
}
"""Fields of `SamplingParams` that the commands offer: default, help and type of each option."""

FORMS: Mapping[str, tuple[Any, str, Any]] = {
    "json_schema": (None, "Answer with JSON of the schema in this file.", Path | None),
    "json_object": (False, "Answer with a JSON object.", bool),
    "regex": (None, "Answer with text that matches this expression.", str | None),
    "choice": (None, "Answer with one of these texts; repeatable.", list[str] | None),
    "grammar": (None, "Answer by the grammar in this file (Lark or GBNF).", Path | None),
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
    known = "|".join(sorted(map(re.escape, flags_by_name()), key=len, reverse=True))
    pattern = rf"(?<![-\w./'\"`])(?P<name>{known})(?:{_VALUE}|(?![\w='\"(`]))"
    return re.sub(r",? or None\b( for [^;:]*)?", "", re.sub(pattern, _replaced, text))


@cache
def flags_by_name() -> Mapping[str, tuple[str, ...]]:
    """The flags of each setting. If it has two, the second one turns it off."""
    flags: dict[str, tuple[str, ...]] = {}
    for name in (*SAMPLING, *FORMS):
        flags[name] = flags[f"structured_outputs.{name}"] = (f"--{name.replace('_', '-')}",)
    flags["structured_outputs.json"] = flags["json_schema"]
    for field in (*fields(EngineSettings), *fields(ServerSettings)):
        flag, *_ = flags[field.name] = flags_of(field)
        flags[flag.removeprefix("--").replace("-", "_")] = flags[field.name]
    return flags


def _replaced(match: re.Match[str]) -> str:
    name = match["name"]
    flags = flags_by_name()[name]
    value = next((text for text in match.group("single", "double", "plain") if text), None)
    if "=" not in match[0]:
        return flags[0] if "_" in name else name
    if value == "True":
        return flags[0]
    if value in ("False", "None"):
        return flags[1] if value == "False" and flags[1:] else f"no {flags[0]}"
    if flags[0].endswith("-gib") and not name.endswith("_gib") and str(value).isdecimal():
        value = f"{int(str(value)) / (1 << 30):g}"
    return f"{flags[0]} {value}" if value and " " not in value else f"{flags[0]} '{value or ''}'"
