"""Custom resources hold to the schemas of those who serve them (KEDA, the Prometheus operator, cert-manager)."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.charts.combinations import COMBINATIONS
from tests.charts.documents import render

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SOURCES = Path(__file__).parent / "custom_resources"
GROUPS = ("cert-manager.io", "keda.sh", "monitoring.coreos.com")


@pytest.fixture(scope="module")
def schemas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the validator and the npm packages that it needs."""
    folder = tmp_path_factory.mktemp("schemas")
    shutil.copytree(SOURCES, folder, dirs_exist_ok=True)
    npm = ["npm", "install", "--no-audit", "--no-fund", "--silent"]
    subprocess.run(npm, cwd=folder, check=True)
    return folder


def test_custom_resources_are_what_their_owners_take(schemas: Path, chart: Path) -> None:
    documents = [
        document
        for name in COMBINATIONS
        for document in render(name, chart)
        if document["apiVersion"].partition("/")[0] in GROUPS
    ]
    kinds = {document["kind"] for document in documents}
    assert kinds == {"Certificate", "PrometheusRule", "ScaledObject", "ServiceMonitor"}
    assert _wrong(schemas, documents) == []


def test_a_field_of_the_wrong_type_is_found(schemas: Path, chart: Path) -> None:
    monitor = render("metrics-all", chart).one("ServiceMonitor")
    monitor["spec"]["endpoints"][0]["port"] = 9101
    (line,) = _wrong(schemas, [monitor])
    assert "port must be string" in line


def _wrong(schemas: Path, documents: list[dict[str, Any]]) -> list[str]:
    ended = subprocess.run(
        ["node", "validate.mjs"], cwd=schemas, input=json.dumps(documents), capture_output=True, text=True, check=True
    )
    lines: list[str] = json.loads(ended.stdout)
    return lines
