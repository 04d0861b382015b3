"""What AdminService.GetStats tells: the core's counters, why requests failed, and where the time of steps went."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

from triptych.engine.v1 import admin_pb2, engine_pb2

from services.common.telemetry import names
from services.common.telemetry.readings import Reading
from services.scheduler.core.counters import Histogram
from services.scheduler.core.scheduler import Scheduler


class Statistics:
    """Counts from the scheduler's start. Adding is a few additions a step; `message` is one pass over what runs."""

    def __init__(self) -> None:
        self._begun_s = time.monotonic()
        self._failed: Counter[str] = Counter()
        self._graph_steps: Counter[str] = Counter()
        self._steps = 0
        self._epochs = 0
        self._step_s = dict.fromkeys(("plan", "execute", "sample", "apply"), 0.0)

    def failed(self, reason: str) -> None:
        """A request was refused or lost; the reason is the one its caller is told."""
        self._failed[reason] += 1

    def epoch_began(self) -> None:
        """An executor was taken into use."""
        self._epochs += 1

    def planned(self, plan_s: float) -> None:
        """A step was planned, and that took so long."""
        self._step_s["plan"] += plan_s

    def applied(self, *, execute_s: float, sample_s: float, apply_s: float, graph: str = "") -> None:
        """A step is done: what the executor says of it, and what taking in its result took."""
        self._steps += 1
        if graph:
            self._graph_steps[graph] += 1
        step_s = self._step_s
        step_s["execute"] += execute_s
        step_s["sample"] += sample_s
        step_s["apply"] += apply_s

    def readings(self) -> Iterator[Reading]:
        """What metrics tell of it."""
        yield Reading(names.EPOCHS, self._epochs)
        for reason, count in self._failed.items():
            yield Reading(names.FAILED, count, {names.REASON: reason})
        for part, spent_s in self._step_s.items():
            yield Reading(names.STEP_TIME, spent_s, {names.PART: part})
        graphs = {"none": self._steps - self._graph_steps.total(), "eager": 0, "full": 0, **self._graph_steps}
        for graph, count in graphs.items():
            yield Reading(names.STEPS, count, {names.GRAPH: graph})

    def message(
        self, heartbeat: engine_pb2.Heartbeat, engine_id: str, core: Scheduler | None
    ) -> admin_pb2.GetStatsResponse:
        """All of it. Before a model is loaded there is no core and no engine id."""
        told = admin_pb2.GetStatsResponse(
            heartbeat=heartbeat,
            engine_id=engine_id,
            uptime_s=time.monotonic() - self._begun_s,
            failed=self._failed,
            step_s=self._step_s,
            graph_steps=self._graph_steps,
        )
        if core is not None:
            counters = core.counters
            told.prompt_tokens = counters.prompt_tokens
            told.output_tokens = counters.output_tokens
            told.dropped_tokens = counters.dropped_tokens
            told.prefix_query_tokens = counters.prefix_query_tokens
            told.prefix_hit_tokens = counters.prefix_hit_tokens
            told.preemptions = counters.preemptions
            told.requests.update(core.by_phase())
            told.finished.update({reason.value: count for reason, count in counters.finished.items() if count})
            if counters.aborted:
                told.finished["abort"] = counters.aborted
            told.time_to_first_token.CopyFrom(_histogram(counters.time_to_first_token))
            told.inter_token_latency.CopyFrom(_histogram(counters.inter_token_latency))
        return told


def _histogram(histogram: Histogram) -> admin_pb2.Histogram:
    return admin_pb2.Histogram(
        bounds_s=histogram.bounds_s, counts=histogram.counts, sum_s=histogram.sum_ns / 1_000_000_000
    )
