"""Spans to a collector by OTLP, beside serving: what serves only ever appends to a bounded queue.

A thread of its own encodes and sends; a collector that is slow, gone or silent costs spans, which are counted, and
never time: not of a request, and of a shutdown no more than it is given.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from services.common.telemetry.encoding import Encoder
from services.common.telemetry.spans import Span

QUEUE_SPANS = 8192
"""That wait for the collector; more are dropped."""

BATCH_SPANS = 256
"""Encoding them holds the GIL for 1 to 2 ms, as long as what serves may have to wait."""

DELAY_S = 1.0
"""What a span waits for others, at most."""

CLOSE_S = 1.5
"""What a shutdown gives the last spans to leave."""

_ENDED_S = 0.5
_TOLD_INTERVAL_S = 60.0

log = logging.getLogger(__name__)


class Sink(Protocol):
    """The way to a collector."""

    def send(self, request: ExportTraceServiceRequest) -> bool:
        """Blocks until a collector has taken it, or for as long as it is tried."""

    def shutdown(self) -> None:
        """Ends a send that is under way."""


class Exporter:
    """`put` may be called from any thread and returns at once; `close` blocks, for CLOSE_S + _ENDED_S at most."""

    def __init__(self, sink: Sink, encoder: Encoder, *, queue_spans: int = QUEUE_SPANS) -> None:
        self.exported = 0
        """Spans that a collector has taken."""
        self.dropped = 0
        """Spans that found the queue full, or that no collector took."""
        self._sink = sink
        self._encoder = encoder
        self._queue: deque[Span] = deque()
        self._queue_spans = queue_spans
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._told_s = -_TOLD_INTERVAL_S
        self._fails = False
        # A daemon: an export that does not return must not keep the process from its end.
        self._thread = threading.Thread(target=self._run, name="otlp-spans", daemon=True)
        self._thread.start()

    def put(self, span: Span) -> None:
        """Takes a span, or drops it where too many wait."""
        if len(self._queue) >= self._queue_spans or self._closing.is_set():
            self.dropped += 1
            return
        self._queue.append(span)
        if not self._wake.is_set():
            self._wake.set()

    def close(self) -> None:
        """Sends what waits, and gives up on it where the collector does not take it in time."""
        self._closing.set()
        self._wake.set()
        self._thread.join(CLOSE_S)
        self._sink.shutdown()  # ends an export under way
        self._thread.join(_ENDED_S)
        if left := len(self._queue):
            self.dropped += left
            log.warning("%d spans were not sent before the end", left)

    def _run(self) -> None:
        while True:
            self._wake.wait()  # without a limit: an idle process uses no CPU
            self._closing.wait(DELAY_S)
            self._wake.clear()
            while self._queue:
                self._export([self._queue.popleft() for _ in range(min(BATCH_SPANS, len(self._queue)))])
            if self._closing.is_set():
                return

    def _export(self, spans: Sequence[Span]) -> None:
        try:
            taken = self._sink.send(self._encoder.request(spans))
        except Exception as error:
            log.debug("exporting spans failed", exc_info=error)
            taken = False
        if taken:
            self.exported += len(spans)
        else:
            self.dropped += len(spans)
        self._tell(taken)

    def _tell(self, taken: bool) -> None:
        """Logs a collector that comes or goes, and once a minute what it costs."""
        now_s = time.monotonic()
        if not taken and now_s - self._told_s >= _TOLD_INTERVAL_S:
            log.warning("the collector takes no spans; %d are dropped so far", self.dropped)
            self._told_s = now_s
        elif taken and self._fails:
            log.info("the collector takes spans again; %d were dropped", self.dropped)
            self._told_s = now_s - _TOLD_INTERVAL_S
        self._fails = not taken
