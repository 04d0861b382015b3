"""Calls that were not let in, as the log tells them: each is counted, and whoever makes many cannot fill it."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Any

import grpc

from services.common.caller import identity_of
from services.common.errors import RequestError

INTERVAL_S = 10.0

_OF_STRANGERS = frozenset({grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED})

log = logging.getLogger(__name__)


class Refusals:
    """The first is told at once, those of the `interval_s` after it together. Nothing of a call's token is kept."""

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._reasons: Counter[str] = Counter()
        self._level = logging.INFO
        self._last: dict[str, object] = {}
        self._timer: asyncio.TimerHandle | None = None

    def note(self, method: str, context: Any, error: RequestError) -> None:
        """One more."""
        self._reasons[error.reason] += 1
        if error.code in _OF_STRANGERS:
            self._level = logging.WARNING
        self._last = {"method": method.lstrip("/"), "peer": context.peer(), **identity_of(context)}
        self._last["error"] = error.message
        if self._timer is None:
            self._tell()

    def close(self) -> None:
        """Tells what has not been told."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._log()

    def _tell(self) -> None:
        self._timer = None
        if self._log():
            self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._tell)

    def _log(self) -> bool:
        if not self._reasons:
            return False
        fields = {"calls": self._reasons.total(), "reasons": Counter(self._reasons), **self._last}
        log.log(self._level, "calls refused; the last one", extra={"fields": fields})
        self._reasons.clear()
        self._level = logging.INFO
        return True
