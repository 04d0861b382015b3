"""Where spans go: the configuration, the standard's variables, and TLS."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.common import config
from services.common.errors import StartError
from services.common.telemetry import otlp, tracing
from services.scheduler.config import SchedulerConfig

URL, OTHER = "http://collector:4317", "http://other:4317"


def endpoint(environ: dict[str, str], **settings: Any) -> str | None:
    return otlp.spans_endpoint(SchedulerConfig(**settings), environ)


def test_nothing_is_traced_unless_somebody_says_where_to() -> None:
    assert endpoint({}) is None
    assert tracing.open_tracer(SchedulerConfig(), {}) is None


def test_the_standards_variables_hold_where_the_configuration_says_nothing() -> None:
    assert endpoint({"OTEL_EXPORTER_OTLP_ENDPOINT": URL}) == URL
    assert endpoint({"OTEL_EXPORTER_OTLP_ENDPOINT": OTHER, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": URL}) == URL
    assert endpoint({"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4317"}) == "collector:4317"
    assert endpoint({"OTEL_EXPORTER_OTLP_ENDPOINT": OTHER}, otlp_endpoint=URL) == URL
    assert endpoint({"OTEL_EXPORTER_OTLP_ENDPOINT": URL, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}) == URL


@pytest.mark.parametrize(("key", "value"), [("OTEL_SDK_DISABLED", "True"), ("OTEL_TRACES_EXPORTER", "none")])
def test_the_standards_variables_turn_it_off(key: str, value: str) -> None:
    assert endpoint({key: value, "OTEL_EXPORTER_OTLP_ENDPOINT": URL}, otlp_endpoint=URL) is None


def test_a_protocol_that_is_not_served_is_refused_by_name() -> None:
    with pytest.raises(StartError, match="OTEL_EXPORTER_OTLP_PROTOCOL is 'http/protobuf'; OTLP is sent by grpc alone"):
        endpoint({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, otlp_endpoint=URL)


def test_a_variable_that_is_no_address_is_refused() -> None:
    with pytest.raises(StartError, match="OTEL_EXPORTER_OTLP_ENDPOINT is 'ftp://x'"):
        endpoint({"OTEL_EXPORTER_OTLP_ENDPOINT": "ftp://x"})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--otlp-endpoint", "collector:4317"], "otlp_endpoint.*a URL as http://HOST:4317 is needed.*'collector:4317'"),
        (["--otlp-endpoint", "http://c:4317/v1/traces"], "without a path"),
        (["--otlp-headers", "no-value"], "otlp_headers.*should match pattern"),
        (["--trace-sample-ratio", "1.5"], "trace_sample_ratio.*less than or equal to 1"),
        (["--otlp-endpoint", URL, "--otlp-ca", "/ca.pem"], "otlp_ca is set, but otlp_endpoint is no https:// URL"),
    ],
)
def test_what_cannot_be_is_refused_at_the_start(flags: list[str], message: str) -> None:
    with pytest.raises(StartError, match=message):
        config.load(SchedulerConfig, flags, {})


def test_authorities_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    settings = SchedulerConfig(otlp_endpoint="https://collector:4317", otlp_ca=tmp_path / "gone.pem")
    with pytest.raises(StartError, match=r"otlp_ca: cannot read .*gone.pem: No such file"):
        tracing.open_tracer(settings, {})


def test_the_resource_can_be_added_to_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=staging")
    told = otlp.resource("scheduler").attributes
    assert told["service.name"] == "triptych-scheduler" and told["deployment.environment.name"] == "staging"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    assert otlp.resource("scheduler").attributes["service.name"] == "mine"
