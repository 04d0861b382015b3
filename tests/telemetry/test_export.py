"""The exporter beside serving: bounded, counted, and never in the way, whatever the collector does."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan
from opentelemetry.sdk.resources import Resource

from loadtest.otlp_sink import OtlpSink
from services.common.telemetry import export
from services.common.telemetry.context import SpanContext, new_span_id, new_trace_id
from services.common.telemetry.encoding import Encoder
from services.common.telemetry.export import BATCH_SPANS, CLOSE_S, Exporter
from services.common.telemetry.spans import Span
from tests.frontend.harness import text_checkpoint
from tests.support.calls import by_ids, generate, greedy
from tests.telemetry.stack import traced

SLACK_S = 1.0


class Sink:
    """Keeps what it takes; `gate` holds it up, `takes` is what it says."""

    def __init__(self) -> None:
        self.batches: list[Sequence[OtlpSpan]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.takes = True

    def send(self, request: ExportTraceServiceRequest) -> bool:
        self.entered.set()
        self.gate.wait()
        self.batches.append(request.resource_spans[0].scope_spans[0].spans)
        return self.takes

    def shutdown(self) -> None:
        self.gate.set()


def span(name: str = "a") -> Span:
    return Span(name, SpanContext(new_trace_id(), new_span_id()), None, 1, 2, {"key": "value"})


def exporter(sink: Sink, **arguments: int) -> Exporter:
    return Exporter(sink, Encoder(Resource({"service.name": "test"}), "1"), **arguments)


@contextmanager
def black_hole() -> Iterator[str]:
    """Takes connections, and never says a word."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def full_backlog() -> Iterator[str]:
    """A port whose SYNs go unanswered: its backlog is full."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        callers = [socket.socket() for _ in range(4)]
        try:
            for caller in callers:
                caller.setblocking(False)
                caller.connect_ex(address)
            yield f"http://127.0.0.1:{address[1]}"
        finally:
            for caller in callers:
                caller.close()


def test_spans_leave_in_batches_of_which_none_holds_the_interpreter_for_long() -> None:
    sink = Sink()
    out = exporter(sink)
    for _ in range(3 * BATCH_SPANS + 1):
        out.put(span())
    out.close()
    assert [len(batch) for batch in sink.batches] == [BATCH_SPANS] * 3 + [1]
    assert (out.exported, out.dropped) == (3 * BATCH_SPANS + 1, 0)


def test_what_finds_the_queue_full_is_dropped_and_counted_at_once() -> None:
    sink = Sink()
    sink.gate.clear()
    out = exporter(sink, queue_spans=10)
    out.put(span())
    assert sink.entered.wait(5), "the first is under way"
    for _ in range(15):
        out.put(span())
    assert out.dropped == 5
    sink.gate.set()
    out.close()
    assert (out.exported, out.dropped) == (11, 5)


def test_what_no_collector_took_is_dropped_counted_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    sink = Sink()
    sink.takes = False
    out = exporter(sink)
    with caplog.at_level(logging.INFO):
        for _ in range(2 * BATCH_SPANS):
            out.put(span())
        out.close()
    assert (out.exported, out.dropped) == (0, 2 * BATCH_SPANS)
    assert [record.message for record in caplog.records] == [
        f"the collector takes no spans; {BATCH_SPANS} are dropped so far"
    ]


def test_an_exporter_that_raises_costs_its_batch_alone() -> None:
    class Broken(Sink):
        def send(self, request: ExportTraceServiceRequest) -> bool:
            taken = super().send(request)
            if len(self.batches) == 1:
                raise ValueError("channel closed")
            return taken

    sink = Broken()
    out = exporter(sink)
    for _ in range(BATCH_SPANS + 1):
        out.put(span())
    out.close()
    assert (out.exported, out.dropped) == (1, BATCH_SPANS)


def test_the_end_waits_no_longer_than_it_says_for_an_export_that_hangs() -> None:
    class Hangs(Sink):
        def shutdown(self) -> None:
            pass  # a library whose shutdown does not end what is under way

    sink = Hangs()
    sink.gate.clear()
    out = exporter(sink)
    out.put(span())
    assert sink.entered.wait(5)
    out.put(span())
    begun_s = time.monotonic()
    out.close()
    assert time.monotonic() - begun_s < CLOSE_S + export._ENDED_S + SLACK_S
    assert out.dropped == 1
    sink.gate.set()


def test_an_idle_exporter_waits_on_nothing_but_an_event() -> None:
    out = exporter(Sink())
    before_s = time.thread_time(), time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before_s[1] < 0.1
    out.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_checkpoint(tmp_path_factory.mktemp("export") / "tiny-text")


@pytest.mark.parametrize("hole", [black_hole, full_backlog])
async def test_a_collector_that_swallows_all_changes_no_answer_and_no_shutdown(
    model: Path, sink: OtlpSink, hole: object
) -> None:
    request = by_ids([10], greedy(max_tokens=20, ignore_eos=True, seed=7))
    async with traced(model, sink) as stack:
        expected = await generate(stack.channel, request)
    with hole() as endpoint:  # type: ignore[operator]
        lost = {"otlp_endpoint": endpoint}
        async with traced(model, sink, scheduler=lost, **lost) as stack:
            answers = [await generate(stack.channel, request) for _ in range(3)]
            await asyncio.sleep(export.DELAY_S + 0.2)  # an export is under way
            begun_s = time.monotonic()
            await stack.frontend.close()
            closed_s = time.monotonic() - begun_s
    assert all((answer.ids, answer.text) == (expected.ids, expected.text) for answer in answers)
    assert closed_s < CLOSE_S + export._ENDED_S + SLACK_S
    tracer = stack.frontend._tracer
    assert tracer is not None and tracer.exporter.dropped >= 3 and tracer.exporter.exported == 0


async def test_headers_reach_the_collector(model: Path, sink: OtlpSink) -> None:
    headers = ("X-Api-Key=a=b", "other = c")
    async with traced(model, sink, scheduler={"otlp_endpoint": None}, otlp_headers=headers) as stack:
        await generate(stack.channel, by_ids([10], greedy(max_tokens=2)))
        await stack.trace("tokenize")
    assert (sink.metadata["x-api-key"], sink.metadata["other"]) == ("a=b", "c")
