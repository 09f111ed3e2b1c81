"""The caller of a request, identified by its API key."""

from dataclasses import dataclass
from typing import Any

from pyengine.server.errors import ApiError

OPEN_PATH = "/health"
"""The only route that needs no key."""
CALLER = "pyengine.caller"
"""The scope's key for its `Caller`."""
ADMIT = "pyengine.admit"
"""The scope's key for a function to call once the sender of a request is known."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request, identified by its key.

    `name` stands for the key in metrics and logs: its position in the settings. `tenant` separates
    callers in queues and caches; it is empty if there is only one. `is_admin` is true
    for admin keys, for a single API key without an admin key, and for all callers of a server
    without keys. `max_priority` limits the absolute value of a request's priority.
    """

    key: bytes = b""
    name: str = ""
    is_admin: bool = True
    max_priority: float = 0
    tenant: bytes = b""


def caller_of(scope: Any) -> Caller:
    """The sender of a request that `KeyGuard` has accepted."""
    caller: Caller = scope[CALLER]
    return caller


def known_caller_of(scope: Any) -> Caller | None:
    """The sender of any request; None if it had no valid key or needed none."""
    caller: Caller | None = scope.get(CALLER)
    return caller


def require_admin(caller: Caller, action: str) -> None:
    """Raise `ApiError` (403) without an admin key."""
    if not caller.is_admin:
        raise ApiError(
            403,
            f"{action} needs the admin key (--admin-key), not a client's key",
            code="admin_key_needed",
        )


def path_of(scope: Any) -> str:
    """The path of a request without the server's root path."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(root) :] if root and path.startswith(root) else path
