"""What an executor without a model holds: slots, ids, block tables, and a KV pool that keeps token ids.

The pool stores the id computed at each place, so that a row which samples can read its whole history back through its
table: a block given away too early, or a table in the wrong order, is found in the step it happens. Every rule of
`StepPlan` in executor.proto that a scheduler could break is checked and answered by PlanError.

The next id is a function of all ids of the request and its seed, nothing else:

    h(0) = seed;  h(i + 1) = mix(h(i) + id[i] + 1);  next = mix(h(n)) mod vocab_size

with splitmix64's finalizer as `mix` (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"). So
chunking, preemption, neighbours and epochs cannot change it, and `expected_ids` tells it in advance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from triptych.executor.v1 import executor_pb2

_MASK = (1 << 64) - 1
_EMPTY = np.uint32(0xFFFFFFFF)


class PlanError(Exception):
    """The plan contradicts what the executor holds, or a rule of the contract."""


def _mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def expected_ids(prompt: Sequence[int], seed: int, count: int, vocab_size: int) -> list[int]:
    """The first `count` ids that a request with this prompt and seed receives."""
    state = seed & _MASK
    for token_id in prompt:
        state = _mix(state + token_id + 1)
    output: list[int] = []
    for _ in range(count):
        output.append(_mix(state) % vocab_size)
        state = _mix(state + output[-1] + 1)
    return output


def own_logprob(token_id: int) -> tuple[float, int]:
    """Log-probability and rank told for an id, sampled or of the prompt: made up, but of the id alone."""
    return -0.25 * (token_id % 13) - 0.125, token_id % 7 + 1


@dataclass
class Slot:
    """One request of the batch; `state` is the hash over its ids so far."""

    seed: int
    prompt_tokens: int
    ids: list[int]
    computed: int
    table: list[int]
    stop_ids: frozenset[int]
    min_tokens: int
    logprobs: bool
    is_scored: bool
    state: int

    @property
    def output_position(self) -> int:
        """Of the next id."""
        return len(self.ids) - self.prompt_tokens

    def append(self, token_id: int) -> None:
        self.ids.append(token_id)
        self.state = _mix(self.state + token_id + 1)


@dataclass(frozen=True)
class Row:
    """One row of a step: the slot's number, tokens computed, and whether it reached the end of its ids."""

    number: int
    slot: Slot
    count: int
    samples: bool
    end: int
    """Tokens of the slot that are computed after it."""

    @property
    def scored(self) -> range:
        """Prompt positions whose logprobs the row tells: those that its computed tokens foretell."""
        slot = self.slot
        first = self.end - self.count + 1
        return range(first, min(self.end + 1, slot.prompt_tokens)) if slot.is_scored else range(0)


@dataclass
class Batch:
    """One epoch's state."""

    vocab_size: int
    num_blocks: int
    block_tokens: int
    max_slots: int
    max_step_tokens: int
    context_tokens: int
    max_in_flight: int = 1
    read_back: bool = True
    slots: dict[int, Slot] = field(default_factory=dict)
    last_step: int | None = None

    def __post_init__(self) -> None:
        self._reusable_from: dict[int, int] = {}
        self._owner: dict[int, int] = {}  # block: slot
        self._kv: npt.NDArray[np.uint32] = np.full(self.num_blocks * self.block_tokens, _EMPTY)

    def take(self, plan: executor_pb2.StepPlan) -> list[Row]:
        """Applies a plan and computes its rows. Raises PlanError."""
        if self.last_step is not None and plan.step != self.last_step + 1:
            raise PlanError(f"step {plan.step} follows {self.last_step}")
        self.last_step = plan.step
        for name in ("forced_ids", "masked_slots"):
            if getattr(plan, name):
                raise PlanError(f"{name} is not served")
        for number in _column(plan.freed_slots):
            self._free(number, plan.step)
        for request in plan.started:
            self._start(request, plan.step)
        if len(plan.groups) > 1:
            raise PlanError(f"{len(plan.groups)} group updates for one KV group")
        for group in plan.groups:
            if group.copies:
                raise PlanError("copies are not served")
            pairs = _column(group.new_blocks)
            for number, block in zip(pairs[::2], pairs[1::2], strict=True):
                self._own(number, block)
                self._slot(number).table.append(block)
        return self._compute(plan)

    @property
    def num_blocks_held(self) -> int:
        """Blocks in tables."""
        return len(self._owner)

    def next_id(self, slot: Slot) -> int:
        """What the row samples, before any fault is put in. Stop ids are not drawn before min_tokens."""
        token_id = _mix(slot.state) % self.vocab_size
        if slot.output_position < slot.min_tokens:
            while token_id in slot.stop_ids:
                token_id = (token_id + 1) % self.vocab_size
        return token_id

    def _free(self, number: int, step: int) -> None:
        slot = self._slot(number)
        for block in slot.table:
            del self._owner[block]
        del self.slots[number]
        self._reusable_from[number] = step + self.max_in_flight

    def _start(self, request: executor_pb2.NewRequest, step: int) -> None:
        number, ids = request.slot, _column(request.token_ids)
        if not 0 <= number < self.max_slots:
            raise PlanError(f"slot {number} is outside [0, {self.max_slots})")
        if number in self.slots:
            raise PlanError(f"slot {number} is in use")
        if step < self._reusable_from.get(number, 0):
            raise PlanError(f"slot {number} is reusable from step {self._reusable_from[number]}, not {step}")
        if not 0 < request.prompt_tokens <= len(ids) or request.computed_tokens:
            raise PlanError(f"slot {number}: {len(ids)} ids, {request.prompt_tokens} of the prompt")
        if max(ids) >= self.vocab_size:
            raise PlanError(f"slot {number}: id {max(ids)} is outside the vocabulary")
        if len(request.block_ids) != 1:
            raise PlanError(f"slot {number}: {len(request.block_ids)} tables for one KV group")
        table = _column(request.block_ids[0])
        for block in table:
            self._own(number, block)
        state = request.seed & _MASK
        for token_id in ids:
            state = _mix(state + token_id + 1)
        self.slots[number] = Slot(
            seed=request.seed,
            prompt_tokens=request.prompt_tokens,
            ids=ids,
            computed=0,
            table=table,
            stop_ids=frozenset(_column(request.stop_ids)),
            min_tokens=request.min_tokens,
            logprobs=request.HasField("logprobs"),
            is_scored=request.HasField("prompt_logprobs"),
            state=state,
        )

    def _own(self, number: int, block: int) -> None:
        if not 0 < block < self.num_blocks:
            raise PlanError(f"block {block} is outside [1, {self.num_blocks})")
        if block in self._owner:
            raise PlanError(f"block {block} for slot {number} is slot {self._owner[block]}'s")
        self._owner[block] = number

    def _slot(self, number: int) -> Slot:
        if number not in self.slots:
            raise PlanError(f"slot {number} is not in use")
        return self.slots[number]

    def _compute(self, plan: executor_pb2.StepPlan) -> list[Row]:
        numbers = _column(plan.slots)
        tail = _column(plan.token_counts)
        counts = [1] * (len(numbers) - len(tail)) + tail
        if len(counts) != len(numbers) or len(set(numbers)) != len(numbers):
            raise PlanError(f"{len(numbers)} rows of {len(set(numbers))} slots, {len(tail)} counts")
        if sum(counts) > self.max_step_tokens:
            raise PlanError(f"{sum(counts)} tokens in a step, the limit is {self.max_step_tokens}")
        if sorted(counts, key=lambda count: count != 1) != counts:
            raise PlanError("rows that compute one token do not come first")
        computed = sum(self._slot(number).computed for number in numbers)
        if plan.HasField("computed_tokens") and plan.computed_tokens != computed:
            raise PlanError(f"computed_tokens is {plan.computed_tokens}, the rows have {computed}")
        return [self._row(number, count) for number, count in zip(numbers, counts, strict=True)]

    def _row(self, number: int, count: int) -> Row:
        slot = self._slot(number)
        end = slot.computed + count
        if count < 1 or end > len(slot.ids) or end > self.context_tokens:
            raise PlanError(f"slot {number}: {count} tokens after {slot.computed} of {len(slot.ids)}")
        if end > len(slot.table) * self.block_tokens:
            raise PlanError(f"slot {number}: {end} tokens in {len(slot.table)} blocks of {self.block_tokens}")
        self._kv[self._places(slot, slot.computed, end)] = slot.ids[slot.computed : end]
        slot.computed = end
        samples = end == len(slot.ids)
        if samples and self.read_back:
            kept = self._kv[self._places(slot, 0, end)]
            if not np.array_equal(kept, np.array(slot.ids, dtype=np.uint32)):
                raise PlanError(f"slot {number}: its blocks {slot.table} do not hold its ids any more")
        return Row(number, slot, count, samples, end)

    def _places(self, slot: Slot, start: int, end: int) -> npt.NDArray[np.int64]:
        positions = np.arange(start, end)
        table = np.array(slot.table, dtype=np.int64)
        return table[positions // self.block_tokens] * self.block_tokens + positions % self.block_tokens


def _column(data: bytes) -> list[int]:
    return [int(number) for number in np.frombuffer(data, dtype="<u4")]
