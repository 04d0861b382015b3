"""Choices that compete: all are held back until the last has stopped, then the likeliest are given out."""

from __future__ import annotations

from services.frontend.coalescing import Coalescer
from services.frontend.request import Delta, Hold


class BestOf:
    """A Coalescer of `run` choices that gives out the `n` of highest cumulative logprob, the likeliest as choice 0."""

    def __init__(self, run: int, n: int) -> None:
        self._n = n
        self._held: list[list[Delta]] = [[] for _ in range(run)]
        self._num_running = run
        self._chosen: Coalescer | None = None

    @property
    def empty(self) -> bool:
        """Nothing is held that will be given out."""
        return self._chosen is not None and self._chosen.empty

    @property
    def num_ids(self) -> int:
        """Ids that wait for the client, alternatives included; those that are held back until the end do not."""
        return 0 if self._chosen is None else self._chosen.num_ids

    def add(self, choice: int, delta: Delta, now_s: float) -> bool:
        """Takes what is new of a choice; True where that was the last of all."""
        self._held[choice].append(delta)
        if delta.stopped is not None:
            self._num_running -= 1
        if self._num_running:
            return False
        self._choose(now_s)
        return True

    def due(self, now_s: float) -> list[tuple[int, Delta]]:
        """Nothing before the end."""
        return self._chosen.due(now_s) if self._chosen else []

    def rest(self, now_s: float) -> list[tuple[int, Delta]]:
        """Where choices are still running, nothing: it is not known who wins."""
        return self._chosen.rest(now_s) if self._chosen else []

    def next_s(self) -> float | None:
        """Never by time."""
        return None

    def _choose(self, now_s: float) -> None:
        self._chosen = Coalescer(Hold(), self._n)
        logprobs = [deltas[-1].cumulative_logprob or 0.0 for deltas in self._held]
        likeliest = sorted(range(len(self._held)), key=lambda choice: -logprobs[choice])
        for place, choice in enumerate(likeliest[: self._n]):
            for delta in self._held[choice]:
                self._chosen.add(place, delta, now_s)
        self._held.clear()
