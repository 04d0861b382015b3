"""Spans of the steps that a plan asks to trace, below the scheduler's."""

from __future__ import annotations

from triptych.executor.v1 import executor_pb2 as pb

from services.common.telemetry import names
from services.common.telemetry.context import read_parent
from services.common.telemetry.spans import Span, Value
from services.common.telemetry.tracing import Tracer


class StepSpans:
    """Of an executor, which has none where nothing is traced."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def done(self, plan: pb.StepPlan, result: pb.StepResult, now_ns: int) -> None:
        """A plan has its result."""
        timings: dict[str, Value] = {
            names.WAIT_TIME: result.wait_us / 1e6,
            names.EXECUTE_TIME: result.execute_us / 1e6,
            names.SAMPLE_TIME: result.sample_us / 1e6,
        }
        if result.graph:
            timings[names.STEP_GRAPH] = pb.GraphKind.Name(result.graph).removeprefix("GRAPH_KIND_").lower()
        self._tell(plan, result.received_unix_ns, now_ns, timings)

    def failed(self, plan: pb.StepPlan, received_ns: int, now_ns: int, fault: str) -> None:
        """A plan ends with its epoch."""
        self._tell(plan, received_ns, now_ns, {names.ERROR_TYPE: fault}, fault)

    def _tell(
        self, plan: pb.StepPlan, start_ns: int, end_ns: int, told: dict[str, Value], error: str | None = None
    ) -> None:
        parent = read_parent(plan.traceparent)
        if parent is None or not parent.is_sampled:
            return
        offset_ns = plan.clock_offset_ns
        attributes: dict[str, Value] = {
            names.CLOCK_OFFSET: offset_ns / 1e9,
            names.STEP_NUMBER: plan.step,
            names.STEP_ROWS: len(plan.slots) // 4,
        }
        self._tracer.end(
            Span(
                names.STEP,
                parent.child(),
                parent,
                start_ns - offset_ns,
                end_ns - offset_ns,
                attributes | told,
                error=error,
            )
        )
