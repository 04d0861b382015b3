"""The audit of the core's books, for tests: who holds what, counted from both sides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from services.scheduler.core.blocks import BlockPool
from services.scheduler.core.request import NO_SLOT, Request
from services.scheduler.core.slots import SlotPool
from services.scheduler.core.step import InvariantError
from services.scheduler.core.tenants import Tenants


def check_blocks(pool: BlockPool, holding: Iterable[Request]) -> None:
    """Raises InvariantError unless free + held is every block once, and each has the holders its requests say."""
    holders: dict[int, int] = {}
    for request in holding:
        for block in request.blocks:
            holders[block] = holders.get(block, 0) + 1
    free = pool.free_list()
    counted = {block: pool.holders(block) for block in range(1, pool.total + 1)}
    held = {block: count for block, count in counted.items() if count}
    if held != holders:
        raise InvariantError(f"the pool says that blocks are held {held} times, the requests {holders}")
    if sorted([*free, *held]) != list(counted) or len(free) != pool.num_free:
        raise InvariantError(f"free {sorted(free)} and held {sorted(held)} are not every block once")
    found = [pool.match([stored.digest]) for stored in pool.cached()]
    if len({block for (block,) in found}) != pool.num_cached:
        raise InvariantError(f"{pool.num_cached} blocks are cached, {found} can be found")


def check_slots(slots: SlotPool, holding: Iterable[Request]) -> None:
    """Raises InvariantError unless each request that holds blocks has a slot of its own."""
    held = [request.slot for request in holding]
    if len(set(held)) != len(held) or len(held) != slots.num_held or NO_SLOT in held:
        raise InvariantError(f"slots {sorted(held)} are held by requests, the pool counts {slots.num_held}")


def check_waiting(waiting: Iterable[Request]) -> None:
    """Raises InvariantError if a request that waits holds anything."""
    for request in waiting:
        if request.blocks or request.slot != NO_SLOT or request.num_computed or request.ended:
            raise InvariantError(f"{request.key} waits, but holds something or has ended")


def check_tenants(tenants: Tenants, requests: Collection[Request], waiting: Iterable[Request]) -> None:
    """Raises InvariantError unless the accounts count the requests there are."""
    for request in requests:
        if tenants.num_waiting(request.account.tenant) != request.account.num_waiting:
            raise InvariantError(f"{request.key} is on another account than its tenant's")
    counted = Counter(request.account.tenant for request in requests)
    queued = Counter(request.account.tenant for request in waiting)
    for tenant, count in counted.items():
        if tenants.num_requests(tenant) != count or tenants.num_waiting(tenant) != queued[tenant]:
            raise InvariantError(f"tenant {tenant!r} has {count} requests, {queued[tenant]} wait; its account differs")
    if len(tenants) != len(counted):
        raise InvariantError(f"{len(tenants)} accounts are open, {len(counted)} tenants have requests")
