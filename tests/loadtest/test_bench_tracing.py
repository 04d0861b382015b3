"""The benchmark of tracing: real processes with few streams, and its arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest import bench_tracing
from loadtest.bench_tracing import Found, confidence_95
from tests.frontend.harness import text_checkpoint


@pytest.mark.slow
def test_the_whole_benchmark_with_few_streams(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = text_checkpoint(tmp_path / "tiny-text")
    small = ["--streams", "2", "--tokens", "8", "--bursts", "2", "--step-ms", "1", "--pairs", "2"]
    assert bench_tracing.main(["--model", str(model), *small]) == 0
    *shown, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert found["pairs"] == 2 and found["tokens_per_request"] == 8
    low, high = found["cpu_cost_pct_ci95"]
    assert low <= found["cpu_cost_pct"] <= high
    assert found["cpu_ms_per_request_off"] > 0 and found["cpu_ms_per_request_on"] > 0
    assert any(line.startswith("on: scheduler") for line in shown)


def test_the_cost_is_what_the_traced_turn_of_a_pair_takes_more() -> None:
    off = [{"frontend": 0.010, "scheduler": 0.010}, {"frontend": 0.03, "scheduler": 0.01}]
    on = [{"frontend": 0.012, "scheduler": 0.010}, {"frontend": 0.03, "scheduler": 0.01}]
    assert Found(off, on).costs_pct() == pytest.approx([10.0, 0.0])


@pytest.mark.parametrize(("num", "quantile"), [(5, 2.776), (10, 2.262), (12, 2.201), (30, 2.045)])
def test_the_interval_is_students(num: int, quantile: float) -> None:
    """Quantiles of the 97.5th percentile from Student's table."""
    samples = [float(i % 2) for i in range(num)]
    low, high = confidence_95(samples) or [0, 0]
    mean = sum(samples) / num
    deviation = (sum((sample - mean) ** 2 for sample in samples) / (num - 1)) ** 0.5
    assert (low + high) / 2 == pytest.approx(mean)
    assert (high - low) / 2 == pytest.approx(quantile * deviation / num**0.5, rel=0.01)


def test_one_pair_has_no_interval() -> None:
    assert confidence_95([3.0]) is None
