"""Metrics to a collector by OTLP, from a daemon thread of the SDK's: serving never waits for it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import (
    MetricExporter,
    MetricExportResult,
    MetricsData,
    PeriodicExportingMetricReader,
)

from services.common.config import ServiceConfig
from services.common.telemetry import otlp

log = logging.getLogger(__name__)


def open_reader(
    config: ServiceConfig, complete: Callable[[MetricsData], MetricsData], environ: Mapping[str, str] = os.environ
) -> PeriodicExportingMetricReader | None:
    """Exports every OTEL_METRIC_EXPORT_INTERVAL ms, 60 s where that is unset. None: there is no collector.

    Raises StartError for an endpoint or certificates that cannot be used.
    """
    endpoint = otlp.metrics_endpoint(config, environ)
    if endpoint is None:
        return None
    log.info("metrics go to %s", endpoint)
    return _Reader(_Telling(otlp.metric_exporter(config, endpoint)), complete)


class _Reader(PeriodicExportingMetricReader):
    """Adds what the SDK has no instrument for."""

    def __init__(self, exporter: MetricExporter, complete: Callable[[MetricsData], MetricsData]) -> None:
        self._complete = complete
        super().__init__(exporter, export_timeout_millis=1000 * otlp.TIMEOUT_S)

    def _receive_metrics(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> None:
        super()._receive_metrics(self._complete(metrics_data), timeout_millis, **kwargs)


class _Telling(MetricExporter):
    """Logs a collector that comes or goes; the library would at every try."""

    def __init__(self, sink: OTLPMetricExporter) -> None:
        super().__init__(sink._preferred_temporality, sink._preferred_aggregation)
        self._sink = sink
        self._fails = False

    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> MetricExportResult:
        try:
            result = self._sink.export(metrics_data, timeout_millis, **kwargs)
        except Exception as error:
            log.debug("exporting metrics failed", exc_info=error)
            result = MetricExportResult.FAILURE
        fails = result is not MetricExportResult.SUCCESS
        if fails and not self._fails:
            log.warning("the collector takes no metrics; Prometheus has them too, where metrics_port is set")
        elif self._fails and not fails:
            log.info("the collector takes metrics again")
        self._fails = fails
        return result

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        return self._sink.force_flush(timeout_millis)

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        self._sink.shutdown(timeout_millis, **kwargs)
