"""What is made of a scheduler's counters: differences, shares, percentiles. Counters run from its start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from triptych.engine.v1 import admin_pb2, engine_pb2

STATES = {
    engine_pb2.ENGINE_STATE_LOADING: "loading",
    engine_pb2.ENGINE_STATE_SERVING: "serving",
    engine_pb2.ENGINE_STATE_RECOVERING: "recovering",
    engine_pb2.ENGINE_STATE_DRAINING: "draining",
}
PARTS = ("plan", "execute", "sample", "apply")
"""Of a step, in their order."""


@dataclass(frozen=True)
class Histogram:
    """Durations by bucket; `counts` has one more than `bounds_s`, of what is longer than all."""

    bounds_s: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()

    def since(self, earlier: Histogram) -> Histogram:
        """What has come since; all of it where there is no earlier one of the same buckets."""
        if earlier.bounds_s != self.bounds_s:
            return self
        return Histogram(self.bounds_s, tuple(map(int.__sub__, self.counts, earlier.counts)))

    def plus(self, other: Histogram) -> Histogram:
        """Both, of the same buckets; one of others is left out."""
        if not self.counts or not other.counts:
            return self if self.counts else other
        if other.bounds_s != self.bounds_s:
            return self
        return Histogram(self.bounds_s, tuple(map(int.__add__, self.counts, other.counts)))

    @property
    def total(self) -> int:
        """How many durations."""
        return sum(self.counts)

    def quantile_s(self, share: float) -> float | None:
        """The duration that so large a share stays below, interpolated in its bucket; at most the last bound. None for
        no durations."""
        total = self.total
        if not total:
            return None
        rank = share * total
        sums = list(accumulate(self.counts))
        bucket = next(i for i, reached in enumerate(sums) if reached >= rank and self.counts[i])
        if bucket == len(self.bounds_s):
            return self.bounds_s[-1]
        low_s = self.bounds_s[bucket - 1] if bucket else 0.0
        within = (rank - (sums[bucket] - self.counts[bucket])) / self.counts[bucket]
        return low_s + max(0.0, within) * (self.bounds_s[bucket] - low_s)

    def is_beyond(self, share: float) -> bool:
        """That duration is longer than the last bound."""
        return self.total > 0 and share * self.total > self.total - self.counts[-1]


@dataclass(frozen=True)
class Stats:
    """One answer to GetStats; `at_s` by this machine's clock."""

    at_s: float
    engine_id: str
    state: str
    uptime_s: float
    epoch: int
    step: int
    running: int
    waiting: int
    waiting_tokens: int
    total_blocks: int
    free_blocks: int
    prompt_tokens: int
    output_tokens: int
    dropped_tokens: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    preemptions: int
    requests: Mapping[str, int]
    finished: Mapping[str, int]
    failed: Mapping[str, int]
    step_s: Mapping[str, float]
    graph_steps: Mapping[str, int]
    masks: int
    mask_s: float
    ttft: Histogram
    itl: Histogram

    @classmethod
    def read(cls, message: admin_pb2.GetStatsResponse, at_s: float) -> Stats:
        """Of the message."""
        beat = message.heartbeat
        return cls(
            at_s=at_s,
            engine_id=message.engine_id,
            state=STATES.get(beat.state, "unknown"),
            uptime_s=message.uptime_s,
            epoch=beat.epoch,
            step=beat.step,
            running=beat.running_requests,
            waiting=beat.waiting_requests,
            waiting_tokens=beat.waiting_tokens,
            total_blocks=beat.total_blocks,
            free_blocks=beat.free_blocks,
            prompt_tokens=message.prompt_tokens,
            output_tokens=message.output_tokens,
            dropped_tokens=message.dropped_tokens,
            prefix_query_tokens=message.prefix_query_tokens,
            prefix_hit_tokens=message.prefix_hit_tokens,
            preemptions=message.preemptions,
            requests=dict(message.requests),
            finished=dict(message.finished),
            failed=dict(message.failed),
            step_s=dict(message.step_s),
            graph_steps=dict(message.graph_steps),
            masks=message.masks,
            mask_s=message.mask_s,
            ttft=_histogram(message.time_to_first_token),
            itl=_histogram(message.inter_token_latency),
        )

    def follows(self, earlier: Stats) -> bool:
        """They are of one scheduler, and its counters can be subtracted. A model that is loaded meanwhile gives it its
        engine id."""
        return earlier.engine_id in ("", self.engine_id) and earlier.uptime_s <= self.uptime_s

    @property
    def kv_share(self) -> float | None:
        """Of the blocks that requests hold."""
        return 1 - self.free_blocks / self.total_blocks if self.total_blocks else None


@dataclass(frozen=True)
class Span:
    """From one look to another at the same scheduler."""

    first: Stats
    last: Stats

    @property
    def seconds(self) -> float:
        """Between the two; never 0."""
        return max(self.last.at_s - self.first.at_s, 1e-3)

    @property
    def prompt_tokens_per_s(self) -> float:
        return (self.last.prompt_tokens - self.first.prompt_tokens) / self.seconds

    @property
    def output_tokens_per_s(self) -> float:
        return (self.last.output_tokens - self.first.output_tokens) / self.seconds

    @property
    def steps_per_s(self) -> float:
        return max(0, self.last.step - self.first.step) / self.seconds

    @property
    def ttft(self) -> Histogram:
        return self.last.ttft.since(self.first.ttft)

    @property
    def itl(self) -> Histogram:
        return self.last.itl.since(self.first.itl)

    @property
    def step_shares(self) -> dict[str, float]:
        """By part; empty where no step was made."""
        spent = {part: self.last.step_s.get(part, 0.0) - self.first.step_s.get(part, 0.0) for part in PARTS}
        total = sum(spent.values())
        return {part: spent_s / total for part, spent_s in spent.items()} if total > 0 else {}

    @property
    def step_s(self) -> float | None:
        """Of one step, on average; None where none was made."""
        steps = self.last.step - self.first.step
        spent_s = sum(self.last.step_s.values()) - sum(self.first.step_s.values())
        return spent_s / steps if steps > 0 and spent_s > 0 else None


def _histogram(message: admin_pb2.Histogram) -> Histogram:
    bounds: Sequence[float] = message.bounds_s
    return Histogram(tuple(bounds), tuple(message.counts))


def nothing_before(stats: Stats) -> Stats:
    """The same scheduler as it started: all counters 0."""
    return Stats.read(admin_pb2.GetStatsResponse(engine_id=stats.engine_id), stats.at_s - stats.uptime_s)
