"""The pool of KV blocks: who holds how many, and which are free."""

from __future__ import annotations

from collections.abc import Iterable

NULL_BLOCK = 0
"""Never handed out: an executor may point unused table entries at it. Here it is the head of the free list."""


class BlockPool:
    """Block ids [1, num_blocks) with reference counts.

    Free blocks form a circular doubly linked list through two arrays, block 0 its head, so that any block leaves it in
    O(1). The front is taken first and freed blocks join at the back, which makes the list the eviction order too.

        _next:  0 -> 5 -> 2 -> 7 -> 0        take from 5, give back behind 7
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool of {num_blocks} blocks holds nothing: block 0 is the null block; 2 are needed")
        self.total = num_blocks - 1
        self.num_free = self.total
        self._holders = [0] * num_blocks
        self._next = [*range(1, num_blocks), NULL_BLOCK]
        self._previous = [num_blocks - 1, *range(num_blocks - 1)]

    @property
    def num_held(self) -> int:
        """Blocks that somebody holds."""
        return self.total - self.num_free

    def holders(self, block: int) -> int:
        """How many hold `block`."""
        return self._holders[block]

    def take(self, count: int) -> list[int]:
        """`count` free blocks, held once each. Raises ValueError when fewer are free: the caller asks first."""
        if count > self.num_free:
            raise ValueError(f"{count} blocks wanted, {self.num_free} free")
        taken = []
        for _ in range(count):
            block = self._next[NULL_BLOCK]
            self._unlink(block)
            self._holders[block] = 1
            taken.append(block)
        return taken

    def hold(self, block: int) -> None:
        """One holder more; a free block leaves the free list."""
        if self._holders[block] == 0:
            self._unlink(block)
        self._holders[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One holder less for each; those that nobody holds any more join the free list in the order given."""
        for block in blocks:
            if self._holders[block] == 0:
                raise ValueError(f"block {block} is released, but nobody holds it")
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._link_last(block)

    def free_list(self) -> list[int]:
        """Free blocks in the order they will be taken; O(free), for checks."""
        blocks = []
        block = self._next[NULL_BLOCK]
        while block != NULL_BLOCK:
            blocks.append(block)
            block = self._next[block]
        return blocks

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before] = after
        self._previous[after] = before
        self.num_free -= 1

    def _link_last(self, block: int) -> None:
        last = self._previous[NULL_BLOCK]
        self._next[last] = block
        self._previous[block] = last
        self._next[block] = NULL_BLOCK
        self._previous[NULL_BLOCK] = block
        self.num_free += 1
