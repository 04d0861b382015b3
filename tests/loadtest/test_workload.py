"""What is asked and when: Poisson arrivals, lengths, bounds, one seed."""

from __future__ import annotations

import math

import numpy as np
import pytest

from loadtest.workload import MAX_REQUESTS, Lengths, Plan, WorkloadError, burst, poisson


def plan(**changes: object) -> Plan:
    arguments = {
        "rate_per_s": 50.0,
        "prompt": Lengths.parse("2-9"),
        "output": Lengths.parse("4"),
        "vocab_size": 512,
        "seed": 1,
        "max_requests": MAX_REQUESTS,
        "duration_s": 200.0,
        "warmup_s": 0.0,
    }
    return poisson(**(arguments | changes))


def test_arrivals_are_a_poisson_process_of_the_rate_asked_for() -> None:
    at_s = np.array([request.at_s for request in plan().requests])
    # A Poisson count of mean 50 * 200 has a standard deviation of 100; four of them.
    assert abs(len(at_s) - 10_000) < 400
    gaps_s = np.diff(at_s)
    # Exponential gaps: standard deviation equal to the mean, and exp(-1) of them longer than it (binomial, 4 sigma).
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(1, abs=0.06)
    share = (gaps_s > 1 / 50).mean()
    assert share == pytest.approx(math.exp(-1), abs=4 * math.sqrt(0.37 * 0.63 / 10_000))
    # Independent: neighbours do not correlate (standard error 1 / sqrt(n)).
    assert abs(np.corrcoef(gaps_s[:-1], gaps_s[1:])[0, 1]) < 4 / math.sqrt(len(gaps_s))
    # Memoryless: counts of whole seconds have a variance equal to their mean, 50 (sd of the ratio: sqrt(2 / 200)).
    counts = np.bincount(at_s.astype(int), minlength=200)
    assert counts.var() / counts.mean() == pytest.approx(1, abs=4 * math.sqrt(2 / 200))


def test_one_seed_one_plan_and_another_seed_another() -> None:
    assert plan(duration_s=2.0) == plan(duration_s=2.0)
    assert plan(duration_s=2.0).requests != plan(duration_s=2.0, seed=2).requests


def test_another_length_distribution_leaves_the_arrivals_as_they_are() -> None:
    short, long = plan(duration_s=2.0), plan(duration_s=2.0, prompt=Lengths.parse("30"), output=Lengths.parse("1-99"))
    assert [request.at_s for request in short.requests] == [request.at_s for request in long.requests]


def test_a_plan_ends_with_the_duration_or_the_last_of_the_requests() -> None:
    by_time = plan(duration_s=3.0)
    assert max(request.at_s for request in by_time.requests) < 3.0
    assert by_time.end_s == by_time.window_s == 3.0
    by_count = plan(max_requests=10, warmup_s=0.01)
    assert len(by_count.requests) == 10
    assert by_count.end_s == by_count.requests[-1].at_s
    assert by_count.window_s == by_count.end_s - 0.01


def test_prompts_have_their_length_and_no_common_start() -> None:
    requests = plan(duration_s=1.0, prompt=Lengths.parse("20-30")).requests
    assert {len(request.prompt_ids) for request in requests} <= set(range(20, 31))
    assert all(64 <= token_id < 512 for request in requests for token_id in request.prompt_ids)
    assert len({request.prompt_ids[:4] for request in requests}) == len(requests)


def test_a_burst_is_due_at_once() -> None:
    made = burst(streams=16, prompt=Lengths.parse("50-55"), output=Lengths.parse("64"), vocab_size=512, seed=0)
    assert [request.at_s for request in made.requests] == [0.0] * 16
    assert {request.output_tokens for request in made.requests} == {64}
    assert made.window_s == 0


@pytest.mark.parametrize(
    ("text", "low", "high", "median"),
    [
        ("64", 64, 64, 64),
        ("50-550", 50, 550, 300),
        ("normal:300,50,100-400", 100, 400, 300),
        ("lognormal:200,0.5,10-1000", 10, 1000, 200),  # exp(mu) is a lognormal's median
    ],
)
def test_lengths_follow_their_distribution(text: str, low: int, high: int, median: int) -> None:
    lengths = Lengths.parse(text)
    drawn = lengths.draw(np.random.default_rng(0), 20_000)
    assert drawn.dtype.kind == "i"
    assert low <= drawn.min() and drawn.max() <= high == lengths.largest
    assert np.median(drawn) == pytest.approx(median, rel=0.03)
    if text == "50-550":  # both ends occur, and the spread is a uniform's: (n^2 - 1) / 12 with n = 501
        assert (drawn.min(), drawn.max()) == (50, 550)
        assert drawn.std() == pytest.approx(math.sqrt((501**2 - 1) / 12), rel=0.03)
    if text.startswith("lognormal"):
        assert np.log(drawn).std() == pytest.approx(0.5, rel=0.03)


@pytest.mark.parametrize("text", ["", "0", "0-5", "9-5", "uniform", "normal:1,2", "lognormal:0,1,1-5", "-5", "1.5"])
def test_a_length_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(WorkloadError, match="length"):
        Lengths.parse(text)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rate_per_s": 0.0}, "rate 0.0"),
        ({"rate_per_s": math.inf}, "rate inf"),
        ({"rate_per_s": math.nan}, "rate nan"),
        ({"max_requests": 0}, r"0 requests are not in \[1, 100000\]"),
        ({"max_requests": 100_001}, "100001 requests"),
        ({"duration_s": math.inf}, "duration of inf"),
        ({"warmup_s": 200.0}, r"warm-up of 200.0 s is not in \[0, 200.0\)"),
        ({"max_requests": 3, "warmup_s": 100.0}, "no request arrives after the warm-up of 100 s"),
    ],
)
def test_a_plan_without_bounds_or_measurements_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        plan(**changes)
