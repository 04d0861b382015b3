"""The metrics of a process: read when somebody asks, told to Prometheus and by OTLP. No Metrics: none are taken."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from opentelemetry.context import Context
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider, TraceBasedExemplarFilter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Histogram,
    HistogramDataPoint,
    MetricReader,
    MetricsData,
)
from opentelemetry.sdk.metrics.export import Metric as SdkMetric
from opentelemetry.trace import NonRecordingSpan, TraceFlags, set_span_in_context
from opentelemetry.trace import SpanContext as SdkSpanContext
from prometheus_client import CollectorRegistry, ProcessCollector

from services.common.config import ServiceConfig
from services.common.telemetry import names, otlp
from services.common.telemetry.context import SpanContext
from services.common.telemetry.exposition import Endpoint, Scraped, ScrapeReader, listen
from services.common.telemetry.metric_export import open_reader
from services.common.telemetry.names import Metric
from services.common.telemetry.readings import FRESH_S, Read, Reading, Snapshot, Tally

CLOSE_S = 1.5
"""What a shutdown gives the last export to leave."""

log = logging.getLogger(__name__)


class Metrics:
    """`record` is called where things happen, and counts from the beginning; `start` begins to tell them.

    What a service counts anyway is read by `start`'s function instead, on the event loop, once a scrape or export.
    """

    def __init__(self, config: ServiceConfig) -> None:
        self.port: int | None = None
        """Where Prometheus is answered, once started."""
        self._config = config
        self._begun_ns = time.time_ns()
        self._snapshot: Snapshot | None = None
        self._endpoint: Endpoint | None = None
        self._metrics = (*names.METRICS["every service"], *names.METRICS[config.service])
        self._scrape = ScrapeReader(self._metrics, self._refresh, self._complete)
        readers: list[MetricReader] = [self._scrape] if config.metrics_port is not None else []
        if (exporting := open_reader(config, self._complete)) is not None:
            readers.append(exporting)
        self._provider = MeterProvider(
            readers, otlp.resource(config.service), exemplar_filter=TraceBasedExemplarFilter(), shutdown_on_exit=False
        )
        self._meter = self._provider.get_meter("triptych", otlp.package_version())
        self._recorded = {
            metric.name: self._meter.create_histogram(
                metric.name,
                metric.unit,
                metric.description,
                explicit_bucket_boundaries_advisory=metric.bounds_s,
            )
            for metric in self._metrics
            if metric.kind == "histogram"
        }

    def record(
        self, metric: Metric, duration_s: float, labels: Mapping[str, str], trace: SpanContext | None = None
    ) -> None:
        """One duration; `trace` is the sampled span that it is an example of."""
        self._recorded[metric.name].record(duration_s, labels, context=_context(trace))

    def start(self, read: Read, *, model: str, listener: socket.socket | None = None) -> None:
        """On the event loop whose service `read` asks; `listener` instead of the configured port, where it is given.

        Raises StartError where the port is taken.
        """
        info = Reading(
            names.INFO, 1, {"service": self._config.service, "model": model, "version": otlp.package_version()}
        )
        self._snapshot = Snapshot(lambda: (info, *read()), asyncio.get_running_loop())
        for metric in self._metrics:
            if metric.kind == "counter":
                self._meter.create_observable_counter(
                    metric.name, [self._observe(metric)], metric.unit, metric.description
                )
            elif metric.kind == "gauge":
                self._meter.create_observable_gauge(
                    metric.name, [self._observe(metric)], metric.unit, metric.description
                )
        if self._config.metrics_port is not None:
            registry = CollectorRegistry()
            registry.register(Scraped(self._scrape.families))
            ProcessCollector(registry=registry)
            host = self._config.metrics_host
            self._endpoint = Endpoint(listener or listen(host, self._config.metrics_port), registry)
            self.port = self._endpoint.port
            if listener is None:
                log.info("serving metrics on %s:%d", host, self.port)

    async def close(self) -> None:
        """Tells what waits, within CLOSE_S; a collector that takes longer is left."""
        if self._endpoint is not None:
            await asyncio.to_thread(self._endpoint.close)
        # A daemon: an export that does not return must not keep the process from its end.
        closing = threading.Thread(target=self._provider.shutdown, name="metrics-end", daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, CLOSE_S)

    def _refresh(self) -> None:
        if self._snapshot is not None:
            self._snapshot.refresh()

    def _observe(self, metric: Metric) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observations(options: CallbackOptions) -> Iterable[Observation]:
            return [
                Observation(reading.value + 0, reading.labels)  # OTLP takes no bool for a number
                for reading in self._readings(metric)
                if not isinstance(reading.value, Tally)
            ]

        return observations

    def _readings(self, metric: Metric) -> Iterable[Reading]:
        """A loop that does not answer leaves the last ones: whoever has to know has asked by `refresh`."""
        if self._snapshot is None:
            return ()
        try:
            self._snapshot.refresh(FRESH_S)
        except (TimeoutError, RuntimeError) as error:
            log.debug("no new readings", exc_info=error)
        return self._snapshot.of(metric)

    def _complete(self, data: MetricsData) -> MetricsData:
        """With the histograms that services count themselves, which the SDK has no instrument for."""
        if self._snapshot is None or not data.resource_metrics:
            return data
        told = [self._told(metric) for metric in self._metrics if metric.kind == "histogram"]
        own = [metric for metric in told if metric is not None]
        first, *rest = data.resource_metrics
        scope, *scopes = first.scope_metrics
        scope = replace(scope, metrics=[*scope.metrics, *own])
        return replace(data, resource_metrics=[replace(first, scope_metrics=[scope, *scopes]), *rest])

    def _told(self, metric: Metric) -> SdkMetric | None:
        readings = self._snapshot.of(metric) if self._snapshot is not None else ()
        points = [self._point(reading, reading.value) for reading in readings if isinstance(reading.value, Tally)]
        if not points:
            return None
        return SdkMetric(metric.name, metric.description, metric.unit, Histogram(points, _CUMULATIVE))

    def _point(self, reading: Reading, tally: Tally) -> HistogramDataPoint:
        return HistogramDataPoint(
            attributes=dict(reading.labels),
            start_time_unix_nano=self._begun_ns,
            time_unix_nano=time.time_ns(),
            count=sum(tally.counts),
            sum=tally.sum_s,
            bucket_counts=tuple(tally.counts),
            explicit_bounds=tuple(tally.bounds_s),
            min=None,  # type: ignore[arg-type]  # not known, and optional in OTLP
            max=None,  # type: ignore[arg-type]
        )


def open_metrics(config: ServiceConfig) -> Metrics | None:
    """As the configuration and the standard's variables say; None: nobody asks for them. Raises StartError."""
    if config.metrics_port is None and otlp.metrics_endpoint(config) is None:
        return None
    return Metrics(config)


_CUMULATIVE = AggregationTemporality.CUMULATIVE
_NOBODY = Context()


def _context(trace: SpanContext | None) -> Context:
    if trace is None:
        return _NOBODY
    ids = SdkSpanContext(
        int(trace.trace_id, 16), int(trace.span_id, 16), is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED)
    )
    return set_span_in_context(NonRecordingSpan(ids), _NOBODY)
