"""Rates, percentiles and goodput of outcomes made by hand."""

from __future__ import annotations

import pytest

from loadtest.open_loop import Outcome
from loadtest.summary import ServiceLevel, summarize
from loadtest.workload import Plan


def outcome(due_s: float, *token_s: float, failure: str | None = None, end_s: float | None = None) -> Outcome:
    return Outcome(
        due_s=due_s,
        prompt_tokens=10,
        asked_tokens=len(token_s),
        lag_s=0.001,
        token_s=token_s,
        end_s=token_s[-1] if end_s is None else end_s,
        failure=failure,
    )


PLAN = Plan((), warmup_s=1.0, end_s=5.0)
OUTCOMES = [
    outcome(0.5, 9.0, 9.9),  # warm-up
    outcome(1.0, 0.2, 0.3, 0.4),
    outcome(2.0, 1.0, 1.1, 2.1),
    outcome(3.0, 0.5, 0.5, 1.5),  # two ids in one message
    outcome(4.0, 0.1, 0.2, failure="UNAVAILABLE", end_s=0.3),
    outcome(4.5, failure="DEADLINE_EXCEEDED", end_s=3.0),
]


def test_latencies_are_of_measured_requests_that_ended_well() -> None:
    found = summarize(PLAN, OUTCOMES)
    assert found.ttft_s == (0.2, 1.0, 0.5)
    assert found.itl_s == pytest.approx((0.1, 0.1, 0.1, 1.0, 0.0, 1.0))
    assert found.e2e_s == (0.4, 2.1, 1.5)
    values = found.values()
    assert values["ttft_p50_s"] == 0.5
    # Sorted: 0, 0.1, 0.1, 0.1, 1, 1; percent 50 lies between ranks 2 and 3, percent 99 between 4 and 5.
    assert values["itl_p50_s"] == pytest.approx(0.1)
    assert values["itl_p99_s"] == pytest.approx(1.0)
    assert values["e2e_mean_s"] == pytest.approx(4.0 / 3)


def test_failures_are_counted_by_kind_and_never_among_the_requests_that_ended_well() -> None:
    found = summarize(PLAN, OUTCOMES)
    assert found.failures == {"UNAVAILABLE": 1, "DEADLINE_EXCEEDED": 1}
    values = found.values()
    assert (values["requests"], values["ok"], values["failed"]) == (5, 3, 2)


def test_rates_are_over_the_span_from_the_first_due_time_to_the_last_end() -> None:
    found = summarize(PLAN, OUTCOMES)
    assert found.span_s == 6.5  # 1.0 to 4.5 + 3.0
    assert found.out_tokens_per_s == pytest.approx(11 / 6.5)  # the two ids of a stream that broke off did arrive
    assert found.total_tokens_per_s == pytest.approx((30 + 11) / 6.5)
    assert found.values()["offered_requests_per_s"] == pytest.approx(5 / 4)


@pytest.mark.parametrize(
    ("level", "good"),
    [
        (ServiceLevel(), 3),  # those that ended well
        (ServiceLevel(ttft_s=0.5), 2),
        (ServiceLevel(ttft_s=0.49), 1),
        (ServiceLevel(itl_s=0.11), 1),  # means: 0.1, 0.55, 0.5
        (ServiceLevel(itl_s=0.5), 2),
        (ServiceLevel(gap_s=0.9), 1),  # longest: 0.1, 1.0, 1.0
        (ServiceLevel(e2e_s=1.5), 2),
        (ServiceLevel(ttft_s=0.5, itl_s=0.11, gap_s=0.2, e2e_s=2.0), 1),
        (ServiceLevel(ttft_s=0.01), 0),
    ],
)
def test_goodput_counts_requests_that_kept_every_bound(level: ServiceLevel, good: int) -> None:
    found = summarize(PLAN, OUTCOMES, level)
    assert found.good == good
    assert found.goodput_requests_per_s == pytest.approx(good / 4)  # arrivals from 1.0 to 5.0 s
    assert found.values()["good_share"] == pytest.approx(good / 5)


def test_a_single_id_has_no_inter_token_latency_to_break() -> None:
    found = summarize(Plan((), 0.0, 0.0), [outcome(0.0, 0.2)], ServiceLevel(itl_s=0.001, gap_s=0.001))
    assert (found.good, found.itl_s, found.goodput_requests_per_s) == (1, (), None)


def test_a_run_in_which_all_failed_still_reports() -> None:
    found = summarize(PLAN, [outcome(2.0, failure="UNAVAILABLE", end_s=0.1)])
    assert found.ok == 0
    assert found.values()["ttft_p50_s"] is None
    assert "-" in found.table()
