"""Step plans and results between the core's types and the executor's contract."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from triptych.executor.v1 import executor_pb2
from triptych.inference.v1 import generation_pb2

from services.scheduler.core.step import ResultError, Scores, Start, StepPlan, StepResult

BASE_DEADLINE_MS = 30_000
DEADLINE_MS_PER_TOKEN = 200
"""Five times what a CPU at 25 tokens a second needs. Generous: an executor that is over it ends itself."""


class Logprob(NamedTuple):
    """Of a sampled id: natural, and rank from 1. Its alternatives are columns of the contract, passed on unread."""

    logprob: float
    rank: int
    top_ids: bytes = b""
    """[k] uint32"""
    top_logprobs: bytes = b""
    """[k] float32"""


def deadline_ms(plan: StepPlan) -> int:
    """How long the executor may take for a step before it ends itself."""
    return BASE_DEADLINE_MS + DEADLINE_MS_PER_TOKEN * plan.num_tokens


def encode_plan(plan: StepPlan) -> executor_pb2.RunRequest:
    """One message a step; only what changed travels."""
    message = executor_pb2.StepPlan(
        step=plan.step,
        freed_slots=column(plan.freed_slots),
        started=[_encode_start(start) for start in plan.started],
        slots=column(plan.slots),
        token_counts=_tail(plan.token_counts),
        computed_tokens=plan.computed_tokens,
        deadline_ms=deadline_ms(plan),
        forced_ids=_pairs(plan.forced_ids),
        masked_slots=column([row.slot for row in plan.masked]),
    )
    if plan.new_blocks or plan.copies:
        message.groups.add(new_blocks=_pairs(plan.new_blocks), copies=_pairs(plan.copies))
    return executor_pb2.RunRequest(plan=message)


def uncounted_slots(plan: StepPlan) -> bytes:
    """The column of the self-test's row. One id of a prompt and one more are the step that starts it, and no other."""
    return column([start.slot for start in plan.started if not start.submission.is_counted])


def _encode_start(start: Start) -> executor_pb2.NewRequest:
    submission = start.submission
    message = executor_pb2.NewRequest(
        slot=start.slot,
        token_ids=start.token_ids.astype("<u4", copy=False).tobytes(),
        prompt_tokens=len(submission.prompt_ids),
        computed_tokens=start.num_computed,
        block_ids=[column(start.block_ids)],
        sampling=submission.sampling,
        seed=start.seed,
        min_tokens=submission.min_tokens,
        stop_ids=column(sorted(submission.stop_ids)),
    )
    if submission.logprobs is not None:
        message.logprobs = submission.logprobs
    if start.is_scored and submission.prompt_logprobs is not None:
        message.prompt_logprobs = submission.prompt_logprobs
    return message


def decode_result(message: executor_pb2.StepResult, rows: int) -> tuple[StepResult, dict[int, Logprob]]:
    """A result for a plan of `rows` rows, and logprobs by place in its ids.

    Raises ResultError where a column's shape is impossible.
    """
    counts = _numbers("token_counts", message.token_counts)
    if len(counts) > rows:
        raise ResultError(f"step {message.step} has {rows} rows, its result counts {len(counts)}")
    token_ids = _numbers("token_ids", message.token_ids)
    failed = {row.slot: fault_name(row.kind) for row in message.failed}
    result = StepResult(
        step=message.step,
        token_counts=[1] * (rows - len(counts)) + counts.tolist(),
        token_ids=token_ids.tolist(),
        failed=failed,
        scores=_decode_scores(message),
    )
    return result, _decode_logprobs(message, len(token_ids))


def _decode_logprobs(message: executor_pb2.StepResult, num_ids: int) -> dict[int, Logprob]:
    if not message.HasField("logprobs") or not message.logprobs.logprobs:
        return {}
    columns = message.logprobs
    places = _numbers("logprobs.places", columns.places) if columns.places else np.arange(num_ids, dtype=np.uint32)
    logprobs, ranks, counts = _own("logprobs", columns)
    if len(places) != len(logprobs):
        raise ResultError(f"step {message.step}: {len(logprobs)} logprobs have {len(places)} places")
    if len(places) and int(places.max()) >= num_ids:
        raise ResultError(f"step {message.step}: a logprob for id {int(places.max())} of {num_ids}")
    own = zip(places.tolist(), logprobs.tolist(), ranks.tolist(), strict=True)
    if not counts.any():
        return {place: Logprob(logprob, rank) for place, logprob, rank in own}
    ends = (4 * np.cumsum(counts, dtype=np.int64)).tolist()
    ids, tops = columns.top_ids, columns.top_logprobs
    return {
        place: Logprob(logprob, rank, ids[start:stop], tops[start:stop])
        for (place, logprob, rank), (start, stop) in zip(own, pairwise([0, *ends]), strict=True)
    }


def _decode_scores(message: executor_pb2.StepResult) -> dict[int, Scores]:
    scores = {}
    for told in message.prompt_logprobs:
        logprobs, ranks, counts = _own("prompt_logprobs", told.logprobs)
        if told.slot in scores or told.logprobs.places or len(set(counts.tolist())) > 1:
            raise ResultError(
                f"step {message.step}: prompt logprobs of slot {told.slot} come twice, or with places, or with more "
                "alternatives to one position than to another"
            )
        shape = (len(logprobs), int(counts[0]) if len(counts) else 0)
        top_ids = _numbers("prompt_logprobs.top_ids", told.logprobs.top_ids).reshape(shape)
        top = np.frombuffer(told.logprobs.top_logprobs, "<f4").reshape(shape)
        scores[told.slot] = Scores(told.start, logprobs, ranks, top_ids, top)
    return scores


def _own(
    name: str, columns: generation_pb2.LogprobColumns
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """Logprobs, ranks and counts of alternatives, each [n]; the alternatives are as many as is counted."""
    logprobs = _numbers(f"{name}.logprobs", columns.logprobs).view("<f4")
    ranks = _numbers(f"{name}.ranks", columns.ranks)
    counts = _numbers(f"{name}.top_counts", columns.top_counts)
    if not columns.top_counts:
        counts = np.zeros(len(logprobs), np.uint32)
    total = 4 * int(counts.sum(dtype=np.int64))
    if not len(logprobs) == len(ranks) == len(counts) or not total == len(columns.top_ids) == len(columns.top_logprobs):
        raise ResultError(
            f"{name}: {len(logprobs)} logprobs, {len(ranks)} ranks, {len(counts)} counts of {total // 4} alternatives, "
            f"{len(columns.top_ids)} bytes of their ids and {len(columns.top_logprobs)} of their logprobs do not fit"
        )
    return logprobs, ranks, counts


def column(numbers: Sequence[int], kind: str = "I") -> bytes:
    """Little-endian bytes of a column; "I" for uint32, "Q" for uint64."""
    return struct.pack(f"<{len(numbers)}{kind}", *numbers)  # of a list, ten times as fast as numpy


def _pairs(pairs: Sequence[tuple[int, int]]) -> bytes:
    return column(list(chain.from_iterable(pairs)))


def _tail(counts: list[int]) -> bytes:
    """Counts from the first row that is not 1 on; all rows before it have 1."""
    if counts.count(1) == len(counts):
        return b""
    first = next((i for i, count in enumerate(counts) if count != 1), len(counts))
    return column(counts[first:])


def _numbers(name: str, data: bytes) -> npt.NDArray[np.uint32]:
    if len(data) % 4:
        raise ResultError(f"{name} has {len(data)} bytes; a column has 4 a number")
    return np.frombuffer(data, dtype="<u4")


def fault_name(kind: executor_pb2.FaultKind.ValueType) -> str:
    """OUT_OF_MEMORY and so on; a number for one that this version does not know."""
    known = kind in executor_pb2.FaultKind.values()
    return executor_pb2.FaultKind.Name(kind).removeprefix("FAULT_KIND_") if known else f"fault kind {kind}"
