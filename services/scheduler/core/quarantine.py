"""Who may be what executors die of.

An executor that dies takes no request with it: what ran goes on in the next epoch. Where a request breaks every
executor that computes it, this would go on for ever, so each counts the epochs in a row that were lost while a row of
it was in flight, and that brought it no id. From the second on it is suspect: suspects run alone, one after the other,
and nothing else beside them, until each has got an id. A request is poison only if an executor dies while it runs alone
so, or says that it is; all others are kept however often executors die.
"""

from __future__ import annotations

from collections.abc import Iterable

from services.scheduler.core.request import Request

SUSPECT_AFTER = 2
"""Lost epochs in a row without an id. One is most often somebody else's doing."""


class Quarantine:
    """Of one epoch: the suspects that have not proved themselves in it."""

    def __init__(self, requests: Iterable[Request] = ()) -> None:
        self._suspects = {request for request in requests if _is_suspect(request)}
        self.alone: Request | None = None
        """The suspect that runs now."""

    @property
    def is_open(self) -> bool:
        """Suspects are left."""
        return bool(self._suspects)

    def __contains__(self, request: Request) -> bool:
        return request in self._suspects

    def has_passed(self) -> bool:
        """Whether the one that runs alone has got an id."""
        return self.alone is not None and not _is_suspect(self.alone)

    def discard(self, request: Request) -> None:
        """It has ended, or passed."""
        self._suspects.discard(request)
        if self.alone is request:
            self.alone = None


def count_loss(request: Request) -> None:
    """An epoch was lost while a row of it was in flight."""
    length = len(request.output)
    request.losses = request.losses + 1 if request.lost_at == length else 1
    request.lost_at = length


def _is_suspect(request: Request) -> bool:
    return request.losses >= SUSPECT_AFTER and request.lost_at == len(request.output)
