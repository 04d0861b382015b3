"""What the engine tells of traced requests and steps, each at the moment when it is so."""

from __future__ import annotations

import time

from triptych.engine.v1 import engine_pb2

from services.common.telemetry import names
from services.common.telemetry.tracing import Tracer
from services.scheduler import outputs
from services.scheduler.clock import now_ns
from services.scheduler.core.request import RequestKey, Submission
from services.scheduler.core.step import StepPlan, Updates
from services.scheduler.executor_run import Answer, StepTrace
from services.scheduler.request_spans import RequestSpans
from services.scheduler.step_spans import StepSpans


class EngineSpans:
    """Of one engine, which has none where nothing is traced."""

    def __init__(self, tracer: Tracer) -> None:
        self._requests = RequestSpans(tracer)
        self._steps = StepSpans(tracer)

    def received(self, submit: engine_pb2.Submit, submission: Submission) -> None:
        """A Submit was read."""
        self._requests.received(submit, submission, now_ns())

    def refused(self, keys: list[RequestKey], reason: str) -> None:
        """Requests are not taken."""
        if self._requests:
            self._requests.failed(keys, reason, now_ns())

    def aborted(self, key: RequestKey) -> None:
        """A frontend has no more use of a choice."""
        if self._requests:
            self._requests.aborted(key, now_ns())

    def left(self, frontend: int) -> None:
        """A frontend is gone, with all its requests."""
        if self._requests:
            self._requests.left(frontend, now_ns())

    def planned(self, plan: StepPlan, begun_s: float, executor_offset_ns: int | None) -> StepTrace | None:
        """A step is about to be sent; what it is to carry where it is traced.

        `begun_s` is time.monotonic() of when its planning began, `executor_offset_ns` what the executor's clock is
        ahead of this one; None: it takes no trace context.
        """
        if not self._requests:
            return None
        planned_ns = now_ns()
        self._requests.planned(plan, planned_ns)
        if not self._steps.is_due(planned_ns) or not (carried := self._requests.carried(plan)):
            return None
        begun_ns = planned_ns - round((time.monotonic() - begun_s) * 1e9)
        step = self._steps.begin(plan, carried, begun_ns, planned_ns)
        if executor_offset_ns is None:
            return None
        return StepTrace(step.context.traceparent, step.offset_ns + executor_offset_ns)

    def applied(self, answer: Answer, apply_s: float) -> None:
        """A step's result was applied in `apply_s` seconds, until now."""
        timings = {
            names.EXECUTE_TIME: answer.execute_s,
            names.SAMPLE_TIME: answer.sample_s,
            names.APPLY_TIME: apply_s,
        }
        graph = {names.STEP_GRAPH: answer.graph} if answer.graph else {}
        self._steps.end(answer.plan.step, now_ns(), {**timings, **graph})

    def updated(self, updates: Updates) -> None:
        """Requests have started, finished or failed."""
        if not self._requests:
            return
        self._requests.updated(updates)
        for failure in updates.failed:
            self._requests.failed([failure.key], outputs.reason_of(failure.kind), now_ns())

    def lost(self) -> None:
        """The executor's epoch is over."""
        self._steps.lose(now_ns(), "EXECUTOR_LOST")
