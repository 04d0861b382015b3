"""Rates of a tenant: buckets by a clock that the test moves."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import grpc
import pytest

from services.common.config import resolve
from services.common.errors import RequestError, StartError
from services.frontend import quotas
from services.frontend.config import FrontendConfig
from services.frontend.quotas import Quota, Quotas


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def refused(held: Quotas, tenant: str = "a") -> tuple[str, float]:
    """The reason, and when to come again."""
    with pytest.raises(RequestError) as refusal, held.entered(tenant):
        pass
    assert refusal.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert refusal.value.retry_after_s is not None
    return refusal.value.reason, refusal.value.retry_after_s


def send(held: Quotas, tenant: str = "a") -> None:
    with held.entered(tenant):
        pass


def test_a_burst_is_let_in_and_then_one_request_at_a_time() -> None:
    clock = Clock()
    held = Quotas(Quota(requests_per_s=2, burst_requests=3), clock=clock)
    for _ in range(3):
        send(held)
    assert refused(held) == ("TENANT_REQUEST_RATE", pytest.approx(0.5))
    send(held, "another tenant")
    clock.now_s += 0.5
    send(held)
    assert refused(held)[1] == pytest.approx(0.5)
    clock.now_s += 3600
    for _ in range(3):  # a pause fills no more than the burst
        send(held)
    refused(held)


def test_tokens_that_were_used_beyond_the_rate_are_made_up_for() -> None:
    clock = Clock()
    held = Quotas(Quota(tokens_per_s=10, burst_tokens=100), clock=clock)
    send(held)
    held.charge("a", 150)  # a long answer: the bucket is at -50
    assert refused(held) == ("TENANT_TOKEN_RATE", pytest.approx(5.1))
    clock.now_s += 5.0
    refused(held)
    clock.now_s += 0.2
    send(held)


def test_requests_at_once_are_counted_until_they_end() -> None:
    held = Quotas(Quota(max_requests=2), clock=Clock())
    with ExitStack() as running:
        running.enter_context(held.entered("a"))
        with held.entered("a"):
            assert refused(held)[0] == "TENANT_REQUESTS"
            send(held, "b")
        send(held)
    send(held)


def test_a_refused_request_takes_nothing() -> None:
    clock = Clock()
    held = Quotas(Quota(requests_per_s=1, burst_requests=1), clock=clock)
    send(held)
    for _ in range(50):
        refused(held)
    clock.now_s += 1
    send(held)


def test_tenants_beyond_memory_are_forgotten_without_favours(monkeypatch: pytest.MonkeyPatch) -> None:
    """One who makes up tenants pushes out those with full buckets, not one that has used its own up."""
    monkeypatch.setattr(quotas, "MAX_TENANTS", 10)
    clock = Clock()
    held = Quotas(Quota(requests_per_s=0.001, burst_requests=2), clock=clock)
    send(held, "greedy")
    send(held, "greedy")
    for number in range(9):
        held._account(f"full {number}", clock())
    send(held, "eleventh")
    assert refused(held, "greedy")[0] == "TENANT_REQUEST_RATE"
    assert len(held._accounts) == 2


def test_without_limits_nothing_is_held() -> None:
    held = Quotas(Quota(), clock=Clock())
    assert not held.is_set
    held.charge("a", 10**9)
    for _ in range(1000):
        send(held)


def test_processes_that_share_a_port_let_in_as_much_together_as_one_alone() -> None:
    clock = Clock()
    told = Quota(requests_per_s=10, burst_requests=8, tokens_per_s=20, burst_tokens=400, max_requests=6)
    together = [Quotas(replace(told, processes=2), clock=clock) for _ in range(2)]
    for held in together:
        for _ in range(4):
            send(held)
        assert refused(held) == ("TENANT_REQUEST_RATE", pytest.approx(0.2))  # 5 a second each
    clock.now_s += 3600
    for held in together:
        with ExitStack() as running:
            for _ in range(3):
                running.enter_context(held.entered("a"))
            assert refused(held)[0] == "TENANT_REQUESTS"
        held.charge("a", 209)  # of 200, so that 10 are missing until one may be taken, at 10 a second
        assert refused(held) == ("TENANT_TOKEN_RATE", pytest.approx(1.0))


def test_a_share_is_rounded_down_and_the_whole_limit_is_told() -> None:
    held = Quotas(Quota(max_requests=5, processes=2), clock=Clock())
    with held.entered("a"), held.entered("a"), pytest.raises(RequestError) as refusal, held.entered("a"):
        pass
    assert "2 requests of this tenant run, at most 5 may at once (2 processes share that evenly)" in str(refusal.value)


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        (["--tenant-requests-per-s", "5", "--tenant-burst-requests", "3"], "tenant_burst_requests is 3"),
        (["--tenant-tokens-per-min", "5", "--tenant-burst-tokens", "3"], "tenant_burst_tokens is 3"),
        (["--tenant-max-requests", "3"], "tenant_max_requests is 3"),
    ],
)
def test_a_limit_of_which_some_worker_would_have_nothing_is_refused(flags: list[str], key: str) -> None:
    with pytest.raises(StartError, match=f"{key}, and 4 workers share it evenly.*set it to 4 or more"):
        resolve(FrontendConfig, ["--model", "m", "--workers", "4", *flags], {})
    resolve(FrontendConfig, ["--model", "m", "--workers", "3", *flags], {})
    resolve(FrontendConfig, ["--model", "m", "--workers", "4", "--tenant-burst-requests", "3"], {})  # of no rate
