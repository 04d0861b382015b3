"""What frontends are told of a step: split by frontend, merged where one reads slowly, encoded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import grpc
import numpy as np
from triptych.engine.v1 import engine_pb2
from triptych.inference.v1 import generation_pb2

from services.common.errors import RequestError
from services.common.sampling import logprob_bytes
from services.scheduler.core.request import Failure, FailureKind, FinishReason
from services.scheduler.core.step import Finished, Scores, Started, Updates
from services.scheduler.plan_codec import Logprob, column

_STATUS = {
    FailureKind.INVALID: (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"),
    FailureKind.TOO_LONG: (grpc.StatusCode.INVALID_ARGUMENT, "TOO_LONG"),
    FailureKind.QUEUE_FULL: (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
    FailureKind.TENANT_OVER_SHARE: (grpc.StatusCode.RESOURCE_EXHAUSTED, "TENANT_OVER_SHARE"),
    FailureKind.QUEUE_WAIT: (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_WAIT"),
    FailureKind.DEADLINE: (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"),
    FailureKind.BAD_TOKEN_ID: (grpc.StatusCode.INTERNAL, "BAD_TOKEN_ID"),
    FailureKind.ROW_FAILED: (grpc.StatusCode.INTERNAL, "ROW_FAILED"),
    FailureKind.NO_ID_LEFT: (grpc.StatusCode.INVALID_ARGUMENT, "NO_ID_LEFT"),
    FailureKind.GRAMMAR_FAILED: (grpc.StatusCode.INTERNAL, "GRAMMAR_FAILED"),
    FailureKind.GRAMMAR_CONTRADICTED: (grpc.StatusCode.INVALID_ARGUMENT, "GRAMMAR_CONTRADICTED"),
    FailureKind.EXECUTOR_LOST: (grpc.StatusCode.UNAVAILABLE, "EXECUTOR_LOST"),
    FailureKind.POISON: (grpc.StatusCode.INTERNAL, "POISON"),
    FailureKind.DRAINING: (grpc.StatusCode.UNAVAILABLE, "DRAINING"),
}
_REASON = {
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
}


SCORES_A_MESSAGE = 32 * 1024
"""Ids of prompt positions and of alternatives to them whose logprobs one message holds at most: 256 KB. A step may make
more, and a slow frontend lets several steps merge."""

_SCORES_BYTES = 24
"""Around the columns of one request."""


@dataclass
class Outputs:
    """One frontend's share of a step, or of several. `places` and `logprobs` are columns over some of the ids."""

    step: int
    request_ids: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    scores: list[tuple[int, Scores]] = field(default_factory=list)  # (request id, of prompt ids)
    started: list[engine_pb2.Started] = field(default_factory=list)
    finished: list[engine_pb2.Finished] = field(default_factory=list)
    failed: list[engine_pb2.Failed] = field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        """Roughly what it takes on the wire."""
        columns = 12 * len(self.request_ids) + 4 * len(self.token_ids)
        columns += sum(4 + logprob_bytes(len(own.top_ids) // 4) for own in self.logprobs)
        columns += sum(
            _SCORES_BYTES + logprob_bytes(scores.top_ids.shape[1]) * len(scores.logprobs) for _, scores in self.scores
        )
        events = 40 * len(self.started) + 30 * len(self.finished)
        return columns + events + sum(40 + len(failed.message) for failed in self.failed)


def failed_message(request_id: int, error: RequestError) -> engine_pb2.Failed:
    """A refusal at the door."""
    return engine_pb2.Failed(
        request_id=request_id, code=error.code.value[0], reason=error.reason, message=error.message
    )


def reason_of(kind: FailureKind) -> str:
    """ErrorInfo.reason of a failure, as its caller is told."""
    return _STATUS[kind][1]


def split(
    updates: Updates, logprobs: Mapping[int, Logprob] | None = None, retry_after_ms: int | None = None
) -> dict[int, Outputs]:
    """`updates` by the frontend that asked; `logprobs` are by place in the step's result.

    `retry_after_ms` is told to those that found the queue full, unless a failure has its own.
    """
    known = logprobs or {}
    shares: dict[int, Outputs] = {}

    def share(frontend: int) -> Outputs:
        found = shares.get(frontend)
        if found is None:
            found = shares[frontend] = Outputs(updates.step)
        return found

    if not known and len(frontends := {frontend for frontend, _ in updates.keys}) == 1:
        # By far the most steps are of one frontend, without log-probabilities: its columns are the step's.
        mine = share(frontends.pop())
        mine.request_ids = [request_id for _, request_id in updates.keys]
        mine.counts, mine.token_ids = updates.counts, updates.token_ids
    else:
        _share_ids(updates, known, share)
    for key, scores in updates.scores:
        share(key.frontend).scores.append((key.request_id, scores))
    for started in updates.started:
        share(started.key.frontend).started.append(_started(started))
    for finished in updates.finished:
        share(finished.key.frontend).finished.append(_finished(finished))
    for failure in updates.failed:
        share(failure.key.frontend).failed.append(_failed(failure, retry_after_ms))
    return shares


def _share_ids(updates: Updates, known: Mapping[int, Logprob], share: Callable[[int], Outputs]) -> None:
    """`known` is by place in the result."""
    at = 0
    for (frontend, request_id), count in zip(updates.keys, updates.counts, strict=True):
        mine = share(frontend)
        mine.request_ids.append(request_id)
        mine.counts.append(count)
        for i in range(at, at + count):
            if known and (own := known.get(updates.places[i])) is not None:
                mine.places.append(len(mine.token_ids))
                mine.logprobs.append(own)
            mine.token_ids.append(updates.token_ids[i])
        at += count


def merge(shares: Sequence[Outputs]) -> Outputs:
    """Several shares of one frontend, oldest first, as one: ids joined by choice, lists appended."""
    if len(shares) == 1:
        return shares[0]
    ids: dict[int, list[int]] = {}
    marks: dict[int, list[tuple[int, Logprob]]] = {}  # (position in the choice's ids, its logprob)
    merged = Outputs(shares[-1].step)
    for share in shares:
        at = mark = 0
        for request_id, count in zip(share.request_ids, share.counts, strict=True):
            mine = ids.setdefault(request_id, [])
            while mark < len(share.places) and share.places[mark] < at + count:
                position = len(mine) + share.places[mark] - at
                marks.setdefault(request_id, []).append((position, share.logprobs[mark]))
                mark += 1
            mine += share.token_ids[at : at + count]
            at += count
        merged.scores += share.scores
        merged.started += share.started
        merged.finished += share.finished
        merged.failed += share.failed
    for request_id, mine in ids.items():
        for position, logprob in marks.get(request_id, ()):
            merged.places.append(len(merged.token_ids) + position)
            merged.logprobs.append(logprob)
        merged.request_ids.append(request_id)
        merged.counts.append(len(mine))
        merged.token_ids += mine
    return merged


def cut(outputs: Outputs, max_ids: int = SCORES_A_MESSAGE) -> tuple[Outputs, Outputs | None]:
    """What fits the next message, and the rest, None where all fits. Prompt logprobs go first, as they came.

    A position is an id and its alternatives; where even one has more than `max_ids`, it goes alone.
    """
    num_ids = sum(len(scores.logprobs) * (1 + scores.top_ids.shape[1]) for _, scores in outputs.scores)
    if num_ids <= max_ids or sum(len(scores.logprobs) for _, scores in outputs.scores) == 1:
        return outputs, None
    first, rest, room = Outputs(outputs.step), [], max_ids
    for request_id, scores in outputs.scores:
        each = 1 + scores.top_ids.shape[1]
        taken = min(len(scores.logprobs), room // each)
        if not taken and room == max_ids:
            taken = 1
        room = max(0, room - taken * each) if taken == len(scores.logprobs) else 0
        if taken:
            first.scores.append((request_id, scores.until(scores.start + taken)))
        if taken < len(scores.logprobs):
            rest.append((request_id, scores.since(scores.start + taken)))
    return first, replace(outputs, scores=rest)


def encode(outputs: Outputs) -> engine_pb2.AttachResponse:
    """The message of the engine contract."""
    all_one = len(outputs.token_ids) == len(outputs.request_ids)
    message = engine_pb2.StepOutputs(
        step=outputs.step,
        request_ids=column(outputs.request_ids, "Q"),
        token_counts=b"" if all_one else column(outputs.counts),
        token_ids=column(outputs.token_ids),
        prompt_logprobs=[_scores(request_id, scores) for request_id, scores in outputs.scores],
        started=outputs.started,
        finished=outputs.finished,
        failed=outputs.failed,
    )
    if outputs.places:
        every = len(outputs.places) == len(outputs.token_ids)
        message.logprobs.CopyFrom(_logprobs(outputs.logprobs))
        message.logprobs.places = b"" if every else column(outputs.places)
    return engine_pb2.AttachResponse(outputs=message)


def _logprobs(logprobs: Sequence[Logprob]) -> generation_pb2.LogprobColumns:
    counts = [len(own.top_ids) // 4 for own in logprobs]
    return generation_pb2.LogprobColumns(
        logprobs=np.array([own.logprob for own in logprobs], dtype="<f4").tobytes(),
        ranks=column([own.rank for own in logprobs]),
        top_counts=column(counts) if any(counts) else b"",
        top_ids=b"".join(own.top_ids for own in logprobs),
        top_logprobs=b"".join(own.top_logprobs for own in logprobs),
    )


def _scores(request_id: int, scores: Scores) -> engine_pb2.PromptLogprobs:
    count, alternatives = scores.top_ids.shape
    return engine_pb2.PromptLogprobs(
        request_id=request_id,
        start=scores.start,
        logprobs=generation_pb2.LogprobColumns(
            logprobs=scores.logprobs.astype("<f4").tobytes(),
            ranks=scores.ranks.astype("<u4").tobytes(),
            top_counts=column([alternatives] * count) if alternatives else b"",
            top_ids=scores.top_ids.astype("<u4").tobytes(),
            top_logprobs=scores.top_logprobs.astype("<f4").tobytes(),
        ),
    )


def _started(started: Started) -> engine_pb2.Started:
    return engine_pb2.Started(
        request_id=started.key.request_id,
        cached_tokens=started.cached_tokens,
        queued_unix_ns=started.queued_ns,
        scheduled_unix_ns=started.scheduled_ns,
        first_token_unix_ns=started.first_token_ns,
    )


def _finished(finished: Finished) -> engine_pb2.Finished:
    return engine_pb2.Finished(
        request_id=finished.key.request_id,
        reason=_REASON[finished.reason],
        stop_id=finished.stop_id,
        preemptions=finished.preemptions,
        last_token_unix_ns=finished.last_token_ns,
    )


def _failed(failure: Failure, retry_after_ms: int | None) -> engine_pb2.Failed:
    code, reason = _STATUS[failure.kind]
    if failure.retry_after_ns is not None:
        retry_after_ms = max(1, round(failure.retry_after_ns / 1e6))
    return engine_pb2.Failed(
        request_id=failure.key.request_id,
        code=code.value[0],
        reason=reason,
        message=failure.message,
        retry_after_ms=retry_after_ms if code is grpc.StatusCode.RESOURCE_EXHAUSTED else None,
    )
