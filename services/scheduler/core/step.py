"""What goes into a step and what comes out of it, as plain data."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from services.scheduler.core.request import Failure, FinishReason, RequestKey, Submission


class ResultError(Exception):
    """The executor's result contradicts the plan it answers; nothing of it was applied."""


class InvariantError(AssertionError):
    """The core's own books do not balance."""


@dataclass(frozen=True, eq=False)
class Start:
    """A request named whole: its first step since it was submitted or preempted.

    `token_ids` is uint32 [prompt + output so far]; the KV of the first `num_computed`, at least one fewer, is in the
    blocks already. `is_scored`: the logprobs of its prompt ids are wanted, of all that are computed from here on.
    """

    key: RequestKey
    slot: int
    submission: Submission
    seed: int
    token_ids: npt.NDArray[np.uint32]
    block_ids: list[int]
    num_computed: int = 0
    is_scored: bool = False


class MaskedRow(NamedTuple):
    """A row whose id is drawn under a mask: the id's position in the request's output, from 0."""

    key: RequestKey
    slot: int
    position: int


@dataclass(frozen=True, eq=False)
class StepPlan:
    """One step. `slots` and `token_counts` are its rows, those that compute one token first.

    `freed_slots` are freed before anything starts, `new_blocks` are (slot, block) pairs appended to tables, `copies`
    are (source, destination) blocks copied after the writes of earlier steps and before those of this one. `forced_ids`
    are (slot, id) pairs appended before the rows compute; `masked` are the rows that wait for their masks.
    `computed_tokens` is the sum, over the rows, of the tokens computed before this step. `prefilled_tokens` are those
    that rows of several compute of what their requests were given with; the others are ids that were forced.
    """

    step: int
    freed_slots: list[int]
    started: list[Start]
    new_blocks: list[tuple[int, int]]
    slots: list[int]
    token_counts: list[int]
    computed_tokens: int
    prefilled_tokens: int = 0
    copies: list[tuple[int, int]] = field(default_factory=list)
    forced_ids: list[tuple[int, int]] = field(default_factory=list)
    masked: list[MaskedRow] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens computed by this step."""
        return sum(self.token_counts)


@dataclass(frozen=True, eq=False)
class Scores:
    """Logprobs (natural, float32 [n]) and ranks (from 1, uint32 [n]) of the prompt ids from position `start` on.

    All of them have equally many alternatives, perhaps none.
    """

    start: int
    logprobs: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.uint32]
    top_ids: npt.NDArray[np.uint32]
    """[n, k] the likeliest ids of each position, likeliest first"""
    top_logprobs: npt.NDArray[np.float32]
    """[n, k]"""

    @classmethod
    def plain(cls, start: int, logprobs: npt.NDArray[np.float32], ranks: npt.NDArray[np.uint32]) -> Scores:
        """Without alternatives."""
        none = np.zeros((len(logprobs), 0))
        return cls(start, logprobs, ranks, none.astype(np.uint32), none.astype(np.float32))

    @property
    def stop(self) -> int:
        """The position after the last."""
        return self.start + len(self.logprobs)

    def since(self, position: int) -> Scores:
        """Those from `position` on, perhaps none."""
        skipped = max(0, position - self.start)
        return self._cut(slice(skipped, None), self.start + skipped)

    def until(self, position: int) -> Scores:
        """Those before `position`."""
        kept = max(0, position - self.start)
        return self._cut(slice(kept), self.start)

    def _cut(self, span: slice, start: int) -> Scores:
        return Scores(start, self.logprobs[span], self.ranks[span], self.top_ids[span], self.top_logprobs[span])


NO_ID_LEFT = "NO_ID_LEFT"
"""What the executor says of a row whose logits are good, while no id is left that it may draw."""


@dataclass(frozen=True, eq=False)
class StepResult:
    """The answer to a plan, in the order of its rows: ids sampled a row, all ids one after the other, rows that failed.

    `failed` maps a slot to what the executor says of it, `scores` to the logprobs of the prompt ids that the row's
    computed tokens foretell.
    """

    step: int
    token_counts: list[int]
    token_ids: list[int]
    failed: dict[int, str] = field(default_factory=dict)
    scores: dict[int, Scores] = field(default_factory=dict)


@dataclass(frozen=True)
class Started:
    """A request's first id. Clock times in ns."""

    key: RequestKey
    queued_ns: int
    scheduled_ns: int
    first_token_ns: int
    cached_tokens: int = 0


@dataclass(frozen=True)
class Finished:
    """A request's last id. `stop_id` is set with STOP, but for the end of a grammar."""

    key: RequestKey
    reason: FinishReason
    stop_id: int | None
    preemptions: int
    last_token_ns: int


@dataclass
class Updates:
    """What the owners of requests are told. Columns: `keys[i]` received `counts[i]` ids.

    `token_ids` are all ids one after the other; `places` says where each stood in the result's ids. `scores` come
    before a request's first id, each position once.
    """

    step: int
    keys: list[RequestKey] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    places: Sequence[int] = field(default_factory=list)
    scores: list[tuple[RequestKey, Scores]] = field(default_factory=list)
    started: list[Started] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    failed: list[Failure] = field(default_factory=list)

    def take_ids(self, token_ids: list[int], dropped: Set[int]) -> None:
        """The result's ids but for those at the `dropped` places; one for each of `keys`."""
        self.places = range(len(token_ids))
        self.token_ids = token_ids
        if dropped:
            self.places = [place for place in self.places if place not in dropped]
            self.token_ids = [token_ids[place] for place in self.places]
        self.counts = [1] * len(self.keys)

    def add_forced(self, key: RequestKey, token_ids: list[int]) -> None:
        """Ids that no step has drawn: they have no place in a result."""
        self.keys.append(key)
        self.counts.append(len(token_ids))
        self.token_ids += token_ids
        self.places = [*self.places, *[-1] * len(token_ids)]
