"""Step spans of scheduler and executor, and times told by the clock of another machine."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from triptych.executor.v1 import executor_pb2 as pb

from loadtest.otlp_sink import OtlpSink
from loadtest.stub_executor import StubExecutor
from services.common.telemetry.context import SpanContext, new_span_id, new_trace_id
from services.common.telemetry.spans import Span
from services.common.telemetry.tracing import Tracer
from services.executor.step_spans import StepSpans as ExecutorSteps
from services.scheduler import step_spans
from tests.support.attached import Frontend, scheduler_for, until, write_model
from tests.telemetry import edges

HOUR_NS = 3600 * 10**9


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("steps") / "model")


def caller() -> SpanContext:
    return SpanContext(new_trace_id(), new_span_id())


@asynccontextmanager
async def attached(model: Path, sink: OtlpSink, **config: Any) -> AsyncIterator[Frontend]:
    async with (
        StubExecutor(step_s=0.002) as stub,
        scheduler_for(stub, model, otlp_endpoint=sink.endpoint, **config) as server,
        Frontend(server) as frontend,
    ):
        await frontend.greeted()
        yield frontend


async def test_a_step_is_linked_to_all_traced_requests_that_it_carries(
    model: Path, sink: OtlpSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    callers = [caller() for _ in range(3)]
    async with attached(model, sink) as frontend:
        for parent in callers:
            await frontend.submit([1, 2], max_tokens=200, traceparent=parent.traceparent)
        await frontend.submit([3], max_tokens=200)
        for told in frontend.told.values():
            await told.done.wait()
        spans = await sink.until(lambda spans: sum(span.name == "decode" for span in spans) == 3)
    steps = edges.steps(spans, edges.SCHEDULER)
    full = [step for step in steps if step.attributes["triptych.step.rows"] == 4]
    assert full and all(len(step.links) == step.attributes["triptych.step.traced_requests"] == 3 for step in full)
    known = {(parent.trace_id, parent.span_id) for parent in callers}
    for step in steps:
        assert set(step.links) <= known and (step.trace_id, step.parent_id) == step.links[0]
    for before, after in itertools.pairwise(steps):
        assert after.end_ns - before.start_ns >= step_spans.INTERVAL_NS


async def test_steps_that_carry_no_traced_request_are_not_told(model: Path, sink: OtlpSink) -> None:
    async with attached(model, sink) as frontend:
        await frontend.run([1, 2], max_tokens=100)
        await frontend.run([1, 2], max_tokens=100, traceparent=caller()._replace(flags="00").traceparent)
        await frontend.run([1, 2], max_tokens=100, traceparent="no trace at all")
        parent = caller()
        await frontend.run([1, 2], max_tokens=2, traceparent=parent.traceparent)
        await sink.until(lambda spans: any(span.name == "decode" for span in spans))
    assert {span.trace_id for span in sink.spans} == {parent.trace_id}


@pytest.mark.parametrize("ahead_ns", [HOUR_NS, -HOUR_NS])
async def test_times_are_told_by_the_frontends_clock(model: Path, sink: OtlpSink, ahead_ns: int) -> None:
    """As if the scheduler's clock were ahead of the frontend's by an hour, or behind it."""
    parent = caller()
    async with attached(model, sink) as frontend:
        submitted_ns = time.time_ns() - ahead_ns
        fields = {"traceparent": parent.traceparent, "arrived_unix_ns": submitted_ns, "clock_offset_ns": ahead_ns}
        await frontend.run([1, 2], max_tokens=5, **fields)
        ended_ns = time.time_ns() - ahead_ns
        spans = await sink.until(lambda spans: any(span.name == "decode" for span in spans))
    found = edges.parts(spans)
    assert found["queue"].start_ns == submitted_ns
    for span in spans:
        assert submitted_ns <= span.start_ns <= span.end_ns <= ended_ns
        assert span.attributes["triptych.clock_offset_s"] == ahead_ns / 1e9
    assert found["queue"].end_ns == found["prefill"].start_ns and found["prefill"].end_ns == found["decode"].start_ns


async def test_a_frontend_that_leaves_ends_the_spans_of_its_requests(model: Path, sink: OtlpSink) -> None:
    parents = [caller() for _ in range(2)]
    async with (
        StubExecutor(step_s=0.002) as stub,
        scheduler_for(stub, model, otlp_endpoint=sink.endpoint) as server,
    ):
        async with Frontend(server) as frontend:
            await frontend.greeted()
            for parent in parents:
                told = await frontend.submit([1, 2], max_tokens=900, traceparent=parent.traceparent)
                await told.first.wait()
        spans = await sink.until(lambda spans: sum(span.name == "decode" for span in spans) == 2)
        assert server.engine._spans is not None
        await until(lambda: not len(server.engine._spans._requests))
    assert {span.attributes["triptych.end"] for span in spans if span.name == "decode"} == {"aborted"}


class Kept:
    def __init__(self) -> None:
        self.spans: list[Span] = []

    def put(self, span: Span) -> None:
        self.spans.append(span)


def test_the_executors_step_is_a_child_of_the_plans_span_by_the_traces_clock() -> None:
    kept = Kept()
    spans = ExecutorSteps(Tracer(kept, 1.0))  # type: ignore[arg-type]
    parent = caller()
    plan = pb.StepPlan(step=7, slots=bytes(8), traceparent=parent.traceparent, clock_offset_ns=50)
    result = pb.StepResult(received_unix_ns=1_000, wait_us=1, execute_us=2, sample_us=3, graph=pb.GRAPH_KIND_FULL)
    spans.done(plan, result, 2_000)
    spans.failed(plan, 1_000, 3_000, "EPOCH_OVER")
    done, failed = kept.spans
    assert (done.name, done.parent, done.context.trace_id) == ("step", parent, parent.trace_id)
    assert (done.start_unix_ns, done.end_unix_ns) == (950, 1_950)
    assert done.attributes == {
        "triptych.clock_offset_s": 50e-9,
        "triptych.step.number": 7,
        "triptych.step.rows": 2,
        "triptych.step.wait_s": 1e-6,
        "triptych.step.execute_s": 2e-6,
        "triptych.step.sample_s": 3e-6,
        "triptych.step.graph": "full",
    }
    assert failed.error == failed.attributes["error.type"] == "EPOCH_OVER" and failed.end_unix_ns == 2_950


@pytest.mark.parametrize("traceparent", ["00-1-2-01", "x", f"00-{'1' * 32}-{'1' * 16}-00"])
def test_a_plan_with_no_sampled_trace_has_no_span(traceparent: str) -> None:
    kept = Kept()
    spans = ExecutorSteps(Tracer(kept, 1.0))  # type: ignore[arg-type]
    spans.done(pb.StepPlan(step=1, traceparent=traceparent), pb.StepResult(), 1)
    assert kept.spans == []


async def test_an_executor_of_before_is_told_nothing_of_traces(model: Path, sink: OtlpSink) -> None:
    async with (
        StubExecutor(step_s=0.002, features=("grammar",)) as stub,
        scheduler_for(stub, model, otlp_endpoint=sink.endpoint) as server,
        Frontend(server) as frontend,
    ):
        await frontend.greeted()
        await frontend.run([1, 2], max_tokens=20, traceparent=caller().traceparent)
        await sink.until(lambda spans: any(span.name == "step" for span in spans))
        assert not any(plan.traceparent or plan.HasField("clock_offset_ns") for plan in stub.plans)
    await asyncio.sleep(0)
