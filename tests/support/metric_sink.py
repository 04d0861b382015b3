"""A collector of metrics, by OTLP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.metrics.v1 import metrics_pb2

from services.common.telemetry.names import Metric


class MetricSink(metrics_service_pb2_grpc.MetricsServiceServicer):  # type: ignore[misc]  # the package has no types
    """Keeps each metric as it was told last."""

    def __init__(self) -> None:
        self.services: set[str] = set()
        self._last: dict[str, metrics_pb2.Metric] = {}

    async def Export(
        self, request: metrics_service_pb2.ExportMetricsServiceRequest, context: Any
    ) -> metrics_service_pb2.ExportMetricsServiceResponse:
        """The one RPC of the contract."""
        for part in request.resource_metrics:
            told = {one.key: one.value.string_value for one in part.resource.attributes}
            self.services.add(told["service.name"])
            for scope in part.scope_metrics:
                self._last |= {metric.name: metric for metric in scope.metrics}
        return metrics_service_pb2.ExportMetricsServiceResponse()

    def count(self, metric: Metric) -> int:
        """Durations of a histogram."""
        last = self._last.get(metric.name)
        return 0 if last is None else sum(point.count for point in last.histogram.data_points)

    def total(self, metric: Metric) -> float:
        """Of a counter."""
        last = self._last.get(metric.name)
        return 0 if last is None else sum(point.as_int or point.as_double for point in last.sum.data_points)


@asynccontextmanager
async def collector() -> AsyncIterator[tuple[MetricSink, str]]:
    """(sink, endpoint)."""
    sink, server = MetricSink(), grpc.aio.server()
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(sink, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield sink, f"http://127.0.0.1:{port}"
    finally:
        await server.stop(None)
