"""The backends and families that a run tries."""

from benches.gpu_check.models import FAMILIES
from benches.gpu_check.rows import Setup
from pyengine.attention.choice import backend_names

CANNOT_SERVE = "cannot serve: "
"""The registry says so of a backend that was asked for by name, and goes on with the reason."""
TRIED_IN_VAIN = "it was tried and failed"
"""The registry says so of a backend that is there and does not import or compile."""


def backends(setup: Setup) -> list[str]:
    """All that the registry knows, or those that were asked for."""
    return [name for name in backend_names() if setup.backends is None or name in setup.backends]


def formats(setup: Setup) -> tuple[str, ...]:
    """The number formats in which a backend is tried, until it serves one."""
    return ("bfloat16",) if setup.on_cuda else ("bfloat16", "float32")


def families(setup: Setup) -> list[str]:
    """All that there are, or those that were asked for."""
    return [name for name in FAMILIES if setup.families is None or name in setup.families]
