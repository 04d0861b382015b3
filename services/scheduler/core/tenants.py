"""Fair shares between tenants: the virtual token counter.

Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), algorithm 2: each tenant has a counter of what it
was served, prompt tokens computed and output tokens weighted; the waiting tenant with the lowest counter is next. One
that comes back from having nothing queued is lifted to the lowest of those that wait, or where none does to the last
that did, so idleness earns no credit; what
any two tenants that always have work are served differs by a bounded amount, and capacity is never left idle.
"""

from __future__ import annotations

PROMPT_WEIGHT = 1
OUTPUT_WEIGHT = 2
"""An output token costs more than a prompt token; the paper's weights, which follow what is charged for them."""

MAX_IDLE = 4096
"""Counters remembered of tenants that have no request; past it the one idle longest is forgotten."""


class Account:
    """One tenant's. `served` is weighted tokens."""

    __slots__ = ("num_requests", "num_waiting", "served", "tenant")

    def __init__(self, tenant: str, served: int) -> None:
        self.tenant = tenant
        self.served = served
        self.num_waiting = 0
        self.num_requests = 0


class Tenants:
    """The accounts of all tenants that have requests, and of those that had some lately."""

    def __init__(self) -> None:
        self._active: dict[str, Account] = {}
        self._idle: dict[str, Account] = {}  # in the order they became idle
        self._last_to_leave_queue = Account("", 0)

    def num_waiting(self, tenant: str) -> int:
        """Requests of `tenant` that wait."""
        account = self._active.get(tenant)
        return account.num_waiting if account is not None else 0

    def num_requests(self, tenant: str) -> int:
        """Requests of `tenant` that have not ended."""
        account = self._active.get(tenant)
        return account.num_requests if account is not None else 0

    def open(self, tenant: str, num_requests: int) -> Account:
        """The account that new requests of `tenant` go to."""
        account = self._active.get(tenant)
        if account is None:
            account = self._active[tenant] = self._idle.pop(tenant) if tenant in self._idle else Account(tenant, 0)
        if account.num_waiting == 0:
            waiting = [other.served for other in self._active.values() if other.num_waiting]
            account.served = max(account.served, min(waiting, default=self._last_to_leave_queue.served))
        account.num_requests += num_requests
        return account

    def joined_queue(self, account: Account) -> None:
        """A request of it waits."""
        account.num_waiting += 1

    def left_queue(self, account: Account) -> None:
        """One fewer waits."""
        account.num_waiting -= 1
        if account.num_waiting == 0:
            self._last_to_leave_queue = account  # and not its counter: what it is served from now on counts too

    def ended(self, account: Account) -> None:
        """A request of it is over."""
        account.num_requests -= 1
        if account.num_requests == 0:
            self._idle[account.tenant] = self._active.pop(account.tenant)
            if len(self._idle) > MAX_IDLE:
                del self._idle[next(iter(self._idle))]

    def __len__(self) -> int:
        return len(self._active)
