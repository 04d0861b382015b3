"""Masks on their way to the steps that wait for them, and those kept by id for later ones.

The event loop puts masks in as they arrive, before their plan or after it; the step thread waits for a step's masks
once its forward pass is done. All of it is an epoch's, and gone with it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.executor.plan import MAX_IN_FLIGHT, BadPlanError

Words = npt.NDArray[np.uint32]

CACHE_SIZE = 1024
"""Masks kept by id: 6 MB of them at a vocabulary of 49,152."""

WAIT_S = 30.0
"""How long a step without a deadline waits for its masks."""
_SHARE_OF_DEADLINE = 0.8
"""The wait ends before the step's deadline does, at which the process would end itself: a fault is enough."""


class EpochOverError(Exception):
    """What a step waits for does not come any more: the epoch has ended."""


@dataclass(frozen=True, eq=False)
class Mask:
    """Of a slot's next id: the ids that it allows, or the id that they are kept under."""

    slot: int
    words: Words | None
    """[ceil(vocab / 32)] bit i of word j allows id 32 j + i; bits past the vocabulary mean nothing"""
    cached_id: int | None = None
    cache_as: int | None = None


def allowing(ids: npt.NDArray[np.int64], vocab_size: int, *, but: bool = False) -> Words:
    """Words that allow `ids`, each below the vocabulary, or all `but` these."""
    bits = np.full(-(-vocab_size // 32) * 32, but)
    bits[ids] = not but
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32, copy=False)


class StepMasks:
    """Those of one step; one thread puts them in, another waits for all of them."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._words: dict[int, Words] = {}
        self._wanted: frozenset[int] | None = None  # None: the plan is not there yet
        self._wait_s = WAIT_S
        self._ended: bool | None = None
        self._changed = threading.Condition()

    @property
    def is_unplanned(self) -> bool:
        """Masks have come, their plan has not."""
        return self._wanted is None

    @property
    def complete(self) -> bool:
        """All are there."""
        return self._wanted is not None and len(self._words) == len(self._wanted)

    def put(self, slot: int, words: Words) -> None:
        """Raises BadPlanError for a slot that does not wait for one, or has one."""
        if self._wanted is not None:
            self._check_wanted(slot)
        if slot in self._words:
            raise BadPlanError(f"masks: step {self._step} has a second mask for slot {slot}", (slot,))
        with self._changed:
            self._words[slot] = words
            self._changed.notify_all()

    def expect(self, slots: Sequence[int], deadline_s: float | None) -> None:
        """The plan is there, and these slots of it wait; `deadline_s` is the step's. Raises BadPlanError."""
        self._wanted = frozenset(slots)
        self._wait_s = WAIT_S if deadline_s is None else _SHARE_OF_DEADLINE * deadline_s
        for slot in self._words:
            self._check_wanted(slot)

    def end(self, *, epoch_over: bool) -> None:
        """No more will come, since the epoch is over or since its stream sends no more."""
        with self._changed:
            self._ended = self._ended or epoch_over
            self._changed.notify_all()

    def wait(self, *, spent_s: float = 0.0) -> Mapping[int, Words]:
        """By slot, once all are there. Raises EpochOverError, or BadPlanError where they never come or too late.

        `spent_s` is how long the step runs already, which its deadline counts too.
        """
        until = time.monotonic() + self._wait_s - spent_s
        with self._changed:
            while not self.complete:
                if self._ended:
                    raise EpochOverError
                if self._ended is not None:
                    raise self._missing("was sent no more")
                if (left_s := until - time.monotonic()) <= 0:
                    raise self._missing(f"has run for {self._wait_s:g} s")
                self._changed.wait(left_s)
        return self._words

    def _missing(self, what: str) -> BadPlanError:
        slots = tuple(sorted((self._wanted or frozenset()).difference(self._words)))
        return BadPlanError(
            f"step {self._step} {what}, the mask of slot {slots[0]} is missing; every masked row gets its mask", slots
        )

    def _check_wanted(self, slot: int) -> None:
        if self._wanted is not None and slot not in self._wanted:
            raise BadPlanError(f"masks: slot {slot} is not among the masked_slots of step {self._step}", (slot,))


class MaskBook:
    """Masks of an epoch: those of steps that are not done, and the cache. Lives on the event loop."""

    def __init__(self, max_slots: int) -> None:
        self._max_slots = max_slots
        self._steps: dict[int, StepMasks] = {}
        self._cache: dict[int, Words] = {}
        self._ended: bool | None = None

    def put(self, step: int, masks: Sequence[Mask], last_taken: int | None) -> None:
        """Masks arrive for a step, which is under way or one of the next. Raises BadPlanError naming the slot."""
        slots = tuple(mask.slot for mask in masks[:1])
        if last_taken is not None and step <= last_taken and step not in self._steps:
            raise BadPlanError(f"masks: step {step} does not wait for any", slots)
        if last_taken is not None and step > last_taken + MAX_IN_FLIGHT:
            raise BadPlanError(
                f"masks: step {step} is more than {MAX_IN_FLIGHT} after step {last_taken}, the last planned", slots
            )
        if step not in self._steps and len(self._steps) >= 2 * MAX_IN_FLIGHT:
            raise BadPlanError(f"masks: {len(self._steps)} other steps than {step} wait for theirs", slots)
        entry = self._step(step)
        for mask in masks:
            if mask.slot >= self._max_slots:
                raise BadPlanError(f"masks: slot {mask.slot} is past the {self._max_slots} slots", (mask.slot,))
            entry.put(mask.slot, self._resolved(mask))

    def take(self, step: int, slots: Sequence[int], deadline_s: float | None) -> StepMasks | None:
        """What a plan's `slots` wait for; None where none does. Raises BadPlanError for masks that nobody waits for."""
        if stale := [number for number in self._steps if number < step and self._steps[number].is_unplanned]:
            raise BadPlanError(f"masks: step {stale[0]} was never planned, this is step {step}")
        if not slots and step not in self._steps:
            return None
        entry = self._step(step)
        entry.expect(slots, deadline_s)
        return entry

    def done(self, step: int) -> None:
        """The step is over; its masks are forgotten."""
        self._steps.pop(step, None)

    def end(self, *, epoch_over: bool) -> None:
        """No more masks come: steps that wait for one end."""
        self._ended = self._ended or epoch_over
        for entry in self._steps.values():
            entry.end(epoch_over=epoch_over)

    def _step(self, step: int) -> StepMasks:
        if step not in self._steps:
            self._steps[step] = StepMasks(step)
            if self._ended is not None:
                self._steps[step].end(epoch_over=self._ended)
        return self._steps[step]

    def _resolved(self, mask: Mask) -> Words:
        words = mask.words
        if mask.cached_id is not None:
            words = self._cache.get(mask.cached_id)
        if words is None:
            raise BadPlanError(f"masks: slot {mask.slot}: nothing is kept under id {mask.cached_id}", (mask.slot,))
        if mask.cache_as is not None:
            self._cache[mask.cache_as] = words
        return words
