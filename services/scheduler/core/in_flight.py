"""A step of the core: a plan while it is made, what its result must look like once it is under way."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.scheduler.core.request import Request
from services.scheduler.core.step import ResultError, Start, StepPlan, StepResult


@dataclass
class Step:
    """`budget` counts the tokens it may still compute; `samples[i]` is 1 where row i is to sample an id, else 0.

    `scored` says of which prompt positions [start, stop) the result must hold logprobs, by slot.
    """

    number: int
    budget: int
    started: list[Start] = field(default_factory=list)
    new_blocks: list[tuple[int, int]] = field(default_factory=list)
    rows: list[tuple[Request, int]] = field(default_factory=list)  # (request, tokens to compute)
    row_slots: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    scored: dict[int, tuple[int, int]] = field(default_factory=dict)

    def add_row(self, request: Request, count: int) -> None:
        """`request` computes `count` tokens in it."""
        self.rows.append((request, count))
        self.budget -= count

    def depart(self, freed_slots: list[int]) -> StepPlan:
        """The finished plan; its requests move forward now."""
        self.rows.sort(key=lambda row: row[1] != 1)  # stable: rows that compute one token first
        number, computed_before = self.number, 0
        for request, count in self.rows:
            computed = request.num_computed
            computed_before += computed
            request.num_computed = computed = computed + count
            request.last_step = number
            if computed == request.num_tokens:
                request.num_pending += 1
                request.num_tokens += 1
                self.samples.append(1)
            else:
                self.samples.append(0)
            self.row_slots.append(request.slot)
            if request.is_scored:
                self._expect_scores(request, computed - count, computed)
        return StepPlan(
            step=self.number,
            freed_slots=freed_slots,
            started=self.started,
            new_blocks=self.new_blocks,
            slots=self.row_slots,
            token_counts=[count for _, count in self.rows],
            computed_tokens=computed_before,
        )

    def _expect_scores(self, request: Request, start: int, stop: int) -> None:
        """Computing the tokens [start, stop) foretells the ids one position on, as far as they are the prompt's."""
        last = min(stop + 1, len(request.submission.prompt_ids))
        if start + 1 < last:
            self.scored[request.slot] = (start + 1, last)

    def check(self, result: StepResult) -> None:
        """Raises ResultError unless `result` answers this step."""
        if result.step != self.number:
            raise ResultError(f"a result for step {result.step}, but {self.number} is the next in flight")
        if len(result.token_counts) != len(self.rows):
            raise ResultError(f"step {self.number} has {len(self.rows)} rows, its result {len(result.token_counts)}")
        if sum(result.token_counts) != len(result.token_ids):
            counted = sum(result.token_counts)
            raise ResultError(f"step {self.number}: counts say {counted} ids, there are {len(result.token_ids)}")
        if unknown := set(result.failed) - set(self.row_slots):
            raise ResultError(f"step {self.number}: slots {sorted(unknown)} failed, but have no row in it")
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
