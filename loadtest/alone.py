"""The scheduler's core and an executor in one process, without gRPC: what the whole stack can at most come to."""

from __future__ import annotations

import time

import numpy as np
from triptych.inference.v1 import generation_pb2

from loadtest import workload
from loadtest.open_loop import Outcome
from loadtest.serve_load import LoadError
from services.common.digests import chained_digest
from services.executor import wire
from services.executor.executor import Executor
from services.scheduler.clock import now_ns
from services.scheduler.core.limits import Limits
from services.scheduler.core.request import RequestKey, Submission
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.plan_codec import decode_result, encode_plan

FRONTEND = 1
NAME = "executor alone"


class Alone:
    """Runs bursts, one after the other, each on an empty batch and a core of its own."""

    def __init__(self, executor: Executor, limits: Limits) -> None:
        """`executor` holds the blocks that `limits` names."""
        self._executor = executor
        self._limits = limits

    async def run(self, plan: workload.Plan) -> list[Outcome]:
        """As serve_load.Run. Raises LoadError for a request that the core refuses or a step that fails."""
        self._executor.reset()
        core = Scheduler(self._limits, chained_digest)
        begun_s = time.monotonic()
        for number, request in enumerate(plan.requests):
            failure = core.submit(_submission(number, request), now_ns())
            if failure is not None:
                raise LoadError(f"{NAME}: {failure.message}")
        token_s: list[list[float]] = [[] for _ in plan.requests]
        while core.num_requests:
            self._step(core, token_s, begun_s)
        return outcomes(plan, token_s)

    def _step(self, core: Scheduler, token_s: list[list[float]], begun_s: float) -> None:
        plan = core.plan(now_ns())
        if plan is None:
            raise LoadError(f"{NAME}: {core.num_requests} requests are left, and no step is planned")
        outcome = self._executor.execute(wire.plan(encode_plan(plan).plan))
        result, _ = decode_result(wire.result(outcome, 0, 0), len(plan.slots))
        updates = core.apply(result, now_ns())
        if updates.failed:
            raise LoadError(f"{NAME}: {updates.failed[0].message}")
        done_s = time.monotonic() - begun_s
        for key, count in zip(updates.keys, updates.counts, strict=True):
            token_s[key.request_id] += [done_s] * count


def outcomes(plan: workload.Plan, token_s: list[list[float]]) -> list[Outcome]:
    """Of a burst in which every request ended well, given when its ids came, in seconds after its start. Raises
    LoadError where some have not."""
    found = []
    for request, times_s in zip(plan.requests, token_s, strict=True):
        if len(times_s) != request.output_tokens:
            raise LoadError(f"{len(times_s)} ids came of a request for {request.output_tokens}")
        lengths = len(request.prompt_ids), request.output_tokens
        found.append(Outcome(request.at_s, *lengths, 0.0, tuple(times_s), times_s[-1]))
    return found


def _submission(number: int, request: workload.Planned) -> Submission:
    return Submission(
        key=RequestKey(FRONTEND, number),
        prompt_ids=np.array(request.prompt_ids, dtype=np.uint32),
        max_tokens=request.output_tokens,
        sampling=generation_pb2.Sampling(temperature=0),
    )
