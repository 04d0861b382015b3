"""A request under way in the engine, as the call that asked for it holds it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from services.common.errors import RequestError
from services.frontend.engine import Outputs
from services.frontend.mailbox import Mailbox


class EngineRequest:
    """All choices of a request. `close` it in any case: an engine that is not done with them is told to stop."""

    def __init__(
        self,
        request_id: int,
        num_choices: int,
        *,
        end: Callable[[Sequence[int]], None],
        close: Callable[[EngineRequest], None],
    ) -> None:
        self.request_id = request_id
        self.choice_ids = range(request_id, request_id + num_choices)
        self._end = end
        self._close = close
        self._mailbox = Mailbox()

    async def take(self, until_s: float | None = None) -> list[tuple[int, Outputs]]:
        """What is new by choice, each once, as soon as there is any; nothing when the loop's clock says `until_s`.

        Raises the RequestError that ended the request.
        """
        return await self._mailbox.take(until_s)

    def put(self, choice_id: int, outputs: Outputs) -> None:
        """Hands over what is new of a choice."""
        self._mailbox.put(choice_id - self.request_id, outputs)

    def fail(self, error: RequestError) -> None:
        """Ends the request with an error, here alone."""
        self._mailbox.fail(error)

    def close_choice(self, index: int) -> None:
        """Aborts a choice that has not ended."""
        self._end(self.choice_ids[index : index + 1])

    def close(self) -> None:
        """Aborts what has not ended. May be called again."""
        self._close(self)
