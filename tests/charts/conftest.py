"""The chart as it is packaged: with dashboards and rules of its own, or, where it has none, with one each to pack."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.helm import CHART


@pytest.fixture(scope="session")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a copy."""
    copy = tmp_path_factory.mktemp("charts") / "triptych"
    shutil.copytree(CHART, copy)
    if not list(copy.glob("dashboards/*.json")):
        (copy / "dashboards").mkdir()
        (copy / "dashboards" / "engine_internals.json").write_text(json.dumps({"title": "{{ instance }}"}))
    if not list(copy.glob("rules/*.yaml")):
        (copy / "rules").mkdir()
        (copy / "rules" / "alerts.yaml").write_text(
            'groups: [{name: a, rules: [{alert: A, expr: up == 0, annotations: {summary: "{{ $labels.pod }}"}}]}]'
        )
    return copy
