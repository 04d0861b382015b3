"""The queue: by priority; in each what was preempted comes first, then tenants take turns, each in order of arrival."""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain, islice

from services.scheduler.core.request import Request, RequestKey, by_rank
from services.scheduler.core.tenants import Tenants


class _Level:
    """Requests of one priority."""

    def __init__(self) -> None:
        self.preempted: list[Request] = []  # by rank; few
        self.by_tenant: dict[str, OrderedDict[RequestKey, Request]] = {}

    @property
    def is_empty(self) -> bool:
        return not self.preempted and not self.by_tenant

    def __len__(self) -> int:
        return len(self.preempted) + sum(map(len, self.by_tenant.values()))

    def num_before(self, tenant: str) -> int:
        """Requests that start before another of `tenant` does, if all tenants are served alike."""
        own = len(self.by_tenant.get(tenant, ()))
        others = (min(len(queue), own + 1) for other, queue in self.by_tenant.items() if other != tenant)
        return len(self.preempted) + own + sum(others)

    def in_order(self) -> Iterator[Request]:
        """What was preempted; each tenant's first, the least served tenant's before others'; then the rest."""
        yield from self.preempted
        queues = sorted(self.by_tenant.values(), key=_turn) if len(self.by_tenant) > 1 else self.by_tenant.values()
        yield from [next(iter(queue.values())) for queue in queues]
        for queue in queues:
            yield from islice(queue.values(), 1, None)


def _turn(queue: OrderedDict[RequestKey, Request]) -> tuple[int, tuple[int, int]]:
    first = next(iter(queue.values()))
    return first.account.served, first.rank


class WaitingQueue:
    """Any request may leave at any time. `num_tokens` are those to be computed, as known when they joined;
    `num_preempted` counts those that were put back."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._levels: dict[int, _Level] = {}
        self._priorities: list[int] = []  # of the levels, lowest first: it runs first
        self._size = 0
        self.num_tokens = 0
        self.num_preempted = 0

    def __len__(self) -> int:
        return self._size

    def append(self, request: Request, num_tokens: int) -> None:
        """Joins behind its tenant's others of its priority; `num_tokens` of it are to be computed."""
        queues = self._level(request).by_tenant
        queues.setdefault(request.account.tenant, OrderedDict())[request.key] = request
        self._count(request, num_tokens)

    def put_back(self, request: Request) -> None:
        """What was preempted joins before all of its priority that never ran."""
        insort(self._level(request).preempted, request, key=by_rank)
        self.num_preempted += request.submission.is_counted
        self._count(request, request.num_tokens)

    def discard(self, request: Request) -> None:
        """Leaves, if it is there."""
        level = self._levels.get(request.rank[0])
        if level is None:
            return
        queue = level.by_tenant.get(request.account.tenant)
        if queue is not None and queue.get(request.key) is request:
            del queue[request.key]
            if not queue:
                del level.by_tenant[request.account.tenant]
        elif request in level.preempted:
            level.preempted.remove(request)
            self.num_preempted -= request.submission.is_counted
        else:
            return
        self._size -= 1
        self.num_tokens -= request.queued_tokens
        self._tenants.left_queue(request.account)
        if level.is_empty:
            del self._levels[request.rank[0]]
            self._priorities.remove(request.rank[0])

    def num_before(self, priority: int, tenant: str) -> int:
        """Requests that start before one that joins now, as far as can be said."""
        earlier = sum(len(level) for other, level in self._levels.items() if other < priority)
        return earlier + (self._levels[priority].num_before(tenant) if priority in self._levels else 0)

    def __iter__(self) -> Iterator[Request]:
        """In the order in which they are next, as things stand; valid until something joins or leaves."""
        return chain.from_iterable(self._levels[priority].in_order() for priority in self._priorities)

    def _level(self, request: Request) -> _Level:
        priority = request.rank[0]
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = _Level()
            insort(self._priorities, priority)
        return level

    def _count(self, request: Request, num_tokens: int) -> None:
        request.queued_tokens = num_tokens
        self._size += 1
        self.num_tokens += num_tokens
        self._tenants.joined_queue(request.account)
