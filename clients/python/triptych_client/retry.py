"""When a call that failed is worth another try, and how long to wait for it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from triptych_client.errors import TriptychError


@dataclass(frozen=True)
class Retry:
    """Tries of a call that UNAVAILABLE or a cut ends, or a full queue (RESOURCE_EXHAUSTED with a time to come back).

    At most `attempts` in a row that bring nothing new, the first included. The wait before the second is
    `first_wait_s`, then twice as long each time up to `most_wait_s`, a random part of it less (so that clients do not
    come back together), and never shorter than what the server says. All of it lies within the call's deadline.
    """

    attempts: int = 6
    first_wait_s: float = 0.1
    most_wait_s: float = 5.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or not 0 <= self.first_wait_s <= self.most_wait_s:
            raise ValueError(f"{self}: attempts is 1 or more, and 0 <= first_wait_s <= most_wait_s")


class Attempts:
    """Those of one call. `timeout_s` is its deadline, over all of them; None: none."""

    def __init__(
        self, retry: Retry | None, timeout_s: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._retry = retry or Retry(attempts=1)
        self._clock = clock
        self._deadline_s = None if timeout_s is None else clock() + timeout_s
        self._failed = 0

    @property
    def left_s(self) -> float | None:
        """Until the deadline."""
        return None if self._deadline_s is None else max(0.0, self._deadline_s - self._clock())

    def progressed(self) -> None:
        """Something new came: attempts are counted from here."""
        self._failed = 0

    def wait_s(self, error: TriptychError) -> float:
        """How long to wait before the next attempt. Raises `error` where there is none."""
        self._failed += 1
        if not is_passing(error) or self._failed >= self._retry.attempts:
            raise error from None
        wait_s = min(self._retry.most_wait_s, self._retry.first_wait_s * 2.0 ** (self._failed - 1))
        wait_s = max(wait_s * random.uniform(0.5, 1.0), error.retry_after_s or 0.0)
        if self.left_s is not None and wait_s >= self.left_s:
            raise error from None
        return wait_s


def is_passing(error: TriptychError) -> bool:
    """Whether the same call may succeed later or elsewhere. CANCELLED, where this side has not cancelled it, is what a
    server's end may leave of a call."""
    if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return error.retry_after_s is not None
    return error.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
