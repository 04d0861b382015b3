"""Sampling parameters of all slots as columns: set when a request starts, picked by slot when rows sample."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.executor.sampling_params import SamplingParams

Int64s = npt.NDArray[np.int64]
Float64s = npt.NDArray[np.float64]

_COLUMNS = np.dtype(
    [
        ("temperature", np.float64),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("repetition_penalty", np.float64),
        ("presence_penalty", np.float64),
        ("frequency_penalty", np.float64),
        ("seed", np.uint64),
        ("min_tokens", np.int64),
        ("logprobs", np.int64),
    ]
)
"""Scalar parameters; top_k is the vocabulary where it is off, logprobs -1 where none are wanted."""


@dataclass(frozen=True, eq=False)
class Entries:
    """Ids that something is to be done with, [n], and whose: `rows` numbers the sampling rows."""

    rows: Int64s
    ids: Int64s
    values: Float64s
    """[n], or empty where an id is all there is to say"""


@dataclass(frozen=True, eq=False)
class History:
    """Ids that were there before, of the rows that penalize them: all of a row's stand together, repeated ones too."""

    rows: Int64s
    ids: Int64s
    in_output: npt.NDArray[np.bool_]
    newest: Int64s
    """numbers of those that are the id which the row has sampled last: a device knows it before the host does"""


_NO_ENTRIES = Entries(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.float64))
_NO_HISTORY = History(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.bool_), np.zeros(0, np.int64))


@dataclass(frozen=True, eq=False)
class SampleRows:
    """What the sampler sees of the rows that sample."""

    columns: npt.NDArray[np.void]
    """[rows] records of _COLUMNS"""
    positions: Int64s
    """[rows] output positions of the draws, from 0"""
    allowed: Entries
    """for a row in it, every other id is banned"""
    banned: Entries
    biased: Entries
    history: History

    def __len__(self) -> int:
        return len(self.positions)


class SamplingColumns:
    """A record a slot, and the slots' lists of ids.

    `vocab_size` is the model's. A slot that is not set holds what it held before; nobody may ask for it.
    """

    def __init__(self, slots: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._columns = np.zeros(slots, _COLUMNS)
        self._place = np.full(slots, -1)
        self._allowed, self._banned, self._stops, self._biased = _Lists(), _Lists(), _Lists(), _Lists()

    def set(self, slot: int, params: SamplingParams) -> None:
        """A request starts in `slot`, which is clear."""
        top_k = params.top_k if 0 < params.top_k < self._vocab_size else self._vocab_size
        self._columns[slot] = (
            params.temperature,
            top_k,
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            params.seed,
            params.min_tokens,
            -1 if params.logprobs is None else params.logprobs,
        )
        self._allowed.add(slot, params.allowed_ids)
        self._banned.add(slot, params.banned_ids)
        self._stops.add(slot, params.stop_ids if params.min_tokens else ())
        self._biased.add(slot, *zip(*params.logit_bias, strict=True))

    def clear(self, slots: Int64s) -> None:
        """The requests in `slots` have ended."""
        for lists in (self._allowed, self._banned, self._stops, self._biased):
            lists.remove(slots)

    def clear_all(self) -> None:
        """No request is left."""
        self._allowed, self._banned, self._stops, self._biased = _Lists(), _Lists(), _Lists(), _Lists()

    def rows(
        self, slots: Int64s, prompts: Int64s, tokens: Int64s, ids: npt.NDArray[np.uint32], drawn: Int64s
    ) -> SampleRows:
        """Of the requests in `slots` [rows], whose prompts and all tokens are counted by slot; `ids` [slots, any];
        `drawn` by slot: 1 + the place of the id that was sampled last, 0 where none was."""
        columns, prompts, tokens = self._columns[slots], prompts[slots], tokens[slots]
        positions = tokens - prompts
        self._place[slots] = np.arange(len(slots))
        rows = SampleRows(
            columns=columns,
            positions=positions,
            allowed=self._allowed.of(self._place),
            banned=_joined(self._stops.early(self._place, positions, columns), self._banned.of(self._place)),
            biased=self._biased.of(self._place),
            history=_history(columns, slots, prompts, tokens, ids, drawn),
        )
        self._place[slots] = -1
        return rows


def _history(
    columns: npt.NDArray[np.void],
    slots: Int64s,
    prompts: Int64s,
    tokens: Int64s,
    ids: npt.NDArray[np.uint32],
    drawn: Int64s,
) -> History:
    """Prompt and output where repetition is penalized, the output alone where only the other two are."""
    repetition = columns["repetition_penalty"] != 1.0
    rows = np.flatnonzero(repetition | (columns["presence_penalty"] != 0.0) | (columns["frequency_penalty"] != 0.0))
    if not len(rows):
        return _NO_HISTORY
    begin = np.where(repetition[rows], 0, prompts[rows])
    counts = tokens[rows] - begin
    which = np.repeat(rows, counts)
    places = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts - begin, counts)
    newest = np.flatnonzero(places == drawn[slots[which]] - 1)
    return History(which, ids[slots[which], places].astype(np.int64), places >= prompts[which], newest)


def _joined(one: Entries, other: Entries) -> Entries:
    if not len(one.rows):
        return other
    return Entries(
        np.concatenate([one.rows, other.rows]), np.concatenate([one.ids, other.ids]), np.zeros(0, np.float64)
    )


class _Lists:
    """Lists of the slots that have one, one after the other."""

    def __init__(self) -> None:
        self._slots, self._ids, self._values = np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.float64)

    def add(self, slot: int, ids: Iterable[int] = (), values: Iterable[float] = ()) -> None:
        added = np.fromiter(ids, np.int64)
        if len(added):
            self._slots = np.concatenate([self._slots, np.full(len(added), slot)])
            self._ids = np.concatenate([self._ids, added])
            self._values = np.concatenate([self._values, np.fromiter(values, np.float64)])

    def remove(self, slots: Int64s) -> None:
        if len(self._slots) and len(slots):
            kept = ~np.isin(self._slots, slots)
            self._values = self._values[kept] if len(self._values) else self._values
            self._slots, self._ids = self._slots[kept], self._ids[kept]

    def of(self, place: Int64s) -> Entries:
        """Of the slots that have a place, by it; `place` is [slots], -1 for the others."""
        if not len(self._slots):
            return _NO_ENTRIES
        rows = place[self._slots]
        kept = rows >= 0
        return Entries(rows[kept], self._ids[kept], self._values[kept] if len(self._values) else self._values)

    def early(self, place: Int64s, positions: Int64s, columns: npt.NDArray[np.void]) -> Entries:
        """`of` the rows that are before their min_tokens."""
        entries = self.of(place)
        if not len(entries.rows):
            return entries
        early = positions[entries.rows] < columns["min_tokens"][entries.rows]
        return Entries(entries.rows[early], entries.ids[early], entries.values)
