"""The pool of KV blocks: who holds how many, which are free, and which can be found again by their digest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from services.scheduler.core.kv_events import Cleared, KvEvent, Removed, Stored

NULL_BLOCK = 0
"""Never handed out: an executor may point unused table entries at it. Here it is the head of the free list."""


class BlockPool:
    """Block ids [1, num_blocks) with reference counts, and the prefix cache.

    Free blocks form a circular doubly linked list through two arrays, block 0 its head, so that any block leaves it in
    O(1). The front is taken first. A freed block that nobody can find joins at the front; one that is cached joins at
    the back and stays findable until it comes to the front and is taken: the list is the eviction order too.

        _next:  0 -> 5 -> 2 -> 7 -> 0        take from 5; give back 3 before 5, or behind 7 when it is cached

    A cached block is a full one that was given its digest; equal digests, equal keys and values. One block a digest: a
    second block with the same content stays unnamed and is worth nothing once it is free.
    """

    def __init__(self, num_blocks: int, events: list[KvEvent] | None = None) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool of {num_blocks} blocks holds nothing: block 0 is the null block; 2 are needed")
        self.total = num_blocks - 1
        self.num_free = self.total
        self.events: list[KvEvent] = [] if events is None else events
        """What happens to the cache is appended here; the owner empties it."""
        self._holders = [0] * num_blocks
        self._next = [*range(1, num_blocks), NULL_BLOCK]
        self._previous = [num_blocks - 1, *range(num_blocks - 1)]
        self._stored: list[Stored | None] = [None] * num_blocks
        self._by_digest: dict[bytes, int] = {}

    @property
    def num_held(self) -> int:
        """Blocks that somebody holds."""
        return self.total - self.num_free

    @property
    def num_cached(self) -> int:
        """Blocks that can be found, held or free."""
        return len(self._by_digest)

    def holders(self, block: int) -> int:
        """How many hold `block`."""
        return self._holders[block]

    # -- free and held

    def take(self, count: int) -> list[int]:
        """`count` free blocks, held once each. Raises ValueError when fewer are free: the caller asks first."""
        if count > self.num_free:
            raise ValueError(f"{count} blocks wanted, {self.num_free} free")
        taken = []
        for _ in range(count):
            block = self._next[NULL_BLOCK]
            self._unlink(block)
            self._holders[block] = 1
            self._forget(block)
            taken.append(block)
        return taken

    def hold(self, block: int) -> None:
        """One holder more; a free block leaves the free list."""
        if self._holders[block] == 0:
            self._unlink(block)
        self._holders[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One holder less for each. Those that nobody holds any more become free, and cached ones stay longest that
        come last: a request gives its blocks back from the end, so that its prefix outlives its tail."""
        for block in blocks:
            if self._holders[block] == 0:
                raise ValueError(f"block {block} is released, but nobody holds it")
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._link(block)

    def free_list(self) -> list[int]:
        """Free blocks in the order they will be taken; O(free), for checks."""
        blocks = []
        block = self._next[NULL_BLOCK]
        while block != NULL_BLOCK:
            blocks.append(block)
            block = self._next[block]
        return blocks

    # -- the prefix cache

    def match(self, digests: Sequence[bytes]) -> list[int]:
        """The cached blocks of the longest prefix of `digests`; held by nobody on its account yet."""
        found = []
        for digest in digests:
            block = self._by_digest.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def store(self, block: int, stored: Stored) -> None:
        """Makes a full, held block findable, unless its content is already."""
        if self._stored[block] is None and stored.digest not in self._by_digest:
            self._stored[block] = stored
            self._by_digest[stored.digest] = block
            self.events.append(stored)

    def forget(self, digests: Iterable[bytes]) -> None:
        """Makes what has one of `digests` unfindable; free blocks keep their place in the list."""
        for digest in digests:
            if (block := self._by_digest.get(digest)) is not None:
                self._forget(block)

    def flush(self) -> int:
        """Makes every block unfindable; how many were. Free ones keep their place in the list."""
        flushed = len(self._by_digest)
        self._stored = [None] * len(self._stored)
        self._by_digest = {}
        if flushed:
            self.events.append(Cleared())
        return flushed

    def cached(self) -> list[Stored]:
        """All that can be found, in the order it was stored."""
        return [stored for block in self._by_digest.values() if (stored := self._stored[block]) is not None]

    def _forget(self, block: int) -> None:
        if (stored := self._stored[block]) is not None:
            self._stored[block] = None
            del self._by_digest[stored.digest]
            self.events.append(Removed(stored.digest))

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before] = after
        self._previous[after] = before
        self.num_free -= 1

    def _link(self, block: int) -> None:
        first = self._stored[block] is None
        after = self._next[NULL_BLOCK] if first else NULL_BLOCK
        before = self._previous[after]
        self._next[before] = self._previous[after] = block
        self._previous[block], self._next[block] = before, after
        self.num_free += 1
