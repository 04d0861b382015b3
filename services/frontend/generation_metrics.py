"""What is measured of a generation as its caller sees it: the GenAI conventions' durations.

https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-metrics/
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TypeAlias

from services.common.telemetry import names
from services.common.telemetry.call_metrics import CallMetrics, CallTimes, call_times
from services.common.telemetry.metrics import Metrics
from services.common.telemetry.readings import Reading
from services.frontend.answer import Answer
from services.frontend.calls import Calls
from services.frontend.fleet import Fleet
from services.frontend.request import Delta, Job
from services.frontend.request_spans import ADAPTER, OWN

_OPERATIONS = {
    f"{OWN}/Generate": "text_completion",
    f"{OWN}/GenerateUnary": "text_completion",
    f"{OWN}/Chat": "chat",
    f"{OWN}/ChatUnary": "chat",
    f"{ADAPTER}/Generate": "text_completion",
}
"""Of the methods that generate."""

Send: TypeAlias = Callable[[list[tuple[int, Delta]]], Awaitable[None]]
"""Deltas to the client, by choice."""


class GenerationTimes(CallTimes):
    """A call's times, and where it generates, those of its tokens. `model` is the served name."""

    def __init__(self, metrics: Metrics, method: str, failed: Counter[str], model: str, counts: Counts) -> None:
        super().__init__(metrics, method, failed)
        self._counts = counts
        self._operation = _OPERATIONS.get(method)
        self._labels = {names.OPERATION: self._operation or "", names.REQUEST_MODEL: model}
        self._first_s: float | None = None
        self._last_s = 0.0
        self._num_first = 0
        self._num_tokens = 0
        self._num_choices = 1
        self._is_resumed = False

    def asked(self, job: Job) -> None:
        """What is to be generated."""
        self._num_choices = job.options.n
        self._is_resumed = bool(job.options.received)

    def timing(self, send: Send) -> Send:
        """`send`, whose first tokens are noted."""

        def timed(deltas: list[tuple[int, Delta]]) -> Awaitable[None]:  # no coroutine of its own: one a token
            self._told(deltas)
            return send(deltas)

        return timed

    def _told(self, deltas: Iterable[tuple[int, Delta]]) -> None:
        """These are on their way to the client."""
        count = 0
        for _, delta in deltas:
            count += len(delta.token_ids)
        if not count:
            return
        self._last_s = time.monotonic()
        self._num_tokens += count
        if self._first_s is None:
            self._first_s, self._num_first = self._last_s, count
            if not self._is_resumed:
                self._record(names.TIME_TO_FIRST_TOKEN, self._last_s - self.begun_s)

    def answered(self, answer: Answer) -> None:
        """The generation is over, however it ended."""
        self._counts.output_tokens += answer.new_tokens

    def measure(self, code: str) -> None:
        """Records what is known at the end."""
        super().measure(code)
        if self._operation is None:
            return
        error = {} if code == "OK" else {names.ERROR: code}
        self._record(names.REQUEST_DURATION, time.monotonic() - self.begun_s, error)
        later = self._num_tokens - self._num_first
        if code == "OK" and later and self._first_s is not None:
            # Choices get their tokens side by side: each has its share of the later ones in that time.
            self._record(names.TIME_PER_OUTPUT_TOKEN, (self._last_s - self._first_s) * self._num_choices / later)

    def _record(self, metric: names.Metric, duration_s: float, more: dict[str, str] | None = None) -> None:
        self.metrics.record(metric, duration_s, self._labels | (more or {}), self.trace)


class Counts:
    """What ended calls have made together."""

    def __init__(self) -> None:
        self.output_tokens = 0


class FrontendMetrics:
    """The metrics of a frontend: of its calls as they come, of its state when it is asked."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._counts = Counts()
        self.calls = CallMetrics(
            metrics, lambda metrics, method, failed: GenerationTimes(metrics, method, failed, model, self._counts)
        )

    def reader(self, calls: Calls, engine: Fleet) -> Callable[[], Iterator[Reading]]:
        """What reads the state."""

        def read() -> Iterator[Reading]:
            yield Reading(names.CALLS, calls.num_running)
            yield Reading(names.ENGINE_READY, engine.can_generate())
            yield Reading(names.CLIENT_TOKENS, self._counts.output_tokens)
            for reason, count in self.calls.failed.items():
                yield Reading(names.CALLS_FAILED, count, {names.REASON: reason})

        return read


def generation_times() -> GenerationTimes | None:
    """Of the generation that this task serves; None where nothing is measured."""
    times = call_times()
    return times if isinstance(times, GenerationTimes) else None
