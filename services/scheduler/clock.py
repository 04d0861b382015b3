"""The scheduler's clock."""

from __future__ import annotations

import time

_UNIX_AT_START_NS = time.time_ns() - time.monotonic_ns()


def now_ns() -> int:
    """Unix time as it was at the process's start, moved on by the monotonic clock: fit to tell, never set back."""
    return _UNIX_AT_START_NS + time.monotonic_ns()
