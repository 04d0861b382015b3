"""The requests that hold a slot and blocks, and the pools they hold them of; of one epoch, the next starts empty."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from services.scheduler.core.blocks import BlockPool
from services.scheduler.core.kv_events import KvEvent, Stored
from services.scheduler.core.limits import Limits
from services.scheduler.core.placement import Placement
from services.scheduler.core.request import NO_SLOT, Request, by_rank
from services.scheduler.core.slots import SlotPool

ChainedDigest = Callable[[bytes, bytes], bytes]
"""(digest of the block before, column of the block's ids) to the block's digest."""

_NO_BLOCK = 1 << 62
"""`next_stored` of a request whose blocks are not to be found again."""


class Residents:
    """`running` is by rank. Without `chained_digest` no block is found again."""

    def __init__(self, limits: Limits, chained_digest: ChainedDigest | None, kv_events: list[KvEvent]) -> None:
        self.pool = BlockPool(limits.num_blocks, kv_events)
        self.slots = SlotPool(limits.max_slots, limits.max_in_flight)
        self.running: list[Request] = []
        self._leaving: list[Request] = []  # ended while a step with a row of theirs is in flight
        self._block_tokens = limits.block_tokens
        self._chained_digest = chained_digest

    def __iter__(self) -> Iterator[Request]:
        """All that hold something, those that have ended included."""
        return iter([*self.running, *self._leaving])

    def caches(self, request: Request) -> bool:
        """Whether its blocks can be found by others."""
        return self._chained_digest is not None and request.submission.root_digest != b""

    def admit(self, request: Request, placement: Placement) -> tuple[int, int] | None:
        """Gives it a slot and blocks for all its tokens; the (source, destination) block to copy, if any."""
        insort(self.running, request, key=by_rank)
        for block in placement.shared:
            self.pool.hold(block)
        new_blocks = self.pool.take(placement.num_new)
        request.slot = self.slots.take()
        request.blocks = placement.shared + new_blocks
        request.room_tokens = len(request.blocks) * self._block_tokens
        request.num_computed = request.num_stored = computed = placement.num_computed
        next_full = (computed // self._block_tokens + 1) * self._block_tokens
        stores = self.caches(request) and (placement.sibling is None or placement.sibling.next_stored != _NO_BLOCK)
        request.next_stored = next_full if stores else _NO_BLOCK
        return None if placement.copied is None else (placement.copied, new_blocks[0])

    def grow(self, request: Request) -> int:
        """One block more, of those that are free."""
        (block,) = self.pool.take(1)
        request.blocks.append(block)
        request.room_tokens += self._block_tokens
        return block

    def evict(self, request: Request) -> None:
        """Takes back all it holds; it goes on later."""
        self._remove(request)
        self._release(request)

    def leave(self, request: Request, applied_step: int) -> None:
        """Takes back all that an ended request holds, once no step in flight has a row of it."""
        self._remove(request)
        if request.last_step > applied_step:
            self._leaving.append(request)
        else:
            self._release(request)

    def release_leaving(self, applied_step: int) -> None:
        """After a step was applied."""
        if not self._leaving:
            return
        still = [request for request in self._leaving if request.last_step > applied_step]
        for request in self._leaving:
            if request.last_step <= applied_step:
                self._release(request)
        self._leaving = still

    def store(self, request: Request) -> None:
        """Makes the blocks findable that `num_stored` says are full now."""
        assert self._chained_digest is not None
        block_tokens, digests = self._block_tokens, request.digests
        while request.num_stored >= request.next_stored:
            index = request.next_stored // block_tokens - 1
            parent = digests[index - 1] if index else request.submission.root_digest
            column = request.column(request.next_stored - block_tokens, request.next_stored)
            if index == len(digests):
                digests.append(self._chained_digest(parent, column))
            self.pool.store(request.blocks[index], Stored(digests[index], parent, column))
            request.next_stored += block_tokens

    def distrust(self, request: Request) -> None:
        """Makes the content of a failed request unfindable, whoever stored it: a chunk before the row that failed may
        have spoiled it. Who shares blocks with it keeps them."""
        self.pool.forget(request.digests)

    def flush(self) -> int:
        """Forgets what can be found, and what running requests would still add; how many blocks that were."""
        for request in self.running:
            request.next_stored = _NO_BLOCK
        return self.pool.flush()

    def held(self) -> list[str]:
        """What is held, for people; nothing when idle."""
        pool, slots = self.pool, self.slots
        counts = [
            (f"{pool.num_held} of {pool.total} blocks", pool.num_held),
            (f"{slots.num_held} of {slots.count} slots", slots.num_held),
            (f"{len(self.running)} running requests", len(self.running)),
            (f"{len(self._leaving)} leaving requests", len(self._leaving)),
        ]
        return [what for what, count in counts if count]

    def _remove(self, request: Request) -> None:
        del self.running[bisect_left(self.running, request.rank, key=by_rank)]

    def _release(self, request: Request) -> None:
        self.pool.release(reversed(request.blocks))  # so that its prefix outlives its tail in the cache
        self.slots.release(request.slot)
        request.blocks, request.slot, request.room_tokens, request.num_computed = [], NO_SLOT, 0, 0
