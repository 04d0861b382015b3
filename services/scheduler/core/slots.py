"""The executor's batch slots: which are held, which the next plan says are free, which may not be used again yet."""

from __future__ import annotations

from collections import deque


class SlotPool:
    """Slots [0, count). One freed by step N may start a request from step N + reuse_distance."""

    def __init__(self, count: int, reuse_distance: int) -> None:
        self.count = count
        self._reuse_distance = reuse_distance
        self._usable = list(range(count - 1, -1, -1))
        self._unannounced: list[int] = []
        self._cooling: deque[tuple[int, int]] = deque()  # (first step that may use it, slot)

    @property
    def num_usable(self) -> int:
        """Slots that a request may be given now."""
        return len(self._usable)

    @property
    def num_held(self) -> int:
        """Slots of requests."""
        return self.count - len(self._usable) - len(self._unannounced) - len(self._cooling)

    @property
    def has_unannounced(self) -> bool:
        """Whether the executor still believes a free slot to be in use."""
        return bool(self._unannounced)

    @property
    def is_cooling(self) -> bool:
        """Whether a later step, and nothing else, makes a slot usable."""
        return bool(self._cooling)

    def take(self) -> int:
        """A usable slot."""
        return self._usable.pop()

    def release(self, slot: int) -> None:
        """Its request is gone; the next plan says so."""
        self._unannounced.append(slot)

    def announce(self, step: int) -> list[int]:
        """The slots that plan `step` lists as freed."""
        freed, self._unannounced = self._unannounced, []
        self._cooling.extend((step + self._reuse_distance, slot) for slot in freed)
        return freed

    def thaw(self, step: int) -> None:
        """Makes usable what step `step` may use again."""
        while self._cooling and self._cooling[0][0] <= step:
            self._usable.append(self._cooling.popleft()[1])
