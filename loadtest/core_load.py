"""A scheduler's core full of requests that decode, and an executor that makes ids up: the load of its benchmarks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.common.digests import chained_digest, prompt_digests, root_digest
from services.scheduler.core.limits import Limits
from services.scheduler.core.request import RequestKey, Submission
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.step import Start, StepPlan, StepResult

VOCAB_SIZE = 49_152
BLOCK_TOKENS = 16
MAX_STEP_TOKENS = 8192
STOP_IDS = (2, 3)
FIRST_ID = 64
"""Ids below it are never sampled: each is looked up among the stop ids, none is one."""

FRONTEND = 1


class CoreLoad:
    """One core; every request may decode for `decode_steps` steps before a limit or the pool ends it.

    `more` are prompt lengths that `submit` will be given later. Prefix cache on, digests given, blocks for everything:
    what is measured is a step, not a shortage.
    """

    def __init__(
        self,
        prompts: Sequence[int],
        *,
        decode_steps: int,
        more: Sequence[int] = (),
        max_step_tokens: int = MAX_STEP_TOKENS,
        seed: int = 1,
        sampling: object = None,
    ) -> None:
        self.now_ns = 1
        self._rng = np.random.default_rng(seed)
        self._sampling = sampling
        self._submitted = 0
        self._missing: dict[int, int] = {}  # slot: tokens to compute until it samples
        # Those that start first decode while the others prefill, in what the decodes leave of a step.
        prefill_steps = sum(prompts) // (max_step_tokens - len(prompts)) + 1
        self._output_tokens = decode_steps + prefill_steps + BLOCK_TOKENS
        self.core = Scheduler(
            Limits(
                vocab_size=VOCAB_SIZE,
                context_tokens=max((*prompts, *more)) + self._output_tokens,
                num_blocks=1 + sum(-(-(prompt + self._output_tokens) // BLOCK_TOKENS) for prompt in (*prompts, *more)),
                block_tokens=BLOCK_TOKENS,
                max_slots=len(prompts) + len(more),
                max_step_tokens=max_step_tokens,
                max_waiting=len(prompts) + len(more),
            ),
            chained_digest,
        )
        for prompt in prompts:
            self.submit(prompt)

    def submit(self, prompt_tokens: int, output_tokens: int | None = None) -> None:
        """One request more; random ids share no prefix."""
        ids = self._rng.integers(FIRST_ID, VOCAB_SIZE, prompt_tokens).astype(np.uint32)
        root = root_digest(tenant="", salt="", adapter="")
        refused = self.core.submit(
            Submission(
                key=RequestKey(FRONTEND, self._submitted),
                prompt_ids=ids,
                max_tokens=output_tokens or self._output_tokens,
                stop_ids=frozenset(STOP_IDS),
                seed=self._submitted,
                sampling=self._sampling,
                root_digest=root,
                digests=prompt_digests(root, ids, BLOCK_TOKENS),
            ),
            self.now_ns,
        )
        assert refused is None, refused
        self._submitted += 1

    def plan(self) -> StepPlan:
        """The next step, not timed."""
        plan = self.core.plan(self.now_ns)
        assert plan is not None
        return plan

    def answer(self, plan: StepPlan) -> StepResult:
        """What an executor would send: an id for each row that computes its last known token."""
        for start in plan.started:
            self._missing[start.slot] = len(start.token_ids) - start.num_computed
        counts = []
        for slot, computed in zip(plan.slots, plan.token_counts, strict=True):
            missing = self._missing[slot] - computed
            self._missing[slot] = missing or 1  # what it samples is the next token to compute
            counts.append(int(missing == 0))
        return StepResult(plan.step, counts, self._rng.integers(FIRST_ID, VOCAB_SIZE, sum(counts)).tolist())

    def prefill(self) -> list[Start]:
        """Steps until every request decodes; what they named whole."""
        started: list[Start] = []
        while True:
            plan = self.plan()
            started += plan.started
            self.core.apply(self.answer(plan), self.now_ns)
            self.core.take_kv_events()
            if self.core.num_waiting == 0 and plan.num_tokens == len(plan.slots) == self.core.num_running:
                return started


def spread_phases(requests: int, prompt_tokens: int) -> list[int]:
    """Prompt lengths around `prompt_tokens` at every phase of a block, so that each step fills blocks of some."""
    return [prompt_tokens + i % BLOCK_TOKENS for i in range(requests)]
