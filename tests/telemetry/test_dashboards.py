"""Dashboards and alerts speak of metrics that exist, and of runbooks that do."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.cli import metric_docs
from services.common.telemetry import names
from services.common.telemetry.names import METRICS, prometheus_label

ROOT = Path(__file__).parents[2]
DASHBOARDS = sorted((ROOT / "charts/triptych/dashboards").glob("*.json"))
RULES = ROOT / "charts/triptych/rules/alerts.yaml"
NOT_OURS = {"process_resident_memory_bytes", "process_cpu_seconds_total", "up"}
EVERYWHERE = {"job", "instance", "le"}


def known() -> dict[str, set[str]]:
    """Labels of each series, by its name in Prometheus."""
    series: dict[str, set[str]] = {name: set() for name in NOT_OURS}
    for metric in (metric for metrics in METRICS.values() for metric in metrics):
        suffixes = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
        labels = {prometheus_label(label) for label in metric.labels}
        series |= dict.fromkeys((metric.prometheus + suffix for suffix in suffixes), labels)
    return series


def panels(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["panels"]
    return found


def alerts() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def expressions() -> Iterator[str]:
    for path in DASHBOARDS:
        yield from (target["expr"] for panel in panels(path) for target in panel["targets"])
    yield from (alert["expr"] for alert in alerts())


def series_of(expression: str) -> set[str]:
    """Its series: what is left of its words without labels, numbers, strings and functions."""
    bare = re.sub(r"by \([^)]*\)|\{[^}]*\}|\[[^]]*\]", "", expression)
    return set(re.findall(r"\b[a-z]\w+\b(?!\s*\()", bare)) - {"by"}


def test_every_series_and_label_of_an_expression_is_one_that_is_told() -> None:
    told, used = known(), set()
    for expression in expressions():
        found = series_of(expression)
        assert found and found <= told.keys(), expression
        used |= found
        for name, selector in re.findall(r"(\w+)\{([^}]*)\}", expression):
            for label in re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", selector):
                assert label in told[name] | EVERYWHERE, f"{label} of {name}"
        labels = set().union(*(told[name] for name in found))
        for grouping in re.findall(r"by \(([^)]*)\)", expression):
            assert set(re.split(r",\s*", grouping)) <= labels | EVERYWHERE, expression
    shown = {re.sub("_(bucket|sum|count)$", "", name) for name in used}
    unseen = {metric.prometheus for metrics in METRICS.values() for metric in metrics} - shown
    assert unseen == set(), "on no dashboard and in no alert"


def test_a_series_that_nobody_tells_is_found_by_that_search() -> None:
    expression = 'sum by (job) (rate(triptych_made_up_total{job=~"$job"}[5m])) / scalar(triptych_can_generate) > 0.5'
    assert series_of(expression) - known().keys() == {"triptych_made_up_total"}


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_have_places_titles_descriptions_and_no_two_one_id(path: Path) -> None:
    board = json.loads(path.read_text())
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids) > 5
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]}
    assert len(places) == len(ids)
    assert all(panel["title"] and panel["description"] for panel in board["panels"])
    variables = {variable["name"] for variable in board["templating"]["list"]} | {"__rate_interval"}
    for panel in board["panels"]:
        assert set(re.findall(r"\$(\w+)", json.dumps(panel["targets"]))) <= variables


def test_objectives_that_can_be_chosen_are_bounds_of_buckets() -> None:
    board = json.loads((ROOT / "charts/triptych/dashboards/service-levels.json").read_text())
    chosen = {variable["name"]: variable for variable in board["templating"]["list"]}
    for name, bounds_s in (
        ("ttft_slo", names.TIME_TO_FIRST_TOKEN_BOUNDS_S),
        ("tpot_slo", names.TIME_PER_OUTPUT_TOKEN_BOUNDS_S),
    ):
        for option in chosen[name]["options"]:
            assert float(option["value"]) in bounds_s and option["value"] == str(float(option["value"]))


def test_every_alert_has_its_runbook_and_its_unit_test() -> None:
    headings = re.findall(r"^## (\w+)$", (ROOT / "docs/runbooks.md").read_text(), re.MULTILINE)
    assert headings == [alert["alert"] for alert in alerts()]
    for alert in alerts():
        assert alert["annotations"]["runbook_url"] == f"docs/runbooks.md#{alert['alert'].lower()}"
    cases = yaml.safe_load((Path(__file__).parent / "alerts_test.yaml").read_text())["tests"]
    fired = {case["alertname"] for test in cases for case in test["alert_rule_test"] if case["exp_alerts"]}
    silent = {case["alertname"] for test in cases for case in test["alert_rule_test"] if not case["exp_alerts"]}
    assert fired == silent == set(headings)


def test_the_page_of_metrics_is_current() -> None:
    assert metric_docs.PATH.read_text() == metric_docs.render(), "run python -m services.cli.docs"
