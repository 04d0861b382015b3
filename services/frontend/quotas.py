"""What a tenant may ask of a frontend: requests a second, tokens a minute, requests at once.

Processes that share a port do not count together: each lets in an even share, so that all together keep to the limit.

Token buckets: each fills at its rate up to its burst. A request takes one of the first, and is let in while the second
is above zero; its tokens are taken as they are known, so that a bucket may go below zero and then has to fill again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import grpc

from services.common.errors import RequestError

MAX_TENANTS = 4096
"""Remembered without a request; past it those are forgotten whose buckets are full, and then the ones idle longest."""

BUSY_RETRY_S = 1.0


@dataclass(frozen=True)
class Quota:
    """Of each tenant, at all `processes` of a frontend together; None: without limit."""

    requests_per_s: float | None = None
    burst_requests: int = 1
    tokens_per_s: float | None = None
    burst_tokens: int = 1
    max_requests: int | None = None
    processes: int = 1

    @property
    def is_set(self) -> bool:
        """There is a limit."""
        return not self.requests_per_s is self.tokens_per_s is self.max_requests is None

    def share(self) -> Quota:
        """Of one process. What is counted in whole requests is rounded down, so that no limit is passed."""
        return replace(
            self,
            requests_per_s=None if self.requests_per_s is None else self.requests_per_s / self.processes,
            burst_requests=self.burst_requests // self.processes,
            tokens_per_s=None if self.tokens_per_s is None else self.tokens_per_s / self.processes,
            burst_tokens=self.burst_tokens // self.processes,
            max_requests=None if self.max_requests is None else self.max_requests // self.processes,
            processes=1,
        )


class Bucket:
    """`level` at the time `at_s`, at most `burst`."""

    def __init__(self, rate: float | None, burst: float, now_s: float) -> None:
        self._rate = rate
        self._burst = burst
        self._level = burst
        self._at_s = now_s

    def wait_s(self, needed: float, now_s: float) -> float:
        """Until the level is `needed`; 0 where it is now."""
        if self._rate is None:
            return 0.0
        self._level = min(self._burst, self._level + (now_s - self._at_s) * self._rate)
        self._at_s = now_s
        return max(0.0, (needed - self._level) / self._rate)

    def take(self, amount: float) -> None:
        """Below zero where it must be."""
        if self._rate is not None:
            self._level -= amount

    def is_full(self, now_s: float) -> bool:
        return self.wait_s(self._burst, now_s) == 0.0


class _Account:
    def __init__(self, quota: Quota, now_s: float) -> None:
        self.requests = Bucket(quota.requests_per_s, quota.burst_requests, now_s)
        self.tokens = Bucket(quota.tokens_per_s, quota.burst_tokens, now_s)
        self.running = 0


class Quotas:
    """The buckets of all tenants."""

    def __init__(self, quota: Quota, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._told = quota
        self._quota = quota.share()
        self._shared = f" ({quota.processes} processes share that evenly)" if quota.processes > 1 else ""
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    @property
    def is_set(self) -> bool:
        """There is something to hold tenants to."""
        return self._quota.is_set

    @contextmanager
    def entered(self, tenant: str) -> Iterator[None]:
        """Around a request. Raises RESOURCE_EXHAUSTED, with the time to wait."""
        now_s = self._clock()
        account = self._account(tenant, now_s)
        self._admit(account, now_s)
        account.requests.take(1)
        account.running += 1
        try:
            yield
        finally:
            account.running -= 1

    def charge(self, tenant: str, tokens: int) -> None:
        """Tokens that a request of it has used."""
        if self._quota.tokens_per_s is not None:
            self._account(tenant, self._clock()).tokens.take(tokens)

    def _admit(self, account: _Account, now_s: float) -> None:
        told, most = self._told, self._quota.max_requests
        if most is not None and account.running >= most:
            limit = f"at most {told.max_requests} may at once{self._shared}"
            raise _exhausted("TENANT_REQUESTS", f"{account.running} requests of this tenant run, {limit}", BUSY_RETRY_S)
        if wait_s := account.requests.wait_s(1, now_s):
            limit = f"this tenant may send {told.requests_per_s:g} requests a second{self._shared}"
            raise _exhausted("TENANT_REQUEST_RATE", limit, wait_s)
        if (wait_s := account.tokens.wait_s(1, now_s)) and told.tokens_per_s is not None:
            limit = f"this tenant may use {told.tokens_per_s * 60:g} tokens a minute{self._shared}"
            raise _exhausted("TENANT_TOKEN_RATE", limit, wait_s)

    def _account(self, tenant: str, now_s: float) -> _Account:
        if (account := self._accounts.pop(tenant, None)) is None:
            self._make_room(now_s)
            account = _Account(self._quota, now_s)
        self._accounts[tenant] = account  # last in the order of use
        return account

    def _make_room(self, now_s: float) -> None:
        if len(self._accounts) < MAX_TENANTS:
            return
        idle = [name for name, account in self._accounts.items() if not account.running]
        full = [
            name
            for name in idle
            if self._accounts[name].requests.is_full(now_s) and self._accounts[name].tokens.is_full(now_s)
        ]
        for name in full or idle[:1]:
            del self._accounts[name]


def _exhausted(reason: str, message: str, wait_s: float) -> RequestError:
    told = f"{message}; try again in {wait_s:.3g} s"
    return RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, reason, told, retry_after_s=max(wait_s, 0.001))
