"""What can be said of the Dockerfiles without building them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))


def test_hadolint_finds_nothing() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or "hadolint"
    ended = subprocess.run([hadolint, "--no-color", *map(str, DOCKERFILES)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.stem)
def test_a_base_is_pinned_by_its_digest_and_can_be_chosen(file: Path) -> None:
    text = file.read_text()
    assert re.search(r"^ARG BASE=\S+:[\w.-]+@sha256:[0-9a-f]{64}$", text, re.MULTILINE)
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", text, re.MULTILINE))
    froms = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert len(froms) > 1
    assert set(froms) <= {"${BASE}", *stages}


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.stem)
def test_the_last_stage_installs_nothing_and_is_not_root(file: Path) -> None:
    last = file.read_text().rpartition("\nFROM ")[2]
    assert re.search(r"^USER \d+:\d+$", last, re.MULTILINE)
    assert not re.search(r"pip|apt-get|curl|wget", last)
    assert re.search(r'^ENTRYPOINT \["triptych"', last, re.MULTILINE)


def test_compose_starts_the_three_services_with_flags_that_they_know() -> None:
    from services.cli.parts import config_type
    from services.common.config import SERVICES, resolve

    composed = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
    assert set(SERVICES) < set(composed)
    for service in SERVICES:
        resolve(config_type(service), composed[service]["command"], {})
        assert composed[service]["read_only"] is True
        assert composed[service]["cap_drop"] == ["ALL"]
        assert "@sha256:" in composed["collector"]["image"]
    assert all(port.startswith("127.0.0.1:") for one in composed.values() for port in one.get("ports", []))
