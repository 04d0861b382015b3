"""Where telemetry goes: the configuration and the standard's variables, read into exporters.

https://opentelemetry.io/docs/specs/otel/protocol/exporter/: OTEL_EXPORTER_OTLP_* and OTEL_EXPORTER_OTLP_TRACES_* hold
where the configuration says nothing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import grpc
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace.export import SpanExportResult

from services.common.config import ServiceConfig
from services.common.errors import StartError
from services.common.telemetry import names

TIMEOUT_S = 5.0
"""Of one export, its retries included; OTEL_EXPORTER_OTLP_TIMEOUT says otherwise."""

_TRACES, _METRICS = "TRACES", "METRICS"
"""In the names of variables."""

_LIBRARY_LOGGER = "opentelemetry.exporter.otlp.proto.grpc.exporter"
"""It has a line for every try; what an operator needs to know of them is said here once."""


def spans_endpoint(config: ServiceConfig, environ: Mapping[str, str] = os.environ) -> str | None:
    """The collector's URL; None: spans go nowhere. Raises StartError for a variable that is not served."""
    return _endpoint(config, environ, _TRACES)


def metrics_endpoint(config: ServiceConfig, environ: Mapping[str, str] = os.environ) -> str | None:
    """The same for metrics, which OTEL_METRICS_EXPORTER=none keeps from a collector that takes spans alone."""
    return _endpoint(config, environ, _METRICS)


def _endpoint(config: ServiceConfig, environ: Mapping[str, str], signal: str) -> str | None:
    if (
        environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
        or _set(environ, f"OTEL_{signal}_EXPORTER") == "none"
    ):
        return None
    endpoint = config.otlp_endpoint or _first(environ, _names(signal, "ENDPOINT"))
    if endpoint is None:
        return None
    for name in _names(signal, "PROTOCOL"):
        if (protocol := _set(environ, name)) not in (None, "grpc"):
            raise StartError(f"{name} is {protocol!r}; OTLP is sent by grpc alone, so name the collector's gRPC port")
    if config.otlp_endpoint is None:
        _check_variable(endpoint)
    return endpoint


class SpanSink(OTLPSpanExporter):
    """The library's exporter, its channel, headers and retries, for spans that are encoded already."""

    def send(self, request: ExportTraceServiceRequest) -> bool:
        """Blocks until a collector has taken it, or for the timeout. True: it has."""
        encoded: Any = request
        return self._export(encoded) is SpanExportResult.SUCCESS

    def _translate_data(self, data: Any) -> Any:
        return data

    def _count_data(self, data: Any) -> int:
        return sum(len(scope.spans) for of in data.resource_spans for scope in of.scope_spans)


def span_sink(config: ServiceConfig, endpoint: str) -> SpanSink:
    """Raises StartError for certificates or variables that cannot be read."""
    timeout_s = None if _first(os.environ, _names(_TRACES, "TIMEOUT")) else TIMEOUT_S
    logging.getLogger(_LIBRARY_LOGGER).setLevel(logging.CRITICAL)
    try:
        return SpanSink(
            endpoint, credentials=_credentials(config), headers=_headers(config), timeout=timeout_s, insecure=None
        )
    except Exception as error:
        raise StartError(f"telemetry cannot be sent to {endpoint}: {error}") from error


def metric_exporter(config: ServiceConfig, endpoint: str) -> OTLPMetricExporter:
    """Raises StartError for certificates or variables that cannot be read."""
    timeout_s = None if _first(os.environ, _names(_METRICS, "TIMEOUT")) else TIMEOUT_S
    logging.getLogger(_LIBRARY_LOGGER).setLevel(logging.CRITICAL)
    try:
        return OTLPMetricExporter(
            endpoint, credentials=_credentials(config), headers=_headers(config), timeout=timeout_s, insecure=None
        )
    except Exception as error:
        raise StartError(f"telemetry cannot be sent to {endpoint}: {error}") from error


def resource(service: str) -> Resource:
    """Who tells: OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES add to it, and win."""
    own = {
        "service.name": names.SERVICE_NAME.format(service=service),
        "service.instance.id": str(uuid4()),
        "service.version": package_version(),
    }
    return Resource.create(own).merge(OTELResourceDetector().detect())


def package_version() -> str:
    """Of Triptych, "" where it runs without being installed."""
    try:
        return version("triptych")
    except PackageNotFoundError:
        return ""


def _headers(config: ServiceConfig) -> tuple[tuple[str, str], ...] | None:
    pairs = (header.partition("=") for header in config.otlp_headers)
    return tuple((key.strip().lower(), value.strip()) for key, _, value in pairs) or None


def _credentials(config: ServiceConfig) -> grpc.ChannelCredentials | None:
    if config.otlp_ca is None:
        return None
    try:
        return grpc.ssl_channel_credentials(config.otlp_ca.read_bytes())
    except OSError as error:
        raise StartError(f"otlp_ca: cannot read {config.otlp_ca}: {error.strerror}") from None


def _check_variable(endpoint: str) -> None:
    """The standard lets a gRPC endpoint go without a scheme."""
    parts = urlsplit(endpoint if "://" in endpoint else f"http://{endpoint}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise StartError(f"OTEL_EXPORTER_OTLP_ENDPOINT is {endpoint!r}; a URL as http://HOST:4317 is needed")


def _names(signal: str, what: str) -> tuple[str, str]:
    """Of the variables that say it, the signal's own first."""
    return f"OTEL_EXPORTER_OTLP_{signal}_{what}", f"OTEL_EXPORTER_OTLP_{what}"


def _first(environ: Mapping[str, str], keys: tuple[str, ...]) -> str | None:
    return next((value for key in keys if (value := _set(environ, key))), None)


def _set(environ: Mapping[str, str], key: str) -> str | None:
    return environ.get(key, "").strip() or None
