"""Step plans and results between the core's types and the executor's contract."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
from triptych.executor.v1 import executor_pb2

from services.scheduler.core.step import ResultError, Scores, Start, StepPlan, StepResult

BASE_DEADLINE_MS = 30_000
DEADLINE_MS_PER_TOKEN = 200
"""Five times what a CPU at 25 tokens a second needs. Generous: an executor that is over it ends itself."""


@dataclass(frozen=True, eq=False)
class OwnLogprobs:
    """Log-probability and rank of sampled ids; `places` index the result's ids and rise."""

    places: npt.NDArray[np.uint32]
    logprobs: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.uint32]


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
    )
    if plan.new_blocks or plan.copies:
        message.groups.add(new_blocks=_pairs(plan.new_blocks), copies=_pairs(plan.copies))
    return executor_pb2.RunRequest(plan=message)


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


def decode_result(message: executor_pb2.StepResult, rows: int) -> tuple[StepResult, OwnLogprobs | None]:
    """A result for a plan of `rows` rows. Raises ResultError where a column's shape is impossible."""
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


def _decode_logprobs(message: executor_pb2.StepResult, num_ids: int) -> OwnLogprobs | None:
    if not message.HasField("logprobs") or not message.logprobs.logprobs:
        return None
    columns = message.logprobs
    places = _numbers("logprobs.places", columns.places) if columns.places else np.arange(num_ids, dtype=np.uint32)
    logprobs = _numbers("logprobs.logprobs", columns.logprobs).view("<f4")
    ranks = _numbers("logprobs.ranks", columns.ranks)
    if not len(places) == len(logprobs) == len(ranks):
        shapes = f"{len(places)} places, {len(logprobs)} logprobs, {len(ranks)} ranks"
        raise ResultError(f"step {message.step}: {shapes} are not of one shape")
    if len(places) and int(places.max()) >= num_ids:
        raise ResultError(f"step {message.step}: a logprob for id {int(places.max())} of {num_ids}")
    return OwnLogprobs(places, logprobs, ranks)


def _decode_scores(message: executor_pb2.StepResult) -> dict[int, Scores]:
    scores = {}
    for told in message.prompt_logprobs:
        logprobs = _numbers("prompt_logprobs.logprobs", told.logprobs.logprobs).view("<f4")
        ranks = _numbers("prompt_logprobs.ranks", told.logprobs.ranks)
        if told.slot in scores or len(logprobs) != len(ranks) or told.logprobs.places:
            raise ResultError(
                f"step {message.step}: prompt logprobs of slot {told.slot} come twice, or with places, or "
                f"{len(logprobs)} logprobs have {len(ranks)} ranks"
            )
        scores[told.slot] = Scores(told.start, logprobs, ranks)
    return scores


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
