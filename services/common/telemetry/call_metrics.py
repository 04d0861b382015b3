"""How long calls take, by method and status; what a service measures of one beyond that, it hooks in.

https://opentelemetry.io/docs/specs/semconv/rpc/rpc-metrics/
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeAlias

from services.common.errors import LAST_REASON
from services.common.telemetry import names
from services.common.telemetry.context import CURRENT
from services.common.telemetry.metrics import Metrics


class CallTimes:
    """One call, from its arrival to its end, which counts once. A service's own kind measures more."""

    def __init__(self, metrics: Metrics, method: str, failed: Counter[str]) -> None:
        """`failed` counts calls that ended with an error of ours, by its reason."""
        self.metrics = metrics
        self.method = method
        self.begun_s = time.monotonic()
        self.trace = CURRENT.get()
        """The sampled span that is an example of what is measured."""
        self._failed = failed
        self._has_ended = False

    def end(self, code: str) -> None:
        """The call has ended with a gRPC status."""
        if self._has_ended:
            return
        self._has_ended = True
        self.measure(code)
        if code != "OK" and (reason := LAST_REASON.get()):
            self._failed[reason] += 1

    over = end

    def measure(self, code: str) -> None:
        """Records what is known at the end."""
        labels = {names.METHOD: self.method, names.STATUS_CODE: code}
        self.metrics.record(names.CALL_DURATION, time.monotonic() - self.begun_s, labels, self.trace)


Times: TypeAlias = Callable[[Metrics, str, Counter[str]], CallTimes]

_CALL: ContextVar[CallTimes | None] = ContextVar("triptych_call_times", default=None)


def call_times() -> CallTimes | None:
    """Of the call that this task serves; None where nothing is measured."""
    return _CALL.get()


class CallMetrics:
    """Measures calls."""

    def __init__(self, metrics: Metrics, times: Times = CallTimes) -> None:
        self.failed: Counter[str] = Counter()
        """Calls that ended with an error of ours, by its reason."""
        self._metrics = metrics
        self._times = times

    def begin(self, method: str, context: Any) -> CallTimes:
        """A call has come."""
        times = self._times(self._metrics, method, self.failed)
        _CALL.set(times)  # of this call's task alone
        LAST_REASON.set("")
        return times
