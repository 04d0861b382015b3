"""The reference of docs/metrics.md, from the names of metrics."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from services.common.telemetry.names import METRICS, Metric, prometheus_label

PATH = Path(__file__).parents[2] / "docs" / "metrics.md"

HEADING = "## Reference"
"""What follows it is generated, what goes before is not."""


def render() -> str:
    """The whole page."""
    written, _, _ = PATH.read_text(encoding="utf-8").partition(HEADING)
    told = "From the names, by `python -m services.cli.docs`; do not edit."
    return written + "\n".join([HEADING, "", told, "", *(line for service in METRICS for line in _section(service))])


def _section(service: str) -> Iterator[str]:
    yield from (f"### {service}", "", "| metric | kind | labels | what it is |", "|---|---|---|---|")
    yield from map(_row, METRICS[service])
    yield ""


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{prometheus_label(label)}`" for label in metric.labels)
    return f"| `{metric.prometheus}` | {metric.kind} | {labels} | {metric.description} |"
