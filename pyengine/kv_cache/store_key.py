"""The secret key of a KV store, from the environment."""

import os

from pyengine.errors import ConfigurationError

VARIABLE = "PYENGINE_KV_CACHE_KEY"
"""64 hexadecimal digits. Entries that were not written with it are not read."""


def store_key() -> bytes | None:
    """The key, 32 bytes; None if there is none. Raises `ConfigurationError` for another text."""
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != 32:
        raise ConfigurationError(
            f"{VARIABLE} has {len(text)} characters and is no key: it must be 64 hexadecimal "
            "digits; `openssl rand -hex 32` makes some"
        )
    return key
