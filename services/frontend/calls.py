"""The calls this process is working on, for the drain: new ones are refused, running ones are waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from services.common.errors import unavailable


class Calls:
    """Counts running calls; once closed it lets nobody in."""

    def __init__(self) -> None:
        self.draining = False
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Around a call. Raises UNAVAILABLE while draining."""
        if self.draining:
            raise unavailable("DRAINING", "this frontend is shutting down; use another")
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
