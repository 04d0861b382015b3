"""The benchmark of failover: one kill of each kind that a stub allows, and how a gap is told."""

from __future__ import annotations

import json

import pytest

from loadtest import bench_failover
from loadtest.bench_failover import gap_of


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_one_kill_of_each_kind_loses_no_stream(capsys: pytest.CaptureFixture[str]) -> None:
    kinds = [way.key for way in bench_failover.WAYS if not way.is_real]
    assert bench_failover.main(["--kills", "1", *(f"--only={key}" for key in kinds)]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["streams_lost"] == 0
    for key in kinds:
        assert found[f"{key}_streams_hurt"] > 0 and found[f"{key}_p50_s"] > 0


def test_a_gap_ends_with_the_first_id_after_a_pause() -> None:
    assert gap_of(10.0, [10.01, 10.03, 11.2, 11.22], 0.15) == pytest.approx(1.2), "two were on their way"
    assert gap_of(10.0, [10.9, 10.92], 0.15) == pytest.approx(0.9)
    assert gap_of(10.0, [10.02, 10.04, 10.06], 0.15) is None, "it was with another"
