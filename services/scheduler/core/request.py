"""A request as the core knows it: ids and counts. There are no phases, only tokens that are computed and those not."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from services.scheduler.core.tenants import Account

NO_SLOT = -1
NEVER = -1
DIGEST_BYTES = 32


class RequestKey(NamedTuple):
    """Ids are (frontend, its counter): two frontends may use the same number."""

    frontend: int
    request_id: int


@dataclass(frozen=True, eq=False)
class Submission:
    """What a frontend asks for, checked and resolved.

    Choice i has the key's request_id + i; `seed` is choice 0's, `more_seeds` are the others', uint64. `prompt_ids` is
    uint32 [prompt]; `sampling` crosses the core unread. A stop id counts from output position `min_tokens` on. Lower
    `priority` runs first. `digests` are those of the prompt's full blocks, 32 bytes each, chained to `root_digest`;
    without a root the request has no part in the prefix cache. `prompt_logprobs` are told of choice 0 alone, whose
    prompt is computed whole for them; `max_tokens` 0 is for a prompt that is scored and not continued. Each
    id of a masked one is drawn under a mask that somebody else makes; a stepwise one, which is masked too, goes on only
    when `Scheduler.force` has told what follows its last id. `resumed` are
    (choice, its output ids so far, fewer than `max_tokens`) of a request that ran elsewhere: these choices alone are
    run, and go on from there. Times are ns of the clock that is passed to the core.
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
    more_seeds: tuple[int, ...] = ()
    priority: int = 0
    tenant: str = ""
    root_digest: bytes = b""
    digests: bytes = b""
    is_masked: bool = False
    is_stepwise: bool = False
    resumed: tuple[tuple[int, tuple[int, ...]], ...] = ()
    is_counted: bool = True
    """Whether it takes room in the queue; what the engine asks of itself does not."""

    @property
    def has_scores(self) -> bool:
        """There are prompt ids whose logprobs are wanted."""
        return self.prompt_logprobs is not None and len(self.prompt_ids) > 1

    @property
    def choices(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Those to run, each with the output ids it has."""
        return self.resumed or tuple((choice, ()) for choice in range(1 + len(self.more_seeds)))

    @property
    def num_choices(self) -> int:
        """Choices to run."""
        return len(self.resumed) or 1 + len(self.more_seeds)

    def choice_keys(self) -> list[RequestKey]:
        """One a choice that is to run, in order."""
        frontend, first = self.key
        return [RequestKey(frontend, first + choice) for choice, _ in self.choices]


class FinishReason(Enum):
    """Why a request ended well."""

    STOP = "stop"
    LENGTH = "length"


class FailureKind(Enum):
    """Why a request was refused or lost; the server gives each its gRPC status and reason."""

    INVALID = "invalid"
    TOO_LONG = "too long"
    QUEUE_FULL = "queue full"
    TENANT_OVER_SHARE = "tenant over its share"
    QUEUE_WAIT = "queue wait"
    DEADLINE = "deadline"
    BAD_TOKEN_ID = "bad token id"
    ROW_FAILED = "row failed"
    NO_ID_LEFT = "no id left"
    GRAMMAR_FAILED = "grammar failed"
    GRAMMAR_CONTRADICTED = "grammar contradicted"
    EXECUTOR_LOST = "executor lost"
    POISON = "poison"
    DRAINING = "draining"


@dataclass(frozen=True)
class Failure:
    """The end of a request that did not finish; `message` is for people."""

    key: RequestKey
    kind: FailureKind
    message: str
    retry_after_ns: int | None = None
    """When another try may be let in, where that is known of this one."""


class Request:
    """One choice that runs or waits.

    `num_tokens` counts prompt and output, sampled ids that are still on their way included; `num_computed` counts those
    whose KV is in `blocks` once the steps planned so far are done, `num_stored` those whose step was applied.
    `next_scored` is the first prompt position whose logprob its owner has not been told; `is_scored` says whether the
    executor was asked for them when it was last given the request.
    """

    __slots__ = (
        "account",
        "awaits_forced",
        "blocks",
        "cached_tokens",
        "counts_prompt",
        "digests",
        "ended",
        "first_token_ns",
        "given_tokens",
        "is_masked",
        "is_scored",
        "is_stepwise",
        "key",
        "last_computed",
        "last_id_ns",
        "last_step",
        "losses",
        "lost_at",
        "max_tokens",
        "min_tokens",
        "next_scored",
        "next_stored",
        "num_computed",
        "num_stored",
        "num_tokens",
        "output",
        "overtaken",
        "preemptions",
        "queued_ns",
        "queued_tokens",
        "rank",
        "room_tokens",
        "scheduled_ns",
        "seed",
        "siblings",
        "slot",
        "stop_ids",
        "submission",
        "unsent_forced",
    )

    def __init__(
        self,
        submission: Submission,
        choice: int,
        arrival: int,
        queued_ns: int,
        account: Account,
        digests: list[bytes],
        siblings: list[Request],
        output: tuple[int, ...] = (),
    ) -> None:
        self.submission = submission
        self.key = RequestKey(submission.key.frontend, submission.key.request_id + choice)
        self.seed = submission.more_seeds[choice - 1] if choice else submission.seed
        self.rank = (submission.priority, arrival)
        """Lower runs first, and is preempted last."""
        self.account = account
        self.siblings = siblings
        """The choices of its request that have not ended, itself included."""
        self.stop_ids = submission.stop_ids  # these three here too: they are read for every id
        self.min_tokens = submission.min_tokens
        self.max_tokens = submission.max_tokens
        self.output: list[int] = list(output)
        self.num_tokens = len(submission.prompt_ids) + len(output)
        self.last_computed = len(submission.prompt_ids) + submission.max_tokens - 1
        """Tokens that are ever computed: the very last id that max_tokens allows needs no KV."""
        self.num_computed = 0
        self.num_stored = 0
        self.digests = digests
        """Of full blocks, in order: the prompt's, then those that this choice's output fills."""
        self.next_stored = 0
        """`num_stored` from which the next block is full and can be made findable."""
        # Nothing comes before the first id that could foretell it.
        self.next_scored = 1 if submission.has_scores and choice == 0 else len(submission.prompt_ids)
        self.is_scored = False
        self.is_masked = submission.is_masked
        self.is_stepwise = submission.is_stepwise
        self.awaits_forced = submission.is_stepwise and bool(output)
        """An id was applied, and what follows it was not told yet."""
        self.given_tokens = self.num_tokens
        """Tokens that the executor was last given it with: those are prefilled, what came since is output."""
        self.unsent_forced: list[int] = []
        """Ids of the output that the executor, which has the request, does not know yet."""
        self.blocks: list[int] = []
        self.room_tokens = 0
        """Tokens that `blocks` hold; a number of its own, since it is compared in every step."""
        self.slot = NO_SLOT
        self.last_step = NEVER  # the last planned step that has a row of it
        self.losses = 0
        """Epochs in a row that were lost while a row of it was in flight, without an id between them."""
        self.lost_at = NEVER  # the length of its output at the last of them
        self.ended = False
        self.preemptions = 0
        self.overtaken = 0
        self.queued_tokens = 0
        self.cached_tokens = 0
        self.counts_prompt = not siblings
        self.last_id_ns = 0
        self.queued_ns = queued_ns
        self.scheduled_ns = 0
        self.first_token_ns = 0

    @property
    def prompt_tokens(self) -> int:
        """Ids of the prompt."""
        return len(self.submission.prompt_ids)

    @property
    def num_known(self) -> int:
        """Ids that are here: prompt, and output applied."""
        return len(self.submission.prompt_ids) + len(self.output)

    @property
    def num_to_compute(self) -> int:
        """Tokens whose KV is still missing."""
        return min(self.num_tokens, self.last_computed) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """It has ids of its own, and the KV of what it was given with, but for the last, was computed in steps applied.

        Ids that were forced since are output, also while their KV is missing.
        """
        return bool(self.output) and self.num_stored >= self.given_tokens - 1

    @property
    def wants_scores(self) -> bool:
        """Logprobs of prompt ids were asked for, and some have not been told."""
        return self.next_scored < len(self.submission.prompt_ids)

    @property
    def can_be_named(self) -> bool:
        """Whether the executor can be given it whole; not while its last id, or what follows that, is on its way."""
        return self.num_known == self.num_tokens and not self.awaits_forced

    @property
    def is_held(self) -> bool:
        """Nothing of it is planned now: its last id is on its way, and ids may be forced behind that one."""
        return self.is_stepwise and (self.awaits_forced or self.num_known != self.num_tokens)

    def token_ids(self) -> npt.NDArray[np.uint32]:
        """Prompt, then output, uint32."""
        if not self.output:
            return self.submission.prompt_ids
        return np.concatenate([self.submission.prompt_ids, np.array(self.output, dtype=np.uint32)])

    def column(self, start: int, stop: int) -> bytes:
        """Ids start..stop-1 as a little-endian uint32 column."""
        prompt, split = self.submission.prompt_ids, len(self.submission.prompt_ids)
        head = prompt[start:stop].astype("<u4", copy=False).tobytes() if start < split else b""
        if stop <= split:
            return head
        return head + np.array(self.output[max(0, start - split) : stop - split], dtype="<u4").tobytes()

    def stops_at(self, token_id: int) -> bool:
        """Whether `token_id`, the last of the output, is a stop id where one counts."""
        return token_id in self.stop_ids and len(self.output) > self.min_tokens


by_rank = attrgetter("rank")
"""What sorted lists of requests are sorted by."""
