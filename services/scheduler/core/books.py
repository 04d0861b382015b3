"""The audit of the core's books, for tests: who holds what, counted from both sides."""

from __future__ import annotations

from collections.abc import Iterable

from services.scheduler.core.blocks import BlockPool
from services.scheduler.core.request import NO_SLOT, Request
from services.scheduler.core.slots import SlotPool
from services.scheduler.core.step import InvariantError


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


def check_slots(slots: SlotPool, holding: Iterable[Request]) -> None:
    """Raises InvariantError unless each request that holds blocks has a slot of its own."""
    held = [request.slot for request in holding]
    if len(set(held)) != len(held) or len(held) != slots.num_held or NO_SLOT in held:
        raise InvariantError(f"slots {sorted(held)} are held by requests, the pool counts {slots.num_held}")


def check_waiting(waiting: Iterable[Request]) -> None:
    """Raises InvariantError if a request that waits holds anything."""
    for request in waiting:
        if request.blocks or request.slot != NO_SLOT or request.num_computed:
            raise InvariantError(f"{request.key} waits, but holds something")
