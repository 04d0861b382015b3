"""When requests must have ended."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from services.scheduler.core.request import RequestKey

_SPARE = 64
"""Below so many there is nothing to gain from clearing out."""


class Deadlines:
    """A heap of times in ns. Entries outlive their requests; more than half of them gone, the rest is made anew."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, RequestKey]] = []

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next_ns(self) -> int | None:
        """The earliest; None without any."""
        return self._heap[0][0] if self._heap else None

    def add(self, deadline_ns: int, key: RequestKey, num_live: int, is_live: Callable[[RequestKey], bool]) -> None:
        """Remembers one; `num_live` requests exist."""
        heapq.heappush(self._heap, (deadline_ns, key))
        if len(self._heap) > 2 * num_live + _SPARE:
            self._heap = [entry for entry in self._heap if is_live(entry[1])]
            heapq.heapify(self._heap)

    def passed(self, now_ns: int) -> Iterator[tuple[int, RequestKey]]:
        """Those that are over, with their time; each comes once."""
        while self._heap and self._heap[0][0] <= now_ns:
            yield heapq.heappop(self._heap)

    def clear(self) -> None:
        """Forgets all."""
        self._heap.clear()
