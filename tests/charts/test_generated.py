"""The chart's README and schema are those of its values and of the services' configuration."""

from __future__ import annotations

import json

from charts import generate
from services.cli.parts import config_type
from services.common.config import SERVICES


def test_the_readme_is_current() -> None:
    assert (generate.CHART / "README.md").read_text() == generate.readme(), "run: python -m charts.generate"


def test_the_schema_is_current() -> None:
    assert json.loads((generate.CHART / "values.schema.json").read_text()) == generate.schema(), (
        "run: python -m charts.generate"
    )


def test_every_value_is_described() -> None:
    described = generate.readme()
    missing = [path for path in generate.paths() if f"| `{path}` |" not in described]
    assert missing == []


def test_every_key_of_a_service_is_the_charts_or_can_be_set() -> None:
    schema = generate.schema()["properties"]
    for service in SERVICES:
        keys = set(config_type(service).model_fields)
        assert keys - set(generate.OWNED) == set(schema[service]["properties"]["config"]["properties"])
