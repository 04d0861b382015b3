"""docs/metrics.md, from the names of metrics."""

# ruff: noqa: E501  lines of Markdown

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from services.common.telemetry.names import METRICS, Metric, prometheus_label

PATH = Path(__file__).parents[2] / "docs" / "metrics.md"

_INTRO = """# Metrics

Generated from the names by `python -m services.cli.docs`; do not edit.

    triptych up --frontend.metrics-port 9464 --scheduler.metrics-port 9465 --executor.metrics-port 9466
    curl http://127.0.0.1:9464/metrics

Each service answers Prometheus on `metrics_port`, at `metrics_host`, which is loopback until you say otherwise; without a
port nothing is measured. Where `otlp_endpoint` (or `OTEL_EXPORTER_OTLP_ENDPOINT`) names a collector, the same metrics go
there by OTLP every `OTEL_METRIC_EXPORT_INTERVAL` milliseconds, 60,000 by default, from a thread that nothing waits for;
`OTEL_METRICS_EXPORTER=none` keeps them from one that takes spans alone. A collector that is gone costs metrics and one
line in the log, and a shutdown 1.5 s.

**What they cost.** The step loop pays nothing: what services count anyway is read when a scrape or an export asks, on
the event loop, between two steps. Only what a call takes is noted as it ends, a few times a request. An event loop that
does not answer within 2 s fails its scrape, so `up` is 0 where a process hangs.

**What they leave out.** The scheduler's self-test is in none of its metrics, nor in the frontend's. An executor cannot
tell it from a request: its steps, rows and tokens are what the device did, one self-test a `self_test_interval_s` of an
idle engine included. No label holds what a caller made up: models are told by the served name, reasons are those of
`ErrorInfo`, and tenants, request ids, labels and names of methods that do not exist are nowhere.

**The first token** is counted once a request, from the arrival of its call, tokenization and queue included, when it
leaves for the client; a preemption later does not count again, a client that leaves before has none, and a stream that a
client resumes had its own already. The scheduler's `triptych_time_to_first_token_seconds` is the part from its submission,
of each choice, resumed ones too.

**Exemplars.** Where a call is traced, its durations carry its trace and span ids, in OpenMetrics (Prometheus asks for it
with `--enable-feature=exemplar-storage`) and by OTLP.

**Several frontend processes** (`workers`) answer on one port: the parent asks each and tells all of them, with its
number as the label `worker`. One that is being replaced is left out until it is there again, and its counters begin
anew, which `rate` understands. By OTLP each process tells for itself, with its own `service.instance.id`.

**Ranks.** Rank 0 of an executor tells for all; another that is started by itself refuses `metrics_port`.

The SDK's families are written by the Prometheus client library, with the processes' own `process_*` (memory, CPU, open
files) beside them. Names here are Prometheus'; by OTLP they have dots, and neither unit nor `_total`. Histograms of calls
and generations have the buckets of the OpenTelemetry conventions, and further ones upward.

## Dashboards

`charts/triptych/dashboards` holds three for Grafana (import them, or let the chart do it); each asks for a Prometheus data
source and the job:

| dashboard | what it answers |
|---|---|
| `service-levels.json` | what callers see: first token, time per token, errors, and goodput against objectives chosen above the panels |
| `engine.json` | where the time of requests and steps goes: queue, prefill, decode; plan, execute, sample, apply |
| `capacity.json` | how full it is: KV blocks, slots, the device's time, memory |

Objectives are bounds of buckets, so the shares are exact. Goodput is told as a lower bound: how many generations met both
objectives cannot be known from two histograms, but it is at least the one share plus the other minus one.

## Alerts

`charts/triptych/rules/alerts.yaml` is a rule file of Prometheus. Each alert links to what to do: [runbooks](runbooks.md).
"""


def render() -> str:
    """The whole page."""
    return "\n".join([_INTRO, "## Reference", "", *(line for service in METRICS for line in _section(service))])


def _section(service: str) -> Iterator[str]:
    yield from (f"### {service}", "", "| metric | kind | labels | what it is |", "|---|---|---|---|")
    yield from map(_row, METRICS[service])
    yield ""


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{prometheus_label(label)}`" for label in metric.labels)
    return f"| `{metric.prometheus}` | {metric.kind} | {labels} | {metric.description} |"
