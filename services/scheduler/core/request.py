"""A request as the core knows it: ids and counts. There are no phases, only tokens that are computed and those not."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

NO_SLOT = -1
NEVER = -1


class RequestKey(NamedTuple):
    """Ids are (frontend, its counter): two frontends may use the same number."""

    frontend: int
    request_id: int


@dataclass(frozen=True, eq=False)
class Submission:
    """What a frontend asks for, checked and resolved.

    `prompt_ids` is uint32 [prompt]; `sampling` crosses the core unread; `seed` is uint64, of this choice. A stop id
    counts from output position `min_tokens` on. `max_tokens` 0 is for `prompt_logprobs` alone: a prompt that is scored
    and not continued. Times are ns of the clock that is passed to the core.
    """

    key: RequestKey
    prompt_ids: npt.NDArray[np.uint32]
    max_tokens: int
    min_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()
    seed: int = 0
    sampling: Any = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    deadline_ns: int | None = None

    @property
    def has_scores(self) -> bool:
        """There are prompt ids whose logprobs are wanted."""
        return self.prompt_logprobs is not None and len(self.prompt_ids) > 1


class FinishReason(Enum):
    """Why a request ended well."""

    STOP = "stop"
    LENGTH = "length"


class FailureKind(Enum):
    """Why a request was refused or lost; the server gives each its gRPC status and reason."""

    INVALID = "invalid"
    TOO_LONG = "too long"
    QUEUE_FULL = "queue full"
    DEADLINE = "deadline"
    BAD_TOKEN_ID = "bad token id"
    ROW_FAILED = "row failed"
    EXECUTOR_LOST = "executor lost"
    DRAINING = "draining"


@dataclass(frozen=True)
class Failure:
    """The end of a request that did not finish; `message` is for people."""

    key: RequestKey
    kind: FailureKind
    message: str


class Request:
    """One choice that runs or waits.

    `num_tokens` counts prompt and output, sampled ids that are still on their way included (`num_pending` of them);
    `num_computed` counts those whose KV is in `blocks` once the steps planned so far are done. `next_scored` is the
    first prompt position whose logprob its owner has not been told; `is_scored` says whether the executor was asked for
    them when it was last given the request.
    """

    __slots__ = (
        "blocks",
        "ended",
        "first_token_ns",
        "is_scored",
        "key",
        "last_step",
        "max_tokens",
        "max_total_tokens",
        "min_tokens",
        "next_scored",
        "num_computed",
        "num_pending",
        "num_tokens",
        "output",
        "preemptions",
        "queued_ns",
        "scheduled_ns",
        "slot",
        "stop_ids",
        "submission",
    )

    def __init__(self, submission: Submission, queued_ns: int) -> None:
        self.submission = submission
        self.key = submission.key
        self.stop_ids = submission.stop_ids  # these three here too: they are read for every id
        self.min_tokens = submission.min_tokens
        self.max_tokens = submission.max_tokens
        self.output: list[int] = []
        self.num_tokens = len(submission.prompt_ids)
        self.max_total_tokens = self.num_tokens + submission.max_tokens
        self.num_pending = 0
        self.num_computed = 0
        self.next_scored = 1  # nothing comes before the first id that could foretell it
        self.is_scored = False
        self.blocks: list[int] = []
        self.slot = NO_SLOT
        self.last_step = NEVER  # the last planned step that has a row of it
        self.ended = False
        self.preemptions = 0
        self.queued_ns = queued_ns
        self.scheduled_ns = 0
        self.first_token_ns = 0

    @property
    def num_to_compute(self) -> int:
        """Tokens whose KV is still missing. The very last id that max_tokens allows needs none."""
        return min(self.num_tokens, self.max_total_tokens - 1) - self.num_computed

    @property
    def wants_scores(self) -> bool:
        """Logprobs of prompt ids were asked for, and some have not been told."""
        return self.submission.prompt_logprobs is not None and self.next_scored < len(self.submission.prompt_ids)

    def token_ids(self) -> npt.NDArray[np.uint32]:
        """Prompt, then output, uint32."""
        if not self.output:
            return self.submission.prompt_ids
        return np.concatenate([self.submission.prompt_ids, np.array(self.output, dtype=np.uint32)])

    def stops_at(self, token_id: int) -> bool:
        """Whether `token_id`, the last of the output, is a stop id where one counts."""
        return token_id in self.stop_ids and len(self.output) > self.min_tokens
