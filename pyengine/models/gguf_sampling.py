"""Defaults for requests in the header of a GGUF file."""

from collections.abc import Mapping

from pyengine.models.config import checked_sampling
from pyengine.models.gguf_file import GGUFFile
from pyengine.models.gguf_keys import HeaderKeys

_PREFIX = "general.sampling"


def gguf_sampling(file: GGUFFile) -> Mapping[str, object]:
    """Fields of `SamplingParams` that the header sets, with their values.

    Other keys of the group (`mirostat`, `xtc_threshold`) have no counterpart here. Raises
    `ModelLoadError` for values that no request could have.
    """
    keys = HeaderKeys(file.path, file.header)
    fields = {
        "temperature": keys.number(f"{_PREFIX}.temp", zero=True),
        "top_k": keys.count(f"{_PREFIX}.top_k", low=0),
        "top_p": keys.number(f"{_PREFIX}.top_p", maximum=1.0),
        "min_p": keys.number(f"{_PREFIX}.min_p", maximum=1.0, zero=True),
        "repetition_penalty": keys.number(f"{_PREFIX}.penalty_repeat"),
    }
    declared = {name: value for name, value in fields.items() if value is not None}
    return checked_sampling(declared, f"the header of {file.path}")
