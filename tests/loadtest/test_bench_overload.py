"""The benchmark of overload: real processes under a short one, and its arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest import bench_overload
from loadtest.bench_overload import Found, growth_mb, values
from loadtest.open_loop import Outcome
from tests.frontend.harness import text_checkpoint


def test_the_whole_benchmark_with_few_slots(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing fails but by a refusal, somebody is served, and the wait is over when the load is."""
    monkeypatch.setattr(bench_overload, "CAPACITY_S", 2.0)
    model = text_checkpoint(tmp_path / "tiny-text")
    small = ["--slots", "4", "--seconds", "4", "--max-queue-wait-s", "1"]
    assert bench_overload.main(["--model", str(model), *small]) == 0
    *shown, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert found["failed"] == 0 and found["capacity_per_s"] > 0
    assert found["accepted"] > 4 and found["refused"] > found["accepted"]
    assert found["accepted"] + found["refused"] == found["requests"]
    assert found["refused_late"] < found["refused"]
    assert any(line.startswith("memory of the scheduler") for line in shown)


def outcome(token_s: tuple[float, ...], end_s: float, failure: str | None = None) -> Outcome:
    return Outcome(0.0, 16, len(token_s), 0.0, token_s, end_s, failure)


def test_refusals_count_from_when_they_were_due_and_late_ones_apart() -> None:
    outcomes = [outcome((1.5, 1.6), 1.6), outcome((2.2,), 2.2)]
    outcomes += [outcome((), 0.01, "RESOURCE_EXHAUSTED"), outcome((), 2.3, "RESOURCE_EXHAUSTED")]
    outcomes += [outcome((), 0.1, "UNAVAILABLE")]
    options = bench_overload._parser().parse_args([])
    told = values(Found(0.5, outcomes, 4.0, {}, 0.5), options)
    assert (told["accepted"], told["refused"], told["refused_late"], told["failed"]) == (2, 2, 1, 1)
    assert told["goodput_of_capacity"] == 1.0
    assert told["ttft_p50_s"] == pytest.approx(1.85) and told["ttft_p99_of_limit"] == pytest.approx(1.1, abs=0.01)
    assert told["refusal_p50_ms"] == pytest.approx(1155)


def test_memory_is_compared_with_what_it_was_under_load() -> None:
    assert growth_mb([1.0, 50.0, 90.0, 99.0, 100.0, 100.0, 101.0, 102.0, 103.0, 104.0, 105.0]) == pytest.approx(3.0)
    assert growth_mb([1.0, 2.0]) is None
