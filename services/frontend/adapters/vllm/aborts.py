"""Running calls by the ids that clients gave them: a gateway aborts by id, from another call.

An id need not be unique; an Abort is of all calls of its caller that have it at that moment, and of none that comes
later. Who calls is "" where callers are not known.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from services.frontend.answer import Answer
from services.frontend.journey import Journey


class AbortedError(Exception):
    """Ends the answer of a call that was aborted."""


class RunningCall:
    """One call, which an Abort may meet at any moment."""

    def __init__(self) -> None:
        self.is_aborted = False
        self._answer: Answer | None = None
        self._request: Journey | None = None

    def answering(self, answer: Answer) -> None:
        """There is something that an Abort has to end; one that has been already ends it at once."""
        self._answer = answer
        if self.is_aborted:
            answer.fail(AbortedError())

    def submitted(self, request: Journey) -> None:
        """The engine has it."""
        self._request = request
        if self.is_aborted:
            request.close()

    def abort(self) -> None:
        """Ends it, in the engine too, even where a slow client holds up a message; again does nothing."""
        self.is_aborted = True
        if self._answer is not None:
            self._answer.fail(AbortedError())
        if self._request is not None:
            self._request.close()


class RunningCalls:
    """Those of this frontend."""

    def __init__(self) -> None:
        self._by_id: dict[tuple[str, str], set[RunningCall]] = {}

    @contextmanager
    def entered(self, request_id: str, owner: str = "") -> Iterator[RunningCall]:
        """Around a call."""
        call = RunningCall()
        calls = self._by_id.setdefault((owner, request_id), set())
        calls.add(call)
        try:
            yield call
        finally:
            calls.discard(call)
            if not calls and self._by_id.get((owner, request_id)) is calls:
                del self._by_id[owner, request_id]

    def abort(self, request_id: str, owner: str = "") -> None:
        """Ends all calls of that id and owner; one that is not known is nobody's."""
        for call in tuple(self._by_id.get((owner, request_id), ())):
            call.abort()
