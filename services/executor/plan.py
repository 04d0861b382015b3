"""What crosses between the executor's door and its inside: own types, no protobuf."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from services.executor.logprobs import Logprobs
from services.executor.sampling_params import SamplingParams

Ids = npt.NDArray[np.uint32]
Int64s = npt.NDArray[np.int64]


MAX_IN_FLIGHT = 2
"""Steps under way at once: one that runs, one that waits for it. A slot freed at step N is reusable so many later."""


class BadPlanError(Exception):
    """A plan contradicts what the executor holds; nothing of it was done. `slots` are at fault, where known."""

    def __init__(self, message: str, slots: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.slots = slots


class RanksLostError(Exception):
    """A rank of a group is lost, and the group with it: this process cannot work any more."""


@dataclass(frozen=True)
class Settings:
    """How the model is served: the scheduler's EngineConfig, checked."""

    context_tokens: int
    block_tokens: int
    max_slots: int
    max_step_tokens: int


@dataclass(frozen=True, eq=False)
class Started:
    """A request, whole."""

    slot: int
    token_ids: Ids
    """[tokens] prompt, then output so far."""
    prompt_tokens: int
    computed_tokens: int
    block_ids: Int64s
    sampling: SamplingParams
    scored: int | None = None
    """The logprobs of its prompt ids are wanted, as far as the tokens computed from now on foretell them, and of so
    many alternatives to each."""


@dataclass(frozen=True, eq=False)
class Plan:
    """One step, in the order in which it is done."""

    step: int
    freed_slots: Int64s
    started: tuple[Started, ...]
    new_blocks: Int64s
    """[n, 2] (slot, block), appended to the slot's table."""
    slots: Int64s
    """[rows]"""
    token_counts: Int64s
    """[rows] tokens each row computes."""
    computed_tokens: int | None
    """What the rows have computed before, summed; None: not to be compared."""
    deadline_s: float | None
    copies: Int64s = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    """[n, 2] (source, destination) blocks, copied before the rows compute; every source is read first."""
    masked_slots: Int64s = field(default_factory=lambda: np.zeros(0, np.int64))
    """[n] slots whose rows wait for their masks before they sample."""
    forced_ids: Int64s = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    """[n, 2] (slot, id) appended, in order, before the rows compute."""
    uncounted_slots: Int64s = field(default_factory=lambda: np.zeros(0, np.int64))
    """[n] slots whose rows metrics leave out."""
    message: bytes = b""
    """The StepPlan that this is, as other ranks are told it."""


@dataclass(frozen=True, eq=False)
class PromptScores:
    """Log-probabilities of a slot's prompt ids, from position `start` on."""

    slot: int
    start: int
    logprobs: Logprobs


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a step gave, with the plan's rows."""

    step: int
    token_counts: Int64s
    """[rows] ids a row sampled: 0 or 1."""
    token_ids: Int64s
    """[sum of token_counts]"""
    failed_slots: tuple[int, ...]
    """Slots of this step's rows whose logits are NaN, that no id is left for, or that failed in an earlier step."""
    logprob_places: Int64s
    """[n] indices into token_ids of the ids whose request asked for its log-probability."""
    logprobs: Logprobs
    """[n]"""
    prompt_scores: tuple[PromptScores, ...]
    execute_us: int = 0
    sample_us: int = 0
    in_graph: bool | None = None
    """Whether a captured graph was replayed; None: there are none on this device."""
    idless_slots: tuple[int, ...] = ()
    """Those of the failed slots whose logits are good, and yet no id is left for them."""
