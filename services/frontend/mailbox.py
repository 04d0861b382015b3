"""One request's outputs between the engine's stream and the call that waits for them."""

from __future__ import annotations

import asyncio

from services.common.errors import RequestError
from services.frontend.engine import Outputs


class Mailbox:
    """What comes while the reader is slow is taken as one; it is bounded by max_tokens."""

    def __init__(self) -> None:
        self._waiting: list[Outputs] = []
        self._error: RequestError | None = None
        self._news = asyncio.Event()

    def put(self, outputs: Outputs) -> None:
        """Adds what is new."""
        self._waiting.append(outputs)
        self._news.set()

    def fail(self, error: RequestError) -> None:
        """Ends the request; the first error stays. What came before is still delivered."""
        self._error = self._error or error
        self._news.set()

    async def take(self) -> Outputs:
        """What is new, once there is any. Raises the RequestError that ended the request."""
        await self._news.wait()
        if self._waiting:
            outputs = Outputs.joined(self._waiting)
            self._waiting = []
            if self._error is None:
                self._news.clear()
            return outputs
        if self._error is None:
            raise AssertionError("a mailbox with news holds outputs or an error")
        raise self._error
