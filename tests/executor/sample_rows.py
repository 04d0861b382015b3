"""Sampling rows as tests write them: one object a row, gathered through the columns that the executor keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from services.executor.sampler import Masks, Sampled, Sampler, SamplingParams
from services.executor.sampling_columns import Entries, History, SampleRows, SamplingColumns


@dataclass(frozen=True)
class SampleRow:
    """A request about to have its next id drawn; `allowed_by_mask` are the ids of its mask, None without one."""

    params: SamplingParams
    prompt_ids: NDArray[np.uint32]
    output_ids: NDArray[np.uint32]
    allowed_by_mask: tuple[int, ...] | None = None

    @property
    def position(self) -> int:
        return len(self.output_ids)


def row(
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    mask: Sequence[int] | None = None,
) -> SampleRow:
    return SampleRow(
        params, np.array(prompt, np.uint32), np.array(output, np.uint32), None if mask is None else tuple(mask)
    )


def gathered(rows: Sequence[SampleRow], vocab_size: int) -> SampleRows:
    """The rows in slots of their own."""
    columns = SamplingColumns(len(rows), vocab_size)
    longest = max((len(one.prompt_ids) + one.position for one in rows), default=0)
    ids = np.zeros((len(rows), longest), np.uint32)
    for slot, one in enumerate(rows):
        columns.set(slot, one.params)
        whole = np.concatenate([one.prompt_ids, one.output_ids])
        ids[slot, : len(whole)] = whole
    prompts = np.array([len(one.prompt_ids) for one in rows], np.int64)
    tokens = prompts + np.array([one.position for one in rows], np.int64)
    # As if each had sampled the last of its output.
    drawn = np.where(tokens > prompts, tokens, 0)
    return columns.rows(np.arange(len(rows)), prompts, tokens, ids, drawn)


def masks(rows: Sequence[SampleRow], vocab_size: int) -> Masks | None:
    """Those of the rows that have one."""
    which = [i for i, one in enumerate(rows) if one.allowed_by_mask is not None]
    if not which:
        return None
    bits = np.zeros((len(which), -(-vocab_size // 32) * 32), np.bool_)
    for at, i in enumerate(which):
        bits[at, list(rows[i].allowed_by_mask or ())] = True
    words = np.packbits(bits, axis=1, bitorder="little").view("<u4")
    return Masks(np.array(which), words)


def sample(logits: torch.Tensor, rows: Sequence[SampleRow], vocab_size: int | None = None) -> Sampled:
    size = logits.shape[1] if vocab_size is None else vocab_size
    return Sampler(size).sample(logits, gathered(rows, size), masks(rows, size))


def repeated(one: SampleRow, vocab_size: int, times: int) -> tuple[SampleRows, Masks | None]:
    """The same row many times over, each with a seed of its own."""
    single, mask = gathered([one], vocab_size), masks([one], vocab_size)
    columns = np.repeat(single.columns, times)
    columns["seed"] = np.arange(times)
    history = single.history
    return replace(
        single,
        columns=columns,
        positions=np.repeat(single.positions, times),
        allowed=_entries(single.allowed, times),
        banned=_entries(single.banned, times),
        biased=_entries(single.biased, times),
        history=History(
            _rows(history.ids, times),
            np.tile(history.ids, times),
            np.tile(history.in_output, times),
            np.zeros(0, np.int64),
        ),
    ), mask and Masks(np.arange(times), np.repeat(mask.words, times, axis=0))


def _entries(entries: Entries, times: int) -> Entries:
    return Entries(_rows(entries.ids, times), np.tile(entries.ids, times), np.tile(entries.values, times))


def _rows(ids: NDArray[np.int64], times: int) -> NDArray[np.int64]:
    return np.repeat(np.arange(times), len(ids))
