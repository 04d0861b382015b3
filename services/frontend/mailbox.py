"""One request's outputs between the engine's stream and the call that waits for them."""

from __future__ import annotations

import asyncio

from services.common.errors import RequestError
from services.frontend.engine import Outputs


class Mailbox:
    """What comes while the reader is slow is taken as one, by choice; it is bounded by max_tokens. One reader."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, Outputs]] = []
        self._error: RequestError | None = None
        self._reader: asyncio.Future[None] | None = None

    def put(self, choice: int, outputs: Outputs) -> None:
        """Adds what is new of a choice."""
        self._waiting.append((choice, outputs))
        self._wake()

    def fail(self, error: RequestError) -> None:
        """Ends the request; the first error stays. What came before is still delivered."""
        self._error = self._error or error
        self._wake()

    async def take(self, until_s: float | None = None) -> list[tuple[int, Outputs]]:
        """What is new by choice, each once, as soon as there is any; nothing when the loop's clock says `until_s`.

        Raises the RequestError that ended the request.
        """
        if not self._waiting and self._error is None:
            await self._news(until_s)
        if self._waiting:
            taken, self._waiting = self._waiting, []
            return taken if len(taken) == 1 else _by_choice(taken)
        if self._error is not None:
            raise self._error
        return []

    async def _news(self, until_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        self._reader = loop.create_future()
        timer = None if until_s is None else loop.call_at(until_s, self._wake)
        try:
            await self._reader
        finally:
            self._reader = None
            if timer is not None:
                timer.cancel()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def _by_choice(taken: list[tuple[int, Outputs]]) -> list[tuple[int, Outputs]]:
    parts: dict[int, list[Outputs]] = {}
    for choice, outputs in taken:
        parts.setdefault(choice, []).append(outputs)
    return [(choice, Outputs.joined(own)) for choice, own in parts.items()]
