"""What an executor without a model holds: slots, ids, block tables, and a KV pool that a wrong table shows in the ids.

Every rule of `StepPlan` in executor.proto that a scheduler could break is checked and answered by PlanError. What no
rule forbids, a table whose blocks hold something else than the request's tokens, makes wrong ids, as it would in a
model. The next id is a function of all ids of the request and its seed, nothing else:

    h(0) = seed;  h(i + 1) = mix(h(i) + id[i] + 1);  next = mix(h(n)) mod vocab_size

with splitmix64's finalizer as `mix` (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"). So
chunking, preemption, neighbours, cached blocks and epochs cannot change it, and `expected_ids` tells it in advance.

The pool keeps a number a place, as KV a function of all ids up to it:

    kv(i) = mix(kv(i - 1) + id[i] + 1),  kv(-1) = 0

A row reads all places before its own through the table, then writes its own. Where it finds another number than its
ids make (a block freed too early, cached under the wrong digest, copied wrongly or not at all, never computed), what
it writes, and the id it samples, is a hash over what it found instead; `misreads` says where.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from triptych.executor.v1 import executor_pb2

_MASK = (1 << 64) - 1
_EMPTY = np.uint64(_MASK)


class PlanError(Exception):
    """The plan contradicts what the executor holds, or a rule of the contract."""


class NoIdError(Exception):
    """A row may draw no id."""


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
    """One request of the batch; `state` is the hash over its ids so far, `misread` that over wrong KV it has read."""

    seed: int
    prompt_tokens: int
    ids: list[int]
    computed: int
    table: list[int]
    stop_ids: frozenset[int]
    min_tokens: int
    logprobs: int | None
    scored: int | None
    state: int
    misread: int | None = None
    failed: bool = False
    kv: list[int] = field(default_factory=list)

    @property
    def output_position(self) -> int:
        """Of the next id."""
        return len(self.ids) - self.prompt_tokens

    def append(self, token_id: int) -> None:
        self.ids.append(token_id)
        self.state = _mix(self.state + token_id + 1)

    def fail(self, *, samples: bool) -> None:
        """No id comes of a row. Where it was to sample, plans made before that was known count one, so one is kept."""
        self.failed = True
        if samples:
            self.append(0)

    def kv_until(self, end: int) -> list[int]:
        """What the places before `end` hold when all is well."""
        while len(self.kv) < end:
            self.kv.append(_mix((self.kv[-1] if self.kv else 0) + self.ids[len(self.kv)] + 1))
        return self.kv[:end]


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
        return range(first, min(self.end + 1, slot.prompt_tokens)) if slot.scored is not None else range(0)


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
    misreads: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._reusable_from: dict[int, int] = {}
        self._holders: dict[int, list[int]] = {}  # block: slots
        self._kv: npt.NDArray[np.uint64] = np.full((self.num_blocks, self.block_tokens), _EMPTY)

    def take(self, plan: executor_pb2.StepPlan) -> list[Row]:
        """Applies a plan and computes its rows. Raises PlanError."""
        if self.last_step is not None and plan.step != self.last_step + 1:
            raise PlanError(f"step {plan.step} follows {self.last_step}")
        self.last_step = plan.step
        for number in _column(plan.freed_slots):
            self._free(number, plan.step)
        for request in plan.started:
            self._start(request, plan.step)
        if len(plan.groups) > 1:
            raise PlanError(f"{len(plan.groups)} group updates for one KV group")
        for group in plan.groups:
            pairs = _column(group.new_blocks)
            for number, block in zip(pairs[::2], pairs[1::2], strict=True):
                self._hold(number, block)
                self._slot(number).table.append(block)
            self._copy(_column(group.copies))
        forced = _column(plan.forced_ids)
        for number, token_id in zip(forced[::2], forced[1::2], strict=True):
            if token_id >= self.vocab_size or len(self._slot(number).ids) >= self.context_tokens:
                raise PlanError(f"slot {number}: forced id {token_id} at {len(self._slot(number).ids)}")
            self._slot(number).append(token_id)
        rows = self._compute(plan)
        self._check_masked(_column(plan.masked_slots), rows)
        return rows

    def _check_masked(self, numbers: list[int], rows: list[Row]) -> None:
        sampling = {row.number for row in rows if row.samples}
        if len(set(numbers)) != len(numbers) or not sampling.issuperset(numbers):
            raise PlanError(f"slots {numbers} are masked, {sorted(sampling)} sample")

    @property
    def num_blocks_held(self) -> int:
        """Blocks in tables."""
        return len(self._holders)

    def next_id(self, slot: Slot, allowed: npt.NDArray[np.bool_] | None = None) -> int:
        """What the row samples, before any fault is put in. Stop ids are not drawn before min_tokens.

        Where a mask (`allowed` [vocab_size]) or min_tokens forbids an id, it is the next one that is free. Raises
        NoIdError where there is none.
        """
        token_id = _mix(slot.state if slot.misread is None else slot.misread + slot.seed) % self.vocab_size
        stops = slot.stop_ids if slot.output_position < slot.min_tokens else frozenset[int]()
        for i in range(self.vocab_size):
            candidate = (token_id + i) % self.vocab_size
            if candidate not in stops and (allowed is None or allowed[candidate]):
                return candidate
        raise NoIdError

    def _free(self, number: int, step: int) -> None:
        slot = self._slot(number)
        for block in slot.table:
            self._holders[block].remove(number)
            if not self._holders[block]:
                del self._holders[block]
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
        if not 0 < request.prompt_tokens <= len(ids):
            raise PlanError(f"slot {number}: {len(ids)} ids, {request.prompt_tokens} of the prompt")
        if request.computed_tokens >= len(ids):
            raise PlanError(f"slot {number}: {request.computed_tokens} of {len(ids)} tokens are computed already")
        if max(ids) >= self.vocab_size:
            raise PlanError(f"slot {number}: id {max(ids)} is outside the vocabulary")
        if len(request.block_ids) != 1:
            raise PlanError(f"slot {number}: {len(request.block_ids)} tables for one KV group")
        table = _column(request.block_ids[0])
        if request.computed_tokens > len(table) * self.block_tokens:
            raise PlanError(f"slot {number}: {request.computed_tokens} computed tokens in {len(table)} blocks")
        whole = request.computed_tokens // self.block_tokens  # blocks that it will not write
        for place, block in enumerate(table):
            self._hold(number, block, shared=place < whole)
        state = request.seed & _MASK
        for token_id in ids:
            state = _mix(state + token_id + 1)
        self.slots[number] = Slot(
            seed=request.seed,
            prompt_tokens=request.prompt_tokens,
            ids=ids,
            computed=request.computed_tokens,
            table=table,
            stop_ids=frozenset(_column(request.stop_ids)),
            min_tokens=request.min_tokens,
            logprobs=request.logprobs if request.HasField("logprobs") else None,
            scored=request.prompt_logprobs if request.HasField("prompt_logprobs") else None,
            state=state,
        )

    def _hold(self, number: int, block: int, *, shared: bool = False) -> None:
        self._check_block(block)
        holders = self._holders.setdefault(block, [])
        if number in holders or (holders and not shared):
            raise PlanError(f"block {block} for slot {number} is slot {holders[0]}'s")
        holders.append(number)

    def _check_block(self, block: int) -> None:
        if not 0 < block < self.num_blocks:
            raise PlanError(f"block {block} is outside [1, {self.num_blocks})")

    def _copy(self, pairs: list[int]) -> None:
        """All sources are read before any destination is written."""
        sources, destinations = pairs[::2], pairs[1::2]
        if len(sources) != len(destinations) or len(set(destinations)) != len(destinations):
            raise PlanError(f"copies from {sources} to {destinations}")
        for source, destination in zip(sources, destinations, strict=True):
            self._check_block(source)
            self._check_block(destination)
            if destination not in self._holders or source == destination:
                raise PlanError(f"block {source} is copied to {destination}, a block of no slot, or itself")
        if sources:
            self._kv[destinations] = self._kv[sources]

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
        rows = [self._row(number, count) for number, count in zip(numbers, counts, strict=True)]
        if self.read_back:
            # All read before any writes: what one row computes, another may rely on from the next step on.
            for row in rows:
                self._read_kv(row)
            for row in rows:
                self._write_kv(row)
        return rows

    def _row(self, number: int, count: int) -> Row:
        slot = self._slot(number)
        end = slot.computed + count
        if count < 1 or end > len(slot.ids) or end > self.context_tokens:
            raise PlanError(f"slot {number}: {count} tokens after {slot.computed} of {len(slot.ids)}")
        if end > len(slot.table) * self.block_tokens:
            raise PlanError(f"slot {number}: {end} tokens in {len(slot.table)} blocks of {self.block_tokens}")
        slot.computed = end
        return Row(number, slot, count, end == len(slot.ids), end)

    def _read_kv(self, row: Row) -> None:
        slot, begin = row.slot, row.slot.computed - row.count
        found = self._kv[self._places(slot, 0, begin)]
        wrong = np.flatnonzero(found != np.array(slot.kv_until(begin), dtype=np.uint64))
        slot.misread = None
        if wrong.size:
            self.misreads.append(f"step {self.last_step}: slot {row.number} finds other KV than its own at {wrong[0]}")
            slot.misread = 0
            for number in found.tolist():
                slot.misread = _mix(slot.misread ^ number)

    def _write_kv(self, row: Row) -> None:
        slot, end = row.slot, row.slot.computed
        begin = end - row.count
        for block in slot.table[begin // self.block_tokens : -(-end // self.block_tokens)]:
            if len(self._holders[block]) > 1:
                raise PlanError(f"slot {row.number} writes into block {block}, which slots {self._holders[block]} hold")
        if slot.misread is None:
            written = slot.kv_until(end)[begin:]
        else:
            written = []
            for token_id in slot.ids[begin:end]:
                slot.misread = _mix(slot.misread + token_id + 1)
                written.append(slot.misread)
        self._kv[self._places(slot, begin, end)] = np.array(written, dtype=np.uint64)

    def _places(self, slot: Slot, start: int, end: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        positions = np.arange(start, end)
        return np.array(slot.table, dtype=np.int64)[positions // self.block_tokens], positions % self.block_tokens


def _column(data: bytes) -> list[int]:
    return [int(number) for number in np.frombuffer(data, dtype="<u4")]
