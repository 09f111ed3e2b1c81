"""The factor by which a tokenizer can lengthen a text. Nested replacements multiply it."""

import base64
import json
from typing import Any

from pyengine.errors import ModelLoadError

MAX_GROWTH = 1000
"""Bytes for each byte of a text; the tokenizers of published models stay below 200."""


def check_growth(tokenizer: Any) -> None:
    """Raise `ModelLoadError` if the normalizer or the decoder could make texts too long.

    Slow tokenizers, which have neither, are not checked.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    for part in ("normalizer", "decoder"):
        step = getattr(backend, part, None)
        growth = 1.0 if step is None else _growth(json.loads(step.__getstate__()))
        if growth > MAX_GROWTH:
            raise ModelLoadError(
                f"the {part} of the tokenizer could make a text {growth:.3g} times as long; the "
                f"limit is {MAX_GROWTH}: this tokenizer would fill the memory, use another model"
            )


def _growth(step: Any) -> float:
    """A bound on the bytes that a step makes of one byte."""
    match step:
        case {"type": "Sequence"}:
            growth = 1.0
            for inner in step.get("normalizers") or step.get("decoders") or ():
                growth *= _growth(inner)
            return growth
        case {"type": "Replace", "pattern": pattern, "content": str(content)}:
            length = len(content.encode())
            text = pattern.get("String")
            # A regular expression may match between any two bytes.
            return max(1.0, length / len(text.encode())) if text else 1.0 + length
        case {"type": "Precompiled", "precompiled_charsmap": str(coded)}:
            data = base64.b64decode(coded)
            texts = data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")
            return float(max(1, *map(len, texts)))
    return 1.0
