"""Bodies of both routes, and the header that names fields without effect."""

from typing import Any

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "What is the capital of France?"}
ASSISTANT = {"role": "assistant", "content": "Paris"}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER], "max_tokens": 2, "temperature": 0, "ignore_eos": True},
    COMPLETIONS: {"prompt": [5, 6], "max_tokens": 2, "temperature": 0, "ignore_eos": True},
}
HEADER = "x-pyengine-ignored"
ROUTES = (CHAT, COMPLETIONS)
