"""Percentiles, rates and goodput of a run's outcomes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.open_loop import Outcome
from loadtest.report import number, percentile, table
from loadtest.workload import Plan

PERCENTS = (50, 90, 95, 99)


@dataclass(frozen=True)
class ServiceLevel:
    """What a request must keep to be good; None: no such bound. `itl_s` bounds its mean, `gap_s` its longest gap."""

    ttft_s: float | None = None
    itl_s: float | None = None
    gap_s: float | None = None
    e2e_s: float | None = None

    @property
    def is_set(self) -> bool:
        """Whether it bounds anything."""
        return any(bound is not None for bound, _ in self._bounds(None))

    def kept(self, outcome: Outcome) -> bool:
        """Whether a request was good; one that failed never is."""
        if outcome.failure is not None:
            return False
        return all(bound is None or value is None or value <= bound for bound, value in self._bounds(outcome))

    def _bounds(self, outcome: Outcome | None) -> tuple[tuple[float | None, float | None], ...]:
        if outcome is None:
            return (self.ttft_s, None), (self.itl_s, None), (self.gap_s, None), (self.e2e_s, None)
        return (
            (self.ttft_s, outcome.ttft_s),
            (self.itl_s, outcome.mean_itl_s),
            (self.gap_s, max(outcome.gaps_s, default=None)),
            (self.e2e_s, outcome.end_s),
        )


@dataclass(frozen=True)
class Summary:
    """Of the requests that were due after the warm-up. Latencies are of those that ended well, failures are counted."""

    requests: int
    failures: dict[str, int]
    window_s: float
    span_s: float
    """From the first measured due time to the last end."""
    prompt_tokens: int
    output_tokens: int
    ttft_s: tuple[float, ...]
    itl_s: tuple[float, ...]
    e2e_s: tuple[float, ...]
    lag_s: tuple[float, ...]
    good: int

    @property
    def ok(self) -> int:
        """Requests that ended well."""
        return self.requests - sum(self.failures.values())

    @property
    def out_tokens_per_s(self) -> float:
        """Ids received, over the span."""
        return self.output_tokens / self.span_s

    @property
    def total_tokens_per_s(self) -> float:
        """Prompt ids of requests that ended well, and ids received, over the span."""
        return (self.prompt_tokens + self.output_tokens) / self.span_s

    @property
    def goodput_requests_per_s(self) -> float | None:
        """Good requests for each second of arrivals; None of a burst, which has no such time."""
        return self.good / self.window_s if self.window_s > 0 else None

    def values(self) -> dict[str, object]:
        """For JSON; keys carry units."""
        found: dict[str, object] = {
            "requests": self.requests,
            "ok": self.ok,
            "failed": self.requests - self.ok,
            "failures": self.failures,
            "offered_requests_per_s": self.requests / self.window_s if self.window_s > 0 else None,
            "out_tokens_per_s": self.out_tokens_per_s,
            "total_tokens_per_s": self.total_tokens_per_s,
            "good": self.good,
            "good_share": self.good / self.requests,
            "goodput_requests_per_s": self.goodput_requests_per_s,
            "client_lag_max_s": max(self.lag_s),
        }
        for name, values in self._latencies():
            found |= {f"{name}_p{percent}_s": percentile(values, percent) for percent in PERCENTS}
            found[f"{name}_mean_s"] = sum(values) / len(values) if values else None
        return found

    def table(self) -> str:
        """For people."""
        header = ("latency, s", "n", "mean", *(f"p{percent}" for percent in PERCENTS), "max")
        rows = [
            (
                name,
                str(len(values)),
                number(sum(values) / len(values) if values else None),
                *(number(percentile(values, percent)) for percent in PERCENTS),
                number(max(values, default=None)),
            )
            for name, values in self._latencies()
        ]
        return table(header, rows)

    def _latencies(self) -> tuple[tuple[str, tuple[float, ...]], ...]:
        return ("ttft", self.ttft_s), ("itl", self.itl_s), ("e2e", self.e2e_s)


def summarize(plan: Plan, outcomes: Sequence[Outcome], level: ServiceLevel | None = None) -> Summary:
    """Of a plan's outcomes; without a service level each request that ended well is good."""
    measured = [outcome for outcome in outcomes if outcome.due_s >= plan.warmup_s]
    ended_well = [outcome for outcome in measured if outcome.failure is None]
    level = level or ServiceLevel()
    first_s = min(outcome.due_s for outcome in measured)
    return Summary(
        requests=len(measured),
        failures=dict(Counter(outcome.failure for outcome in measured if outcome.failure is not None)),
        window_s=plan.window_s,
        span_s=max(outcome.due_s + outcome.end_s for outcome in measured) - first_s,
        prompt_tokens=sum(outcome.prompt_tokens for outcome in ended_well),
        output_tokens=sum(len(outcome.token_s) for outcome in measured),
        ttft_s=tuple(outcome.ttft_s for outcome in ended_well if outcome.ttft_s is not None),
        itl_s=tuple(gap for outcome in ended_well for gap in outcome.gaps_s),
        e2e_s=tuple(outcome.end_s for outcome in ended_well),
        lag_s=tuple(outcome.lag_s for outcome in measured),
        good=sum(level.kept(outcome) for outcome in measured),
    )
