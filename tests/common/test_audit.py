"""`make audit`: silence of the database is never taken for a clean bill."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

AUDIT = Path(__file__).parents[2] / ".ci" / "audit"
CLEAN = {"name": "grpcio", "version": "1.85.0", "vulns": []}
BAD = {
    "name": "jinja2",
    "version": "2.0",
    "vulns": [{"id": "PYSEC-2019-217", "fix_versions": ["2.10.1"], "aliases": [], "description": ""}],
}
SKIPPED = {"name": "torch", "skip_reason": "Dependency not found on PyPI and could not be audited"}


def audit(tmp_path: Path, answer: str) -> subprocess.CompletedProcess[str]:
    """With a pip-audit that answers so."""
    (tmp_path / "answer").write_text(answer)
    tool = tmp_path / "pip-audit"
    tool.write_text(f"#!/bin/sh\ncat {tmp_path / 'answer'}\necho 'ConnectionError: no route' >&2\n")
    tool.chmod(0o755)
    return subprocess.run([sys.executable, str(AUDIT), str(tool), "constraints.txt"], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("dependencies", "code", "told"),
    [
        ([CLEAN], 0, "1 packages were looked up, 0 vulnerabilities are known"),
        ([CLEAN, BAD], 1, "jinja2 2.0: PYSEC-2019-217; fixed in 2.10.1"),
        ([CLEAN, SKIPPED], 2, "1 packages could not be looked up: torch"),
        ([BAD, SKIPPED], 1, "PYSEC-2019-217"),
    ],
)
def test_the_exit_code_says_what_is_known(dependencies: list[Any], code: int, told: str, tmp_path: Path) -> None:
    done = audit(tmp_path, json.dumps({"dependencies": dependencies, "fixes": []}))
    assert done.returncode == code
    assert told in done.stdout + done.stderr


def test_a_database_that_is_not_reached_is_told(tmp_path: Path) -> None:
    done = audit(tmp_path, "")
    assert done.returncode == 2
    assert "was not reached: ConnectionError: no route" in done.stderr
