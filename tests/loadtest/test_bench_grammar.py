"""The grammars' benchmark: its walks and its keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest import bench_grammar
from tests.frontend.harness import text_checkpoint

KEYS = {"schemas", "mask_first_p99_ms", "mask_p99_ms", "mask_first_cpu_p99_ms", "mask_cpu_p99_ms", "forced_share"}
"""What every last line of this benchmark holds, at least."""


def test_the_last_line_holds_the_masks_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = text_checkpoint(tmp_path / "tiny-text")
    assert bench_grammar.main(["--quick", "--model", str(model), "--schemas", "40"]) == 0
    told = capsys.readouterr().out
    last = json.loads(told.splitlines()[-1])
    assert last.keys() >= KEYS and last["schemas"] == 40
    assert last["mask_p50_ms"] > 0 and last["mask_first_p50_ms"] > 0 and 0 < last["forced_share"] < 1
    rows = [line for line in told.splitlines() if line.startswith("mask, first")]
    assert rows[0].split()[3] == "40"
