"""What a service says of itself when it is asked: counters that it keeps anyway, read on its event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeAlias

from services.common.telemetry.names import Metric

WAIT_S = 2.0
"""What an event loop is given to answer; one that does not is stuck, and that is for its alert to tell."""

FRESH_S = 0.05
"""The instruments of one collection see the same readings."""


@dataclass(frozen=True)
class Tally:
    """Durations counted by bucket elsewhere: `counts` has one more than `bounds_s`, for what is longer than all."""

    bounds_s: Sequence[float]
    counts: Sequence[int]
    sum_s: float


@dataclass(frozen=True)
class Reading:
    """A metric's value now; a histogram's is a tally. `labels` as the metric names them."""

    metric: Metric
    value: float | Tally
    labels: Mapping[str, str] = field(default_factory=dict)


Read: TypeAlias = Callable[[], Iterable[Reading]]


class Snapshot:
    """The last readings, taken on the event loop for threads that tell them."""

    def __init__(self, read: Read, loop: asyncio.AbstractEventLoop) -> None:
        self._read = read
        self._loop = loop
        self._lock = threading.Lock()
        self._taken_s = float("-inf")
        self._readings: dict[str, list[Reading]] = {}

    def refresh(self, older_than_s: float = 0.0) -> None:
        """Reads anew, where the last readings are older than that.

        Raises TimeoutError where the event loop does not answer, RuntimeError where it is closed.
        """
        with self._lock:
            if time.monotonic() - self._taken_s < older_than_s:
                return
            taken: Future[dict[str, list[Reading]]] = Future()
            self._loop.call_soon_threadsafe(self._take, taken)
            self._readings = taken.result(WAIT_S)
            self._taken_s = time.monotonic()

    def of(self, metric: Metric) -> Sequence[Reading]:
        """As last read."""
        return self._readings.get(metric.name, ())

    def _take(self, taken: Future[dict[str, list[Reading]]]) -> None:
        try:
            readings: dict[str, list[Reading]] = {}
            for reading in self._read():
                readings.setdefault(reading.metric.name, []).append(reading)
        except Exception as error:
            taken.set_exception(error)
        else:
            taken.set_result(readings)
