"""The calls this process is working on: no more than it has memory for; in a drain new ones are refused, running ones
waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from services.common.errors import RequestError, unavailable

RETRY_S = 1.0


class Calls:
    """Counts running calls, `max_calls` at most; once closed it lets nobody in."""

    def __init__(self, max_calls: int | None = None) -> None:
        self.draining = False
        self._max_calls = max_calls
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Around a call. Raises UNAVAILABLE while draining, RESOURCE_EXHAUSTED where too many run."""
        if self.draining:
            raise unavailable("DRAINING", "this frontend is shutting down; use another")
        if self._max_calls is not None and self._running >= self._max_calls:
            message = f"{self._running} calls run, the limit is --max-calls {self._max_calls}; try again later"
            raise RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_CALLS", message, retry_after_s=RETRY_S)
        self._running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._running -= 1
            if self._running == 0:
                self._idle.set()

    @property
    def num_running(self) -> int:
        """Calls that are being worked on."""
        return self._running

    def close(self) -> None:
        """Begins the drain."""
        self.draining = True

    async def idle(self) -> None:
        """Returns when no call runs."""
        await self._idle.wait()
