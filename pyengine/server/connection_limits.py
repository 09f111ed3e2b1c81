"""Limits on the number of connections: in all, per client address, and a reserve for /health."""

import asyncio
import ipaddress
from collections import Counter, OrderedDict, deque
from collections.abc import Callable

NUM_RESERVED = 32
"""Connections above the limits, which get an answer from /health only."""


_SECONDS_BETWEEN_READS = 0.005


def network_of(host: str) -> str:
    """The part of an address that one client has: an IPv4 address, or the /64 of an IPv6 one."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))


class ConnectionLimits:
    """The open connections of a server. For one thread.

    At most `max_connections` are served, of which one address has at most `max_pending` that have
    not sent a valid request yet.
    """

    def __init__(self, max_connections: int = 1024, max_pending: int | None = None) -> None:
        self._max_connections = max_connections
        self._max_pending = max(1, max_connections // 2) if max_pending is None else max_pending
        self._num_served = 0
        self._pending: Counter[str] = Counter()
        self._reserved: OrderedDict[object, Callable[[], None]] = OrderedDict()

    def open(self, network: str | None) -> bool:
        """Count a new connection of a network, as pending; None for a Unix socket.

        False, and not counted, if it exceeds a limit.
        """
        if self._num_served >= self._max_connections:
            return False
        if network is not None:
            if self._pending[network] >= self._max_pending:
                return False
            self._pending[network] += 1
        self._num_served += 1
        return True

    def admit(self, network: str | None) -> None:
        """Count a pending connection as one that has sent a valid request."""
        if network is not None:
            self._pending[network] -= 1
            if not self._pending[network]:
                del self._pending[network]

    def close(self) -> None:
        """Count a connection no longer. Call `admit` before if it was pending."""
        self._num_served -= 1

    def reserve(self, connection: object, refuse: Callable[[], None]) -> None:
        """Keep a connection above the limits. The oldest one is refused if there are too many."""
        self._reserved[connection] = refuse
        if len(self._reserved) > NUM_RESERVED:
            _, refuse_oldest = self._reserved.popitem(last=False)
            refuse_oldest()

    def release(self, connection: object) -> None:
        """Forget a connection above the limits, which has a request or is closed."""
        self._reserved.pop(connection, None)


class PacedReads:
    """Turns of connections whose data is dropped: one read at a time, all together.

    What refused clients send takes a bounded share of the event loop's time.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()

    def wait(self, loop: asyncio.AbstractEventLoop, read: Callable[[], None]) -> None:
        """Call `read` when it is the connection's turn."""
        self._waiting.append(read)
        if len(self._waiting) == 1:
            loop.call_later(_SECONDS_BETWEEN_READS, self._next, loop)

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        self._waiting.popleft()()
        if self._waiting:
            loop.call_later(_SECONDS_BETWEEN_READS, self._next, loop)
