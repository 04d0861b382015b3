"""A request under way in the engine: its ids there, and who takes what comes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from services.common.errors import RequestError
from services.frontend.engine import Outputs


class Sink(Protocol):
    """Who asked for a request. Neither method may raise: the engine's stream, which calls them, is everyone's."""

    def put(self, index: int, outputs: Outputs, /) -> bool:
        """What is new of a choice; True where the engine need not go on with it."""

    def fail(self, error: RequestError, /) -> None:
        """The request has ended, all its choices with it."""


class EngineRequest:
    """The choices of a request that are run. `close` it in any case: an engine that is not done is told to stop."""

    def __init__(
        self,
        request_id: int,
        choices: Sequence[int],
        sink: Sink,
        *,
        end: Callable[[Sequence[int]], None],
        close: Callable[[EngineRequest], None],
    ) -> None:
        self.request_id = request_id
        self.choice_ids = tuple(request_id + choice for choice in choices)
        self._sink = sink
        self._end = end
        self._close = close
        self._last_token_unix_ns = 0  # by the engine's clock, as it says
        self._stopped_unix_ns = 0  # by ours, where we stopped a choice

    def put(self, choice_id: int, outputs: Outputs) -> None:
        """Hands over what is new of a choice, and aborts it where that was enough."""
        if outputs.finish is not None:
            self._last_token_unix_ns = max(self._last_token_unix_ns, outputs.finish.last_token_unix_ns)
        if self._sink.put(choice_id - self.request_id, outputs):
            self._stopped_unix_ns = time.time_ns()
            self._end((choice_id,))

    def ended_unix_ns(self, clock_offset_ns: int) -> int:
        """When the last choice had its last id, by our clock; now where nobody has said."""
        engines = self._last_token_unix_ns - clock_offset_ns if self._last_token_unix_ns else 0
        return max(engines, self._stopped_unix_ns) or time.time_ns()

    def fail(self, error: RequestError) -> None:
        """Ends the request with an error, here alone."""
        self._sink.fail(error)

    def close(self) -> None:
        """Aborts what has not ended. May be called again."""
        self._close(self)
