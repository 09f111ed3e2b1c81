"""The server's settings, each written once, as those of the engine are.

`create_app` and `pyengine serve` read them here. Imports the standard library only.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pyengine.errors import ConfigurationError
from pyengine.utils.settings import check_settings, setting
from pyengine.utils.validation import shown

LogFormat: TypeAlias = Literal["text", "json", "none"]

_MIB = 1 << 20
_ABOVE_0 = (
    *("max_body_mib", "max_inflight_mib", "header_timeout", "body_timeout", "drain_timeout"),
    "template_timeout",
)


def _several(help: str, **form: Any) -> Any:
    """A setting of any number of texts; on the command line the option is given again for each."""
    return setting(
        (),
        f"{help}; may be repeated",
        parse=list[str] | None,
        convert=lambda texts: tuple(texts or ()),
        **form,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of a server. Bad values raise `ConfigurationError` at once."""

    host: str = setting(
        "127.0.0.1", "address to listen on; 0.0.0.0 for all addresses of this machine"
    )
    port: int = setting(8000, "port to listen on; 0 for any free port", minimum=0)
    uds: str | None = setting(None, "path of a Unix socket to listen on instead")
    root_path: str = setting("", "path prefix that a proxy removes")
    served_model_name: tuple[str, ...] = _several(
        "name of the model for clients; default: the name it was opened by",
    )
    lora_modules: tuple[str, ...] = _several(
        "LoRA adapter to load at startup, as NAME=FOLDER; needs enable_lora; clients name it as "
        "their model",
    )
    api_key: tuple[str, ...] = _several(
        "key that clients must send as `Authorization: Bearer KEY`; default: no key is needed; "
        "PYENGINE_API_KEY keeps it out of the process list",
        env="PYENGINE_API_KEY",
        repr=False,
    )
    admin_key: tuple[str, ...] = _several(
        "key for operators: /kv, all of /metrics, other keys' requests; a single --api-key is also "
        "an admin key; PYENGINE_ADMIN_KEY keeps it out of the process list",
        env="PYENGINE_ADMIN_KEY",
        repr=False,
    )
    insecure: bool = setting(False, "without a key, allow addresses that other machines can reach")
    allowed_host: tuple[str, ...] = _several(
        "host name that clients use, for the check of the Host header; * for any",
    )
    max_priority: float = setting(
        0.0, "maximum distance of a request's `priority` from 0; no limit for admin keys", minimum=0
    )
    share_prefix_cache: bool = setting(
        False,
        "share cached blocks among all keys; by default, each of several keys has its own cache",
    )
    exact_cached_tokens: bool = setting(
        False,
        "count `cached_tokens` exactly, which reveals how many tokens of a prompt other clients "
        "have sent before; by default, whole blocks are counted",
    )
    cors_origin: tuple[str, ...] = _several(
        "origin whose pages may call the server from a browser; * for all"
    )
    ssl_keyfile: Path | None = setting(None, "file with the private key, for HTTPS")
    ssl_certfile: Path | None = setting(None, "file with the certificate, for HTTPS")
    max_body_mib: float = setting(
        4.0,
        "largest request body in MiB; larger ones get 413; parsing a body delays other requests by "
        "up to 10 ms per MiB",
    )
    max_answer_tokens: int | None = setting(
        None,
        "maximum number of tokens of an answer; requests for more get 400; default: as many as the "
        "context holds",
        minimum=1,
    )
    max_prompt_logprobs: int = setting(
        1 << 18,
        "maximum number of log-probabilities of prompts in a response: prompt tokens times "
        "`prompt_logprobs` (with `echo`, `logprobs`), and times `n` for completions, which repeat "
        "the prompt; more get 400",
        minimum=1,
    )
    max_answer_logprobs: int = setting(
        1 << 22,
        "maximum number of log-probabilities of answers in a response: `n` times the number of "
        "prompts, `max_tokens` and `logprobs` (chats: `top_logprobs`); more get 400",
        minimum=1,
    )
    max_inflight_mib: float = setting(
        64.0,
        "MiB of all bodies that were received but are not queued yet; more get 503; each of "
        "several keys may use half of it",
    )
    max_connections: int = setting(
        1024, "maximum number of connections; more get 503 and are closed", minimum=1
    )
    max_pending_connections: int | None = setting(
        None,
        "maximum number of connections of one client address (of one /64 network in IPv6) that "
        "have not sent a valid request yet, with a key if the server has keys; default: half of "
        "max_connections",
        minimum=1,
    )
    header_timeout: float = setting(
        10.0, "seconds within which the headers of a request must arrive"
    )
    body_timeout: float = setting(
        60.0, "seconds within which a body must arrive, and a client must read its answer"
    )
    keep_alive: int = setting(5, "seconds that an idle connection stays open", minimum=1)
    drain_timeout: float = setting(
        60.0,
        "seconds that running requests have to finish after SIGTERM or Ctrl-C; then, or at a "
        "second signal, they are aborted",
    )
    template_variable: tuple[str, ...] = setting(
        ("enable_thinking", "thinking", "reasoning_effort"),
        "chat template variable that `chat_template_kwargs` of a request may set; may be repeated; "
        "replaces the default enable_thinking, thinking and reasoning_effort",
        parse=list[str] | None,
        convert=lambda texts: tuple(texts or ()),
    )
    strict: bool = setting(
        False,
        "refuse request fields that have no effect, instead of listing them in the header "
        "x-pyengine-ignored",
    )
    log_format: LogFormat = setting(
        "text",
        "log line for each ended request: text, json or none; never contains prompts",
    )
    show_prompts: bool = setting(
        False, "show the beginning of each prompt on the page /kv, which needs an admin key"
    )
    template_timeout: float = setting(5.0, "seconds that a chat template may take")

    def __post_init__(self) -> None:
        check_settings(self)
        if self.port > 65535:
            raise ConfigurationError(f"port={self.port}: ports go up to 65535")
        for name in _ABOVE_0:
            if not 0 < getattr(self, name) < 1e9:
                raise ConfigurationError(f"{name}={getattr(self, name)}: it must be above 0")
        if self.max_inflight_bytes < 2 * self.max_body_bytes:
            raise ConfigurationError(
                f"max_inflight_mib={self.max_inflight_mib:g} must be at least twice "
                f"max_body_mib={self.max_body_mib:g}"
            )
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigurationError(
                "ssl_keyfile and ssl_certfile belong together: give both, or none of them"
            )
        if set(self.api_key) & set(self.admin_key):
            raise ConfigurationError("admin_key and api_key have a key in common: give another one")
        if any(not key.isascii() or key != key.strip() or " " in key for key in self.keys):
            raise ConfigurationError(
                "api_key, admin_key: a key is made of ASCII characters without spaces, as it is "
                "sent in a header"
            )
        if self.root_path and (not self.root_path.startswith("/") or self.root_path == "/"):
            raise ConfigurationError(
                f"root_path={shown(self.root_path)}: it must begin with / and name a path, as /llm"
            )

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys, the admins' last."""
        return self.api_key + self.admin_key

    @property
    def max_inflight_bytes(self) -> int:
        """Bytes of bodies that have come and are not queued yet."""
        return int(self.max_inflight_mib * _MIB)

    @property
    def max_body_bytes(self) -> int:
        """The largest body of a request."""
        return int(self.max_body_mib * _MIB)
