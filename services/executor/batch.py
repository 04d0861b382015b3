"""The persistent batch: what each slot's request is and has, kept between steps so that a plan holds only changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from services.executor.plan import MAX_IN_FLIGHT, BadPlanError, Int64s, Plan, Settings, Started
from services.executor.sampling_columns import SampleRows, SamplingColumns

_NONE = np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class ScoredSpan:
    """Prompt ids in a row, each foretold by the token before it."""

    slot: int
    start: int
    """prompt position of the first"""
    first_token: int
    """where in the step's flat batch the token before the first stands; the others follow"""
    token_ids: Int64s
    """[n]"""
    top: int = 0
    """alternatives wanted of each"""


@dataclass(frozen=True, eq=False)
class StepInputs:
    """The flat batch of one step: all rows' tokens one after the other, nothing padded.

    Rows of slots that failed in an earlier step are left out; `places` says where the others stand in the plan.
    """

    slots: Int64s
    """[rows]"""
    token_ids: Int64s
    """[tokens]"""
    positions: Int64s
    """[tokens]"""
    query_starts: Int64s
    """[rows + 1] where a row's tokens begin"""
    contexts: Int64s
    """[rows] tokens of a row, this step's included"""
    sampling_rows: Int64s
    """[n] rows that reach the end of their slot's ids, and so sample"""
    places: Int64s
    """[rows] their numbers among the plan's rows"""
    failed_slots: Int64s
    """[n] slots of the plan's other rows"""
    scored: tuple[ScoredSpan, ...] = ()
    """prompt ids whose log-probabilities the step's tokens give"""
    masked_rows: Int64s = field(default_factory=_NONE.copy)
    """[n] numbers among sampling_rows of those that wait for a mask"""
    masked_slots: Int64s = field(default_factory=_NONE.copy)
    """[n] their slots"""


@dataclass(eq=False)
class _Columns:
    """A number a slot, small enough to be copied whole: a plan is checked on a copy, which then becomes the state."""

    tokens: Int64s
    """ids known; 0: the slot is not in use"""
    prompt: Int64s
    computed: Int64s
    blocks: Int64s
    """entries of the block table"""
    failed: Int64s
    """1: a row of it has failed, so its ids lack what later rows would compute"""
    reusable_from: Int64s
    """first step that may start a request there"""
    scored: Int64s
    """1 + alternatives where the logprobs of prompt ids are wanted, else 0"""
    drawn: Int64s
    """1 + the place of the id that was sampled here last, which a device that samples has; 0: none was"""

    @classmethod
    def empty(cls, slots: int) -> _Columns:
        return cls(*(np.zeros(slots, np.int64) for _ in fields(cls)))

    def copy(self) -> _Columns:
        return _Columns(*(getattr(self, column.name).copy() for column in fields(self)))


@dataclass(eq=False)
class PersistentBatch:
    """Slot columns, ids, block tables and sampling parameters of every request that runs.

    Not thread-safe: the step thread alone touches it. `num_blocks` counts the null block 0, which no request may hold.
    """

    settings: Settings
    num_blocks: int
    vocab_size: int
    text_vocab_size: int | None = None
    """ids of the tokenizer, where the vocabulary is padded past them: prompts and biases name no others"""
    tables: npt.NDArray[np.int32] = field(init=False)
    """[max_slots, entries] block ids; -1 where there is none"""
    table_changes: Int64s = field(init=False)
    """[n] places in `tables`, flat, that the last plan has filled"""

    def __post_init__(self) -> None:
        slots = self.settings.max_slots
        entries = -(-self.settings.context_tokens // self.settings.block_tokens)
        self.tables = np.full((slots, entries), -1, np.int32)
        # One more than the context: the id sampled at its end, which is never computed.
        self._ids = np.empty((slots, self.settings.context_tokens + 1), np.uint32)
        self.table_changes = _NONE
        self._columns = _Columns.empty(slots)
        self._sampling = SamplingColumns(slots, self.vocab_size)

    def reset(self) -> None:
        """Forgets every request."""
        self._columns = _Columns.empty(self.settings.max_slots)
        self._sampling.clear_all()
        self.tables.fill(-1)

    def in_use(self) -> int:
        """Slots that hold a request."""
        return int(np.count_nonzero(self._columns.tokens))

    def begin(self, plan: Plan) -> StepInputs:
        """Applies a plan and returns what its rows compute. Raises BadPlanError before anything has changed."""
        columns = self._columns.copy()
        self._check_freed(columns, plan)
        for started in plan.started:
            self._check_started(columns, started, plan)
        self._check_new_blocks(columns, plan)
        self._check_copies(plan)
        self._check_forced(columns, plan)
        self._check_rows(columns, plan)
        self._check_masked(columns, plan)
        self._write(plan)
        self._columns = columns
        return self._gather(plan)

    def sample_rows(self, inputs: StepInputs) -> SampleRows:
        """What the sampler sees of the rows that sample, in order."""
        slots = inputs.slots[inputs.sampling_rows]
        columns = self._columns
        return self._sampling.rows(slots, columns.prompt, columns.tokens, self._ids, columns.drawn)

    def append(self, slots: Int64s, token_ids: Int64s) -> None:
        """Appends one sampled id to each of `slots`."""
        self._ids[slots, self._columns.tokens[slots]] = token_ids
        self._columns.tokens[slots] += 1
        self._columns.drawn[slots] = self._columns.tokens[slots]

    def expect(self, slots: Int64s) -> Int64s:
        """Appends to each of `slots` an id that only the device knows yet; returns where they stand, for `settle`."""
        places = self._columns.tokens[slots]
        self.append(slots, np.zeros(len(slots), np.int64))
        return places

    def settle(self, slots: Int64s, places: Int64s, token_ids: Int64s) -> None:
        """Tells the ids that were expected.

        A slot that is free by now holds no other request yet: it is reused only after the result of its last step.
        """
        self._ids[slots, places] = token_ids

    def mark_failed(self, slots: Int64s) -> None:
        """Rows of `slots` have failed in steps whose ids were expected."""
        self._columns.failed[slots[self._columns.tokens[slots] > 0]] = 1

    def drawn_slots(self, inputs: StepInputs) -> Int64s:
        """[tokens] the slot of each token that is the id sampled there last, -1 for all others.

        To be asked between `begin` and what the step appends.
        """
        slots = np.repeat(inputs.slots, np.diff(inputs.query_starts))
        return np.where(inputs.positions == self._columns.drawn[slots] - 1, slots, -1)

    def fail(self, slots: Int64s) -> None:
        """Marks `slots`, whose rows of this step give no id. May be told of one twice.

        Plans made before that was known count on what the rows would have given: one id of each that has reached the
        end of its ids, none of a prefill that goes on. So that one, an id that nobody reads, is kept.
        """
        if not slots.size:
            return
        columns = self._columns
        columns.failed[slots] = 1
        slots = slots[columns.computed[slots] == columns.tokens[slots]]
        self.append(slots, np.zeros(len(slots), np.int64))

    def _check_freed(self, columns: _Columns, plan: Plan) -> None:
        if not plan.freed_slots.size:
            return
        freed = self._slots(plan.freed_slots, "freed_slots")
        if idle := freed[columns.tokens[freed] == 0].tolist():
            raise BadPlanError(f"freed_slots names slot {idle[0]}, which is not in use", (idle[0],))
        for column in fields(columns):
            getattr(columns, column.name)[freed] = 0
        columns.reusable_from[freed] = plan.step + MAX_IN_FLIGHT

    def _check_started(self, columns: _Columns, started: Started, plan: Plan) -> None:
        slot, tokens = started.slot, len(started.token_ids)
        if slot >= self.settings.max_slots:
            raise BadPlanError(f"started: slot {slot} is past the {self.settings.max_slots} slots", (slot,))
        if columns.tokens[slot]:
            raise BadPlanError(f"started: slot {slot} is in use", (slot,))
        if plan.step < (first := columns.reusable_from[slot]):
            raise BadPlanError(
                f"started: slot {slot} was freed by step {first - MAX_IN_FLIGHT} and is reusable from step {first}"
                f" on, this is step {plan.step}",
                (slot,),
            )
        if not 1 <= started.prompt_tokens <= tokens <= self.settings.context_tokens:
            raise BadPlanError(
                f"started: slot {slot} has {tokens} ids, {started.prompt_tokens} of them prompt;"
                f" needed: 1 <= prompt <= ids <= {self.settings.context_tokens}",
                (slot,),
            )
        if started.computed_tokens >= tokens:
            raise BadPlanError(
                f"started: slot {slot} has computed {started.computed_tokens} of {tokens} tokens", (slot,)
            )
        if (top := int(started.token_ids.max())) >= self.vocab_size:
            raise BadPlanError(f"started: slot {slot} holds id {top}, the vocabulary has {self.vocab_size}", (slot,))
        try:
            started.sampling.check(self.vocab_size)
        except ValueError as error:
            raise BadPlanError(f"started: slot {slot}: {error}", (slot,)) from error
        self._check_named(started)
        self._check_blocks(started.block_ids, "started.block_ids")
        if len(started.block_ids) > self.tables.shape[1]:
            raise BadPlanError(f"started: slot {slot} has more blocks than the context fills", (slot,))
        if started.computed_tokens > len(started.block_ids) * self.settings.block_tokens:
            raise BadPlanError(
                f"started: slot {slot} has computed {started.computed_tokens} tokens, its {len(started.block_ids)}"
                f" blocks hold {self.settings.block_tokens} each",
                (slot,),
            )
        columns.tokens[slot], columns.prompt[slot] = tokens, started.prompt_tokens
        columns.computed[slot], columns.blocks[slot] = started.computed_tokens, len(started.block_ids)
        columns.scored[slot] = 0 if started.scored is None else 1 + started.scored

    def _check_named(self, started: Started) -> None:
        """Ids that a caller chose; an id that was sampled may be any of the vocabulary."""
        limit = self.vocab_size if self.text_vocab_size is None else min(self.vocab_size, self.text_vocab_size)
        prompt = int(started.token_ids[: started.prompt_tokens].max())
        sampling = started.sampling
        biased = max((token for token, _ in sampling.logit_bias), default=0)
        allowed, banned = max(sampling.allowed_ids, default=0), max(sampling.banned_ids, default=0)
        named = {"prompt": prompt, "logit_bias": biased, "allowed_token_ids": allowed, "banned_token_ids": banned}
        for what, top in named.items():
            if top >= limit:
                raise BadPlanError(
                    f"started: slot {started.slot}: {what} holds id {top}, the tokenizer has {limit}", (started.slot,)
                )

    def _check_new_blocks(self, columns: _Columns, plan: Plan) -> None:
        if not plan.new_blocks.size:
            return
        slots, blocks = plan.new_blocks[:, 0], plan.new_blocks[:, 1]
        self._check_blocks(blocks, "new_blocks")
        if slots.size and slots.max() >= self.settings.max_slots:
            raise BadPlanError(f"new_blocks: slot {slots.max()} is past the {self.settings.max_slots} slots")
        if idle := slots[columns.tokens[slots] == 0].tolist():
            raise BadPlanError(f"new_blocks names slot {idle[0]}, which is not in use", (idle[0],))
        np.add.at(columns.blocks, slots, 1)
        if full := np.flatnonzero(columns.blocks > self.tables.shape[1]).tolist():
            raise BadPlanError(f"new_blocks gives slot {full[0]} more blocks than the context fills", (full[0],))

    def _check_copies(self, plan: Plan) -> None:
        if not plan.copies.size:
            return
        sources, destinations = plan.copies[:, 0], plan.copies[:, 1]
        self._check_blocks(sources, "copies: source")
        self._check_blocks(destinations, "copies: destination")
        if len(np.unique(destinations)) != len(destinations):
            raise BadPlanError("copies names a destination twice")
        if same := sources[sources == destinations].tolist():
            raise BadPlanError(f"copies: block {same[0]} is to be copied onto itself")
        stay = np.flatnonzero(self._columns.tokens)
        tables = self.tables[stay[~np.isin(stay, plan.freed_slots)]]
        held: list[npt.NDArray[Any]] = [tables.ravel(), plan.new_blocks[:, 1]]
        held += [started.block_ids for started in plan.started]
        if astray := destinations[~np.isin(destinations, np.concatenate(held))].tolist():
            raise BadPlanError(f"copies: destination {astray[0]} is a block of no slot")

    def _check_forced(self, columns: _Columns, plan: Plan) -> None:
        """Checks the ids that are appended instead of drawn, and counts them."""
        if not plan.forced_ids.size:
            return
        slots, ids = plan.forced_ids[:, 0], plan.forced_ids[:, 1]
        if slots.max() >= self.settings.max_slots:
            raise BadPlanError(f"forced_ids: slot {slots.max()} is past the {self.settings.max_slots} slots")
        if ids.max() >= self.vocab_size:
            raise BadPlanError(f"forced_ids holds id {ids.max()}, the vocabulary has {self.vocab_size}")
        if idle := slots[columns.tokens[slots] == 0].tolist():
            raise BadPlanError(f"forced_ids names slot {idle[0]}, which is not in use", (idle[0],))
        np.add.at(columns.tokens, slots, 1)
        if at := slots[columns.tokens[slots] > self.settings.context_tokens].tolist():
            raise BadPlanError(
                f"forced_ids: slot {at[0]} goes past the {self.settings.context_tokens} tokens of context", (at[0],)
            )

    def _check_rows(self, columns: _Columns, plan: Plan) -> None:
        """Checks the rows and moves their computed counts."""
        slots, counts = self._slots(plan.slots, "slots"), plan.token_counts
        computed = columns.computed[slots]
        total = int(counts.sum())
        if total > self.settings.max_step_tokens:
            raise BadPlanError(f"the step has {total} tokens, at most {self.settings.max_step_tokens} were agreed")
        if plan.computed_tokens is not None and plan.computed_tokens != computed.sum():
            raise BadPlanError(f"computed_tokens is {plan.computed_tokens}, the rows have {computed.sum()} here")
        wrong = (counts < 1) | (counts > columns.tokens[slots] - computed)
        if at := slots[wrong].tolist():
            slot, count = at[0], int(counts[wrong][0])
            raise BadPlanError(
                f"slot {slot} cannot compute {count} tokens: it has computed {columns.computed[slot]} of its"
                f" {columns.tokens[slot]} ids",
                tuple(at),
            )
        after = computed + counts
        if at := slots[after > self.settings.context_tokens].tolist():
            raise BadPlanError(
                f"slot {at[0]} goes past the {self.settings.context_tokens} tokens of context", tuple(at)
            )
        if at := slots[after > columns.blocks[slots] * self.settings.block_tokens].tolist():
            raise BadPlanError(
                f"slot {at[0]} has {columns.blocks[at[0]]} blocks of {self.settings.block_tokens} tokens, too few",
                (at[0],),
            )
        columns.computed[slots] = after

    def _check_masked(self, columns: _Columns, plan: Plan) -> None:
        if not plan.masked_slots.size:
            return
        masked = self._slots(plan.masked_slots, "masked_slots")
        if astray := masked[~np.isin(masked, plan.slots)].tolist():
            raise BadPlanError(f"masked_slots names slot {astray[0]}, which has no row in the step", (astray[0],))
        if early := masked[columns.computed[masked] < columns.tokens[masked]].tolist():
            raise BadPlanError(
                f"masked_slots names slot {early[0]}, which does not sample: it has computed"
                f" {columns.computed[early[0]]} of {columns.tokens[early[0]]} ids",
                (early[0],),
            )

    def _slots(self, slots: Int64s, what: str) -> Int64s:
        if slots.size and slots.max() >= self.settings.max_slots:
            raise BadPlanError(f"{what}: slot {slots.max()} is past the {self.settings.max_slots} slots")
        if len(slots) > 1 and len(np.unique(slots)) != len(slots):
            raise BadPlanError(f"{what} names a slot twice")
        return slots

    def _check_blocks(self, blocks: Int64s, what: str) -> None:
        if wrong := blocks[(blocks < 1) | (blocks >= self.num_blocks)].tolist():
            raise BadPlanError(f"{what}: block {wrong[0]} is not in [1, {self.num_blocks})")

    def _write(self, plan: Plan) -> None:
        """Writes ids, tables and parameters; the columns of before still stand, but for the started."""
        self._sampling.clear(plan.freed_slots)
        self.tables[plan.freed_slots] = -1
        filled = self._columns.blocks.copy()
        entries = self.tables.shape[1]
        changes = []
        for started in plan.started:
            slot = started.slot
            self._ids[slot, : len(started.token_ids)] = started.token_ids
            self.tables[slot, : len(started.block_ids)] = started.block_ids
            self._sampling.set(slot, started.sampling)
            filled[slot] = len(started.block_ids)
            changes.append(slot * entries + np.arange(len(started.block_ids)))
        grown = []
        for slot, block in plan.new_blocks.tolist():
            self.tables[slot, filled[slot]] = block
            grown.append(slot * entries + filled[slot])
            filled[slot] += 1
        self.table_changes = np.concatenate([*changes, np.array(grown, np.int64)])
        self._write_forced(plan)

    def _write_forced(self, plan: Plan) -> None:
        if not plan.forced_ids.size:
            return
        known = self._columns.tokens.copy()
        for started in plan.started:
            known[started.slot] = len(started.token_ids)
        for slot, token_id in plan.forced_ids.tolist():
            self._ids[slot, known[slot]] = token_id
            known[slot] += 1

    def _gather(self, plan: Plan) -> StepInputs:
        places = np.flatnonzero(self._columns.failed[plan.slots] == 0)
        slots, counts = plan.slots[places], plan.token_counts[places]
        contexts = self._columns.computed[slots]
        starts = np.zeros(len(slots) + 1, np.int64)
        np.cumsum(counts, out=starts[1:])
        # Row r's i-th token stands at its computed count before the step plus i.
        positions = np.arange(starts[-1]) + np.repeat(contexts - counts - starts[:-1], counts)
        sampling_rows = np.flatnonzero(contexts == self._columns.tokens[slots])
        masked = np.flatnonzero(np.isin(slots[sampling_rows], plan.masked_slots)) if plan.masked_slots.size else _NONE
        return StepInputs(
            slots=slots,
            token_ids=self._ids[np.repeat(slots, counts), positions].astype(np.int64),
            positions=positions,
            query_starts=starts,
            contexts=contexts,
            sampling_rows=sampling_rows,
            places=places,
            failed_slots=np.delete(plan.slots, places),
            scored=tuple(self._scored(slots, counts, contexts, starts)),
            masked_rows=masked,
            masked_slots=slots[sampling_rows[masked]],
        )

    def _scored(self, slots: Int64s, counts: Int64s, contexts: Int64s, starts: Int64s) -> Iterator[ScoredSpan]:
        """A row's token at position p foretells the id at p + 1, also where that is computed in a later step."""
        for row in np.flatnonzero(self._columns.scored[slots]).tolist():
            slot, first = int(slots[row]), int(contexts[row] - counts[row]) + 1
            stop = min(int(contexts[row]) + 1, int(self._columns.prompt[slot]))
            if first < stop:
                token_ids = self._ids[slot, first:stop].astype(np.int64)
                yield ScoredSpan(slot, first, int(starts[row]), token_ids, int(self._columns.scored[slot]) - 1)
