"""Spans of some steps, told in the trace of the first traced request that they carry and linked to all of them."""

from __future__ import annotations

from dataclasses import dataclass

from services.common.telemetry import names
from services.common.telemetry.context import SpanContext
from services.common.telemetry.spans import Span, Value
from services.common.telemetry.tracing import Tracer
from services.scheduler.core.step import StepPlan
from services.scheduler.request_spans import TracedRequest

INTERVAL_NS = 200_000_000
"""At most one a fifth of a second: what a request's steps are like, not each of them."""

MAX_LINKS = 16


@dataclass(frozen=True, eq=False)
class TracedStep:
    """One under way: its span's context, and what its clock is ahead of the trace's."""

    context: SpanContext
    offset_ns: int
    plan: StepPlan
    requests: list[TracedRequest]
    begun_ns: int
    planned_ns: int


class StepSpans:
    """Those that are under way, by step."""

    def __init__(self, tracer: Tracer, interval_ns: int = INTERVAL_NS) -> None:
        self._tracer = tracer
        self._interval_ns = interval_ns
        self._last_ns = 0
        self._under_way: dict[int, TracedStep] = {}

    def is_due(self, now_ns: int) -> bool:
        """Whether a step may be told again."""
        return abs(now_ns - self._last_ns) >= self._interval_ns  # a clock may be set back

    def begin(self, plan: StepPlan, requests: list[TracedRequest], begun_ns: int, planned_ns: int) -> TracedStep:
        """A step is sent; `requests` are those it carries, one or more."""
        self._last_ns = planned_ns
        first = requests[0]
        step = TracedStep(first.parent.child(), first.offset_ns, plan, requests[:MAX_LINKS], begun_ns, planned_ns)
        self._under_way[plan.step] = step
        return step

    def end(self, number: int, now_ns: int, timings: dict[str, Value]) -> None:
        """A step was applied."""
        if (step := self._under_way.pop(number, None)) is not None:
            self._tell(step, now_ns, timings, None)

    def lose(self, now_ns: int, reason: str) -> None:
        """The steps under way will never be done."""
        for step in self._under_way.values():
            self._tell(step, now_ns, {names.ERROR_TYPE: reason}, reason)
        self._under_way.clear()

    def _tell(self, step: TracedStep, now_ns: int, timings: dict[str, Value], error: str | None) -> None:
        attributes: dict[str, Value] = {
            names.CLOCK_OFFSET: step.offset_ns / 1e9,
            names.STEP_NUMBER: step.plan.step,
            names.STEP_ROWS: len(step.plan.slots),
            names.STEP_TOKENS: step.plan.num_tokens,
            names.STEP_REQUESTS: len(step.requests),
            names.PLAN_TIME: (step.planned_ns - step.begun_ns) / 1e9,
        }
        self._tracer.end(
            Span(
                names.STEP,
                step.context,
                step.requests[0].parent,
                step.begun_ns - step.offset_ns,
                now_ns - step.offset_ns,
                attributes | timings,
                error=error,
                links=tuple(request.parent for request in step.requests),
            )
        )
