"""The soak: half a minute of it on real processes, and its arithmetic."""

from __future__ import annotations

import json

import pytest

from loadtest import soak
from loadtest.parts import Held
from loadtest.soak import MIB, Sample, SoakError, growth


@pytest.mark.timeout(240)
def test_half_a_minute_of_calls_of_all_kinds_leaves_nothing_behind(capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main(["--stub", "--seconds", "30", "--rate", "10"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["calls"] > 200 and found["calls_failed"] == found["calls_skipped"] == 0
    assert found["rounds_idle"] == soak.ROUNDS, "every block was free after each round"
    assert not found["cut_short"]


def held(mib: float, descriptors: int = 20, threads: int = 5) -> Held:
    return Held(round(mib * MIB), descriptors, threads)


def test_what_grows_after_the_warm_up_is_no_longer_flat() -> None:
    samples = [Sample(float(at_s), held(100 + min(at_s, 30))) for at_s in range(91)]
    assert growth(samples, [held(100)] * 6).is_flat, "it grew in the warm-up alone"
    leaking = [Sample(float(at_s), held(100 + at_s / 2)) for at_s in range(91)]
    found = growth(leaking, [held(100)] * 6)
    assert found.grown_mib == pytest.approx(30) and not found.is_flat


@pytest.mark.parametrize("more", [{"descriptors": 40}, {"threads": 20}])
def test_descriptors_and_threads_that_stay_are_no_longer_flat(more: dict[str, int]) -> None:
    samples = [Sample(float(at_s), held(100)) for at_s in range(9)]
    assert not growth(samples, [held(100), held(100), held(100), held(100, **more)]).is_flat


def test_a_run_too_short_to_tell_says_so() -> None:
    with pytest.raises(SoakError, match="too few for a line"):
        growth([Sample(0.0, held(100))], [held(100)])
