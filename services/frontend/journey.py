"""A request on its way through engines: what it has received is kept, so that it can go on elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Protocol

import grpc

from services.common.digests import DIGEST_BYTES
from services.common.errors import RequestError
from services.common.telemetry.clock import ClockOffset
from services.frontend.engine import EngineFinish, Outputs, Scores, Submission
from services.frontend.engine_request import EngineRequest, Sink
from services.frontend.request import EngineFacts

MAX_LOSSES = 8
"""Engines that a request may have lost in a row without anything new between: it may be what they die of."""

SETTLED_S = 5.0
"""At an engine, and it was no refusal: whatever ends its stay begins a new search."""

LOST = "ENGINE_LOST"
"""Reason of the end of a request whose engine has gone, in contrast to one that it refused."""

_MOVING = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
"""How an engine ends what another may take: it is lost or drains, or its queue is full or too slow."""


class Engine(Protocol):
    """Who a request boards."""

    target: str
    clock_offset: ClockOffset
    facts: EngineFacts | None


class Journey:
    """Hands `sink` what comes, once, whichever engine it comes from; `close` it in any case.

    `strand` is called where an engine has ended it and another may go on. Who calls `board` has put `next_leg` into an
    engine's hands. `fingerprint` is of the engines that it may go on with, `block_tokens` of its digests.
    """

    def __init__(
        self,
        submission: Submission,
        sink: Sink,
        strand: Callable[[Journey, RequestError], None],
        *,
        fingerprint: str,
        block_tokens: int,
    ) -> None:
        self.fingerprint = fingerprint
        self.block_tokens = block_tokens
        self.is_closed = False
        self.engine_id = ""
        """The id of the engine that it is at, or was at last."""
        self.refused_s: dict[str, float] = {}
        """When engines have refused it since something new came, by target; time.monotonic()."""
        self.adrift_s: float | None = None
        """Since when it looks for an engine with nothing new between; None: it does not."""
        self.was_evacuated = False
        """It has left an engine that made no tokens, and nothing new has come since."""
        self._refusal: RequestError | None = None  # of those for want of room, the one that gives hope soonest
        self._boarded_s = 0.0
        self._losses = 0  # engines that had gone with it since something new came
        self._submission = submission
        self._sink = sink
        self._strand = strand
        self._began_s = time.monotonic()
        self._received: dict[int, list[int]] = {choice: list(ids) for choice, ids in submission.resumed}
        self._received = self._received or {choice: [] for choice in submission.choices}
        self._running = set(submission.choices)
        self._next_score = 1
        self._told_cached: set[int] = set()
        self._request: EngineRequest | None = None
        self._gone: Callable[[], object] = lambda: None
        self._was_taken = bool(submission.resumed)
        self._engine: Engine | None = None
        self._last_request: EngineRequest | None = None

    @property
    def has_ids(self) -> bool:
        """Of its output: an engine that goes on with it has to know how to."""
        return any(self._received.values())

    @property
    def was_taken(self) -> bool:
        """An engine had accepted it, so it is not refused any more for want of room."""
        return self._was_taken or self.has_ids or self._next_score > 1

    @property
    def left_s(self) -> float | None:
        """Until the caller's deadline; None without one."""
        timeout_ms = self._submission.timeout_ms
        return None if timeout_ms is None else timeout_ms / 1000 - (time.monotonic() - self._began_s)

    @cached_property
    def digests(self) -> tuple[bytes, ...]:
        """Of the full blocks of its prompt, in order, in blocks of `block_tokens`."""
        column = b"" if self._submission.digests is None else self._submission.digests.blocks
        return tuple(column[start : start + DIGEST_BYTES] for start in range(0, len(column), DIGEST_BYTES))

    def next_leg(self) -> Submission:
        """What is left of it, as the next engine is asked for it."""
        leg, left_s = self._submission, self.left_s
        if left_s is not None:
            leg = replace(leg, timeout_ms=max(1, int(1000 * left_s)))
        if self._engine is not None:
            leg = replace(leg, arrived_unix_ns=time.time_ns())  # what was before is in other engines' spans
        if not self.has_ids and self._running == set(leg.choices):
            return leg
        scored = self._received.get(0) or 0 not in self._running  # its prompt's logprobs came before its ids
        return replace(
            leg,
            resumed=tuple((choice, tuple(self._received[choice])) for choice in sorted(self._running)),
            prompt_logprobs=None if scored else leg.prompt_logprobs,
        )

    def board(self, engine: Engine, request: EngineRequest, gone: Callable[[], object]) -> None:
        """An engine has it now; `gone` is called when it has it no longer."""
        self._engine, self._request, self._gone = engine, request, gone
        self._last_request = request
        self._boarded_s = time.monotonic()
        if engine.facts is not None:
            self.engine_id = engine.facts.engine_id

    @property
    def last_engine(self) -> str:
        """Where it was last, or is."""
        return "" if self._engine is None else self._engine.target

    def ended_unix_ns(self) -> int:
        """When the last choice had its last id, by our clock; now where nobody has said."""
        if self._engine is None or self._last_request is None:
            return time.time_ns()
        return self._last_request.ended_unix_ns(self._engine.clock_offset.ns)

    def leave(self, *, was_taken: bool) -> None:
        """Ends it where it is, it is to go on elsewhere; `was_taken`: it is known to have been accepted there."""
        self._was_taken = self._was_taken or was_taken
        now_s = time.monotonic()
        if self.adrift_s is None or now_s - self._boarded_s > SETTLED_S:
            self.adrift_s = now_s
        self._get_off()

    def _get_off(self) -> None:
        request, self._request = self._request, None
        if request is not None:
            request.close()
            self._gone()

    # -- what the engine says

    def put(self, index: int, outputs: Outputs) -> bool:
        """See Sink."""
        if self.is_closed or index not in self._running:
            return False
        outputs = self._new(index, outputs)
        if outputs.token_ids or outputs.scores:
            self._losses, self.adrift_s, self.was_evacuated = 0, None, False
            self.refused_s.clear()
        self._received[index] += outputs.token_ids
        enough = self._sink.put(index, outputs)
        if enough or outputs.finish is not None:
            self._running.discard(index)
        return enough

    def fail(self, error: RequestError) -> None:
        """See Sink; the sink hears of it only where no other engine can help."""
        if self.is_closed:
            return
        is_lost = error.reason == LOST
        self._losses += is_lost
        if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            self._refusal = min(filter(None, (self._refusal, error)), key=_retry_s)
        if error.code in _MOVING and self._losses <= MAX_LOSSES:
            self.leave(was_taken=is_lost)
            if not is_lost:
                self.refused_s[self.last_engine] = time.monotonic()
            self._strand(self, error)
        else:
            self.end(error)

    def turn_away(self, error: RequestError) -> None:
        """No engine takes it: ends it with the refusal after which another try has hope soonest, else with `error`."""
        self.end(self._refusal or error)

    def end(self, error: RequestError) -> None:
        """It has ended, all its choices with it."""
        self._sink.fail(error)

    def close(self) -> None:
        """Aborts what has not ended. May be called again."""
        self.is_closed = True
        self._get_off()

    def finish_full(self) -> None:
        """Ends choices that have all their ids, and whose finish was lost with an engine."""
        for choice in sorted(self._running):
            if len(self._received[choice]) >= self._submission.max_tokens > 0:
                self._running.discard(choice)
                self._sink.put(choice, Outputs(finish=EngineFinish("length", None)))

    @property
    def is_over(self) -> bool:
        """Nothing of it is left to be run."""
        return not self._running

    def _new(self, index: int, outputs: Outputs) -> Outputs:
        """Without what an earlier engine had told: prompt logprobs, and what was cached."""
        cached = outputs.cached_tokens
        if cached is not None:
            if index in self._told_cached:
                cached = None
            self._told_cached.add(index)
        if outputs.scores or cached != outputs.cached_tokens:
            outputs = outputs._replace(cached_tokens=cached, scores=self._new_scores(outputs.scores))
        return outputs

    def _new_scores(self, told: Sequence[Scores]) -> tuple[Scores, ...]:
        new = []
        for scores in told:
            if scores.stop > self._next_score:
                new.append(scores.since(self._next_score))
                self._next_score = scores.stop
        return tuple(new)


def _retry_s(error: RequestError) -> float:
    return math.inf if error.retry_after_s is None else error.retry_after_s
