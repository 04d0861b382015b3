"""A step of the core: a plan while it is made, what its result must look like once it is under way."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.scheduler.core.request import Request
from services.scheduler.core.step import MaskedRow, ResultError, Start, StepPlan, StepResult


@dataclass
class Chunk:
    """A row of a prefill."""

    request: Request
    count: int


@dataclass
class Step:
    """`budget` counts the tokens it may still compute. Rows that compute one token come first, since most do.

    `scored` says of which prompt positions [start, stop) the result must hold logprobs, by slot.
    """

    number: int
    budget: int
    planned_ns: int = 0
    started: list[Start] = field(default_factory=list)
    new_blocks: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    singles: list[Request] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    row_slots: list[int] = field(default_factory=list)
    token_counts: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    """1 where a row is to sample an id, else 0."""
    scored: dict[int, tuple[int, int]] = field(default_factory=dict)
    num_named: int = 0
    """Ids of the requests in `started`."""

    def add_chunk(self, request: Request, count: int) -> None:
        """`request` computes `count` tokens in it."""
        self.chunks.append(Chunk(request, count))
        self.budget -= count

    def use_up(self) -> None:
        """Gives what is left of the budget to prefills that do not end in it, oldest first."""
        for chunk in self.chunks:
            if self.budget == 0:
                return
            more = min(self.budget, chunk.request.num_to_compute - chunk.count)
            chunk.count += more
            self.budget -= more

    @property
    def is_cut(self) -> bool:
        """Whether it has a prefill that does not end in it; one at a time is enough to fill steps."""
        return any(chunk.count < chunk.request.num_to_compute for chunk in self.chunks)

    @property
    def is_empty(self) -> bool:
        """Whether it has no rows."""
        return not self.singles and not self.chunks

    def depart(self, freed_slots: list[int], *, any_masked: bool = False) -> StepPlan:
        """The finished plan; its requests move forward now. `any_masked`: there are masked ones among all requests."""
        number, computed_before, prefilled = self.number, 0, 0
        singles = self.singles
        # One token may be a prompt of one, or what was left of a longer one.
        singles += [chunk.request for chunk in self.chunks if chunk.count == 1]
        chunks = [chunk for chunk in self.chunks if chunk.count > 1]
        samples = self.samples
        for request in singles:
            computed_before += request.num_computed
            request.num_computed = computed = request.num_computed + 1
            request.last_step = number
            if computed == request.num_tokens:
                request.num_tokens = computed + 1
                samples.append(1)
            else:
                samples.append(0)
            if request.is_scored:
                self._expect_scores(request, computed - 1)
        for chunk in chunks:
            request = chunk.request
            computed_before += request.num_computed
            prefilled += min(chunk.count, max(0, request.given_tokens - request.num_computed))
            request.num_computed += chunk.count
            request.last_step = number
            self.samples.append(int(request.num_computed == request.num_tokens))
            request.num_tokens += self.samples[-1]
            if request.is_scored:
                self._expect_scores(request, request.num_computed - chunk.count)
        self.requests = [*singles, *(chunk.request for chunk in chunks)]
        self.row_slots = [request.slot for request in self.requests]
        self.token_counts = [1] * len(singles) + [chunk.count for chunk in chunks]
        masked = self._masked_rows() if any_masked else []
        return StepPlan(
            step=number,
            freed_slots=freed_slots,
            started=self.started,
            new_blocks=self.new_blocks,
            slots=self.row_slots,
            token_counts=self.token_counts,
            computed_tokens=computed_before,
            prefilled_tokens=prefilled,
            copies=self.copies,
            forced_ids=self._forced_ids() if any_masked else [],
            masked=masked,
        )

    def _masked_rows(self) -> list[MaskedRow]:
        rows = zip(self.requests, self.samples, strict=True)
        return [
            MaskedRow(request.key, request.slot, request.num_tokens - 1 - request.prompt_tokens)
            for request, samples in rows
            if samples and request.is_masked
        ]

    def _forced_ids(self) -> list[tuple[int, int]]:
        """What the executor does not know of its requests yet; it does from now on."""
        forced = []
        for request in self.requests:
            if request.unsent_forced:
                forced += [(request.slot, token_id) for token_id in request.unsent_forced]
                request.unsent_forced = []
        return forced

    def _expect_scores(self, request: Request, start: int) -> None:
        """Computing the tokens from `start` on foretells the ids one position on, as far as they are the prompt's."""
        last = min(request.num_computed + 1, request.prompt_tokens)
        if start + 1 < last:
            self.scored[request.slot] = (start + 1, last)

    def check(self, result: StepResult) -> None:
        """Raises ResultError unless `result` answers this step."""
        if result.step != self.number:
            raise ResultError(f"a result for step {result.step}, but {self.number} is the next in flight")
        if len(result.token_counts) != len(self.requests):
            raise ResultError(
                f"step {self.number} has {len(self.requests)} rows, its result {len(result.token_counts)}"
            )
        if sum(result.token_counts) != len(result.token_ids):
            counted = sum(result.token_counts)
            raise ResultError(f"step {self.number}: counts say {counted} ids, there are {len(result.token_ids)}")
        if unknown := set(result.failed) - set(self.row_slots):
            raise ResultError(f"step {self.number}: slots {sorted(unknown)} failed, but have no row in it")
        if result.scores or self.scored:
            self._check_scores(result)
        if not result.failed and result.token_counts == self.samples:
            return
        for slot, samples, count in zip(self.row_slots, self.samples, result.token_counts, strict=True):
            expected = 0 if slot in result.failed else samples
            if count != expected:
                raise ResultError(f"step {self.number}: {count} ids for slot {slot}, the plan asks for {expected}")

    def _check_scores(self, result: StepResult) -> None:
        expected = {slot: span for slot, span in self.scored.items() if slot not in result.failed}
        told = {slot: (scores.start, scores.stop) for slot, scores in result.scores.items()}
        if told != expected:
            raise ResultError(
                f"step {self.number}: prompt logprobs of positions {told} by slot, the plan asks for {expected}"
            )
