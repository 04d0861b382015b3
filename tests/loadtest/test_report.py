"""What benchmarks print: percentiles, tables, the last line."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from loadtest import report


def test_percentiles_by_hand() -> None:
    # Ranks 0..4; percent 90 is rank 3.6: 40 + 0.6 * (100 - 40).
    values = [30.0, 10.0, 100.0, 20.0, 40.0]
    assert [report.percentile(values, percent) for percent in (0, 25, 50, 100)] == [10.0, 20.0, 30.0, 100.0]
    assert report.percentile(values, 90) == pytest.approx(76.0)
    assert report.percentile([7.0], 99) == 7.0
    assert report.percentile([], 50) is None
    with pytest.raises(ValueError, match="101"):
        report.percentile(values, 101)


def test_percentiles_are_numpys() -> None:
    values = np.random.default_rng(0).exponential(size=997).tolist()
    for percent in (1, 50, 90, 95, 99, 99.9):
        assert report.percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)))


def test_median_and_range_of_repetitions() -> None:
    assert report.spread([3.0, 1.0, 2.04]) == "2.0 (1.0-3.0)"
    assert report.spread([1.23456], digits=3) == "1.235"
    assert report.spread([None, None]) == "-"
    assert report.middle([None, 1.0, 3.0]) == 2.0
    assert report.middle([None]) is None


def test_columns_line_up() -> None:
    shown = report.table(("system", "tokens/s"), [("a", "1.0"), ("longer", "123456789.0")])
    assert shown.splitlines() == [
        "system     tokens/s",
        "------  -----------",
        "a               1.0",
        "longer  123456789.0",
    ]


def test_the_head_names_machine_and_commit(capsys: pytest.CaptureFixture[str]) -> None:
    facts = report.head("bench_x")
    shown = capsys.readouterr().out
    assert re.search(r"machine   .*\d+ CPUs, \d+ GiB, load \d", shown)
    assert facts["benchmark"] == "bench_x"
    assert all(value in shown for value in facts.values())


def test_outside_a_checkout_the_commit_is_unknown(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert report.commit() == "unknown"


def test_the_last_line_is_one_json_object_without_nan(capsys: pytest.CaptureFixture[str]) -> None:
    report.last_line({"ratio_vs_vllm": None, "out_tokens_per_s": 1.5})
    assert json.loads(capsys.readouterr().out) == {"ratio_vs_vllm": None, "out_tokens_per_s": 1.5}
    with pytest.raises(ValueError, match="JSON"):
        report.last_line({"x": float("nan")})
