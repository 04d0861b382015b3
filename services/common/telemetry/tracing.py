"""The tracer of a process: which traces it has a part in, and its spans' way out. No tracer: nothing is traced."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping

from opentelemetry.sdk.trace.sampling import TraceIdRatioBased

from services.common.config import ServiceConfig
from services.common.telemetry import otlp
from services.common.telemetry.context import SpanContext, new_span_id, new_trace_id
from services.common.telemetry.encoding import Encoder
from services.common.telemetry.export import Exporter
from services.common.telemetry.spans import Span

log = logging.getLogger(__name__)


class Tracer:
    """Samples by the caller's word where there is one, else a share of all traces (W3C parent-based ratio)."""

    def __init__(self, exporter: Exporter, sample_ratio: float) -> None:
        self.exporter = exporter
        self._bound = TraceIdRatioBased.get_bound_for_rate(sample_ratio)

    def begin(self, parent: SpanContext | None) -> SpanContext | None:
        """Of a new span; None where its trace is not sampled."""
        if parent is not None:
            return parent.child() if parent.is_sampled else None
        trace_id = new_trace_id()
        if int(trace_id, 16) & TraceIdRatioBased.TRACE_ID_LIMIT >= self._bound:
            return None
        return SpanContext(trace_id, new_span_id())

    def end(self, span: Span) -> None:
        """A span is over."""
        self.exporter.put(span)

    async def close(self) -> None:
        """Sends what waits, within the exporter's limit."""
        await asyncio.to_thread(self.exporter.close)


def open_tracer(config: ServiceConfig, environ: Mapping[str, str] = os.environ) -> Tracer | None:
    """As the configuration and the standard's variables say; None: off. Raises StartError."""
    endpoint = otlp.spans_endpoint(config, environ)
    if endpoint is None:
        return None
    sink = otlp.span_sink(config, endpoint)
    log.info("spans go to %s", endpoint)
    encoder = Encoder(otlp.resource(config.service), otlp.package_version())
    return Tracer(Exporter(sink, encoder), config.trace_sample_ratio)
