"""The Prometheus endpoint: what the OpenTelemetry SDK has collected, as text that a server of theirs scrapes.

OpenTelemetry's own exporter for Prometheus leaves out exemplars, so the families are made here; prometheus_client
writes them, as OpenMetrics, which has exemplars, or in the older format, as the scraper asks.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from opentelemetry.sdk.metrics.export import (
    Histogram,
    HistogramDataPoint,
    MetricReader,
    MetricsData,
    NumberDataPoint,
    Sum,
)
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

from services.common.errors import StartError
from services.common.server import is_loopback
from services.common.telemetry.names import Metric, prometheus_label

log = logging.getLogger(__name__)

_CLIENT_S = 10.0
"""What a scraper is given for each part of its request."""


class ScrapeReader(MetricReader):
    """Collects when it is scraped; `refresh` is called before, and may raise, which is the scraper's answer."""

    def __init__(
        self,
        metrics: Iterable[Metric],
        refresh: Callable[[], None],
        complete: Callable[[MetricsData], MetricsData],
    ) -> None:
        super().__init__()
        self._known = {metric.name: metric for metric in metrics}
        self._refresh = refresh
        self._complete = complete
        self._lock = threading.Lock()
        self._received: list[MetricsData] = []

    def _receive_metrics(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> None:
        self._received.append(self._complete(metrics_data))

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        """Nothing is held."""

    def families(self) -> list[Family]:
        """All metrics, as they are now."""
        self._refresh()
        with self._lock:
            self._received.clear()
            self.collect()
            received = self._received.copy()
        told = (
            metric
            for data in received
            for of in data.resource_metrics
            for scope in of.scope_metrics
            for metric in scope.metrics
        )
        return [_family(self._known[one.name], one.data) for one in told if one.name in self._known]


class Scraped(Collector):
    """Families that a function makes, for a registry."""

    def __init__(self, families: Callable[[], Iterable[Family]]) -> None:
        self._families = families

    def describe(self) -> Iterable[Family]:
        """Nothing is collected before it is asked for."""
        return ()

    def collect(self) -> Iterator[Family]:
        """All of them."""
        yield from self._families()


class Endpoint:
    """Answers GET with the metrics of a registry, in threads of its own. `port` is the one listened on."""

    def __init__(self, listener: socket.socket, registry: CollectorRegistry) -> None:
        self.port = int(listener.getsockname()[1])
        self._server = _Server(listener)
        self._server.set_app(make_wsgi_app(registry))
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops listening; blocks for half a second at most."""
        self._server.shutdown()
        self._server.socket.close()


def listen(host: str, port: int) -> socket.socket:
    """A port for an endpoint; 0 takes a free one. Raises StartError. Warns where others than this machine reach it."""
    if not is_loopback(host):
        log.warning(
            "metrics are told on %s in plain HTTP to whoever reaches the port; let a private network alone reach it "
            "(docs/security.md)",
            host,
        )
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        reason = error.strerror or str(error)
        raise StartError(
            f"cannot listen on {host}:{port} for metrics: {reason}; choose another with --metrics-host and "
            "--metrics-port"
        ) from None


class _Quiet(WSGIRequestHandler):
    timeout = _CLIENT_S

    def log_message(self, format: str, *args: Any) -> None:
        """A scrape is no news."""


class _Server(ThreadingMixIn, WSGIServer):
    """On a socket that listens already."""

    daemon_threads = True

    def __init__(self, listener: socket.socket) -> None:
        self.address_family = listener.family
        super().__init__(listener.getsockname()[:2], _Quiet, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        # What binding would set, without asking for a name of this machine.
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a scrape failed", exc_info=True)


def _family(metric: Metric, data: Any) -> Family:
    name, labels = metric.prometheus, [prometheus_label(label) for label in metric.labels]
    if isinstance(data, Histogram):
        histogram = HistogramMetricFamily(name, metric.description, labels=labels)
        for point in data.data_points:
            histogram.add_metric(_values(metric, point), _buckets(point), point.sum)
        return histogram
    family: CounterMetricFamily | GaugeMetricFamily
    if isinstance(data, Sum) and data.is_monotonic:
        family = CounterMetricFamily(name, metric.description, labels=labels)
    else:
        family = GaugeMetricFamily(name, metric.description, labels=labels)
    for number in data.data_points:
        family.add_metric(_values(metric, number), number.value)
    return family


def _values(metric: Metric, point: NumberDataPoint | HistogramDataPoint) -> list[str]:
    attributes = point.attributes or {}
    return [str(attributes.get(label, "")) for label in metric.labels]


def _buckets(point: HistogramDataPoint) -> Sequence[Any]:
    """(upper bound, cumulative count, exemplar) each."""
    bounds = [*point.explicit_bounds, float("inf")]
    exemplars: list[Exemplar | None] = [None] * len(bounds)
    for one in point.exemplars:
        if one.trace_id and one.span_id:
            place = next(place for place, bound in enumerate(bounds) if one.value <= bound)
            ids = {"trace_id": f"{one.trace_id:032x}", "span_id": f"{one.span_id:016x}"}
            exemplars[place] = Exemplar(ids, one.value, one.time_unix_nano / 1e9)
    buckets, total = [], 0
    for bound, count, exemplar in zip(bounds, point.bucket_counts, exemplars, strict=True):
        total += count
        buckets.append((floatToGoString(bound), total, exemplar))  # type: ignore[no-untyped-call]
    return buckets
