"""The keys of a GGUF header: read and checked by name.

transformers drops keys that it does not know, and a model with scaled positions then gives wrong
answers. Here a file is refused unless each key is read or known to have no effect.
Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyengine.errors import ModelLoadError
from pyengine.models.gguf_header import GGUFArray, GGUFHeader

_LARGEST_COUNT = 2**31 - 1
"""Positions have 32 bits."""

_IDLE_GROUPS = {
    "general.": "describes the file",
    "quantize.": "describes how the file was quantised",
    "mradermacher.": "describes who quantised the file",
    "split.": "describes parts of a file, of which there is one",
}
"""Beginnings of keys without an effect on the model, with the reason."""

_IDLE = {
    "tokenizer.ggml.token_type_count": "token types are those of BERT",
    "tokenizer.ggml.seperator_token_id": "separates the sentences of a pair",
    "tokenizer.ggml.cls_token_id": "marks texts to classify",
    "tokenizer.ggml.mask_token_id": "marks words to guess",
    **{
        f"tokenizer.ggml.{part}_token_id": "for prompts, which requests contain"
        for part in ("fim_pre", "fim_suf", "fim_mid", "prefix", "suffix", "middle")
    },
    "tokenizer.ggml.precompiled_charsmap": "for vocabularies of unigrams, which are refused",
    "tokenizer.huggingface.json": "a copy of the tokenizer in another form",
    "{}.rope.scaling.finetuned": "describes the training",
    "{}.use_parallel_residual": "converters wrote it for every architecture; tensors decide it",
    "{}.pooling_type": "for embeddings of texts",
    "{}.classifier.output_labels": "for the classification of texts",
}
"""Further keys without an effect, `{}` for the architecture, with the reason."""


class HeaderKeys:
    """The keys of a header, by full name, or by a name that begins with a dot: `.rope.freq_base`.

    Each method marks its key as read, and returns None for a missing key. Raises `ModelLoadError`
    with the key's name for values of another type and for numbers out of range.
    """

    def __init__(self, path: Path, header: GGUFHeader) -> None:
        self.path, self.header = path, header
        self._values: Mapping[str, Any] = header.values
        self._unread = set(header.values)
        for key, value in self._values.items():
            numbers = value.values or () if isinstance(value, GGUFArray) else (value,)
            if any(isinstance(item, float) and not math.isfinite(item) for item in numbers):
                raise self.refusal(key, "is not a finite number")

    def full_name(self, key: str) -> str:
        """`.rope.freq_base` as `llama.rope.freq_base`."""
        return f"{self.header.architecture}{key}" if key.startswith(".") else key

    def __contains__(self, key: str) -> bool:
        return self.full_name(key) in self._values

    def refusal(self, key: str, why: str) -> ModelLoadError:
        """The error for a key, which says its value and `why`."""
        name = self.full_name(key)
        value = self._values.get(name)
        shown = f"an array of {value.length}" if isinstance(value, GGUFArray) else repr(value)[:80]
        return ModelLoadError(
            f"{self.path}: the key {name} ({shown}) {why}; convert the model again, or take it as "
            "safetensors"
        )

    def raw(self, key: str) -> Any:
        """The value of any kind."""
        name = self.full_name(key)
        self._unread.discard(name)
        return self._values.get(name)

    def count(self, key: str, *, low: int = 1, high: int = _LARGEST_COUNT) -> int | None:
        """A whole number from `low` to `high`."""
        value = self.raw(key)
        if value is None:
            return None
        if isinstance(value, GGUFArray):
            raise self.refusal(key, "has several values, as if layers differ: not supported")
        if type(value) is not int:
            raise self.refusal(key, "is not a whole number")
        if not low <= value <= high:
            raise self.refusal(key, f"is not in the range from {low} to {high}")
        return value

    def number(
        self, key: str, *, above: float = 0.0, maximum: float = math.inf, zero: bool = False
    ) -> float | None:
        """A number larger than `above`, at most `maximum`; with `zero`, also 0."""
        value = self.raw(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refusal(key, "is not a number")
        if not (above < value <= maximum or (zero and value == 0)):
            bound = "" if maximum == math.inf else f" and at most {maximum:g}"
            raise self.refusal(key, f"is not above {above:g}{bound}")
        return float(value)

    def flag(self, key: str) -> bool | None:
        """True or False."""
        value = self.raw(key)
        if value is not None and type(value) is not bool:
            raise self.refusal(key, "is neither true nor false")
        return value

    def text(self, key: str) -> str | None:
        """A string."""
        value = self.raw(key)
        if value is not None and not isinstance(value, str):
            raise self.refusal(key, "is not a string")
        return value

    def expect(self, key: str, allowed: tuple[object, ...], why: str) -> None:
        """Refuse the key unless it is missing or has one of the values."""
        value = self.raw(key)
        if value is not None and not any(
            value == item and isinstance(value, bool) == isinstance(item, bool) for item in allowed
        ):
            raise self.refusal(key, why)

    def refuse_unread(self) -> None:
        """Raise for unread keys that may have an effect."""
        architecture = str(self.header.architecture)
        idle = {key.format(architecture) for key in _IDLE}
        groups = tuple(_IDLE_GROUPS)
        unknown = sorted(key for key in self._unread - idle if not key.startswith(groups))
        if unknown:
            more = f" ({len(unknown)} such keys)" if len(unknown) > 1 else ""
            raise self.refusal(
                unknown[0],
                f"is one that pyengine does not read{more}, and the model may depend on it",
            )
