"""Turns between tenants: the one that has used the least goes first."""

from collections import Counter
from collections.abc import Iterable


class Turns:
    """Seconds that each tenant has used of a shared resource.

    A tenant is never more than `max_lag` seconds behind the one that has used the most: unused
    time is not saved up beyond that, and a tenant that arrives starts that far behind. So no
    tenant waits for more than what the others may use until they have caught up.
    """

    def __init__(self, max_lag: float) -> None:
        self._max_lag = max_lag
        self._present: Counter[bytes] = Counter()
        self._used: dict[bytes, float] = {}
        """Of tenants that are less than `max_lag` behind, and some others."""
        self._max_used = 0.0
        self._alone = 0.0
        """Seconds that a tenant without others has used; charged when another one arrives."""
        self.are_several = False
        """True if more than one tenant has work."""

    @property
    def tenants(self) -> list[bytes]:
        """Tenants with work."""
        return list(self._present)

    def count(self, tenant: bytes) -> int:
        """The work of a tenant: calls of `enter` without one of `leave`."""
        return self._present[tenant]

    def enter(self, tenant: bytes) -> None:
        """Count one more piece of a tenant's work."""
        if self._alone and tenant not in self._present:
            self._charge_alone()
        self._present[tenant] += 1
        self.are_several = len(self._present) > 1

    def leave(self, tenant: bytes) -> None:
        """Count one piece less. When no tenant has work left, all are even again."""
        self._present[tenant] -= 1
        if self._present[tenant] <= 0:
            del self._present[tenant]
            self.are_several = len(self._present) > 1
            if not self._present:
                self.clear()

    def clear(self) -> None:
        """Forget all tenants."""
        self._present.clear()
        self._used.clear()
        self._max_used = self._alone = 0.0
        self.are_several = False

    def used(self, tenant: bytes) -> float:
        """Seconds that a tenant has used, from a common start."""
        floor = self._max_used - self._max_lag
        return max(self._used.get(tenant, floor), floor)

    def charge_alone(self, seconds: float) -> None:
        """Charge the only tenant with work."""
        self._alone += seconds

    def _charge_alone(self) -> None:
        for tenant in self._present:
            self.charge(tenant, self._alone)
        self._alone = 0.0

    def charge(self, tenant: bytes, seconds: float) -> None:
        """Add to what a tenant has used."""
        self._used[tenant] = used = self.used(tenant) + seconds
        self._max_used = max(self._max_used, used)
        floor = self._max_used - self._max_lag
        if len(self._used) > 2 * len(self._present) + 8:
            self._used = {name: known for name, known in self._used.items() if known > floor}

    def in_order(self, tenants: Iterable[bytes]) -> list[bytes]:
        """Tenants by use, the least first; equal ones in the given order."""
        return sorted(tenants, key=self.used)
