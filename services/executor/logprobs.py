"""Log-probabilities by the model's own logits: of one id a row, and of the likeliest ids beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from kernels.cpu import sampling as kernels

LOWEST_LOGPROB = -9999.0
"""Reported where the model itself gives an id no probability: a number that any client can parse."""


@dataclass(frozen=True, eq=False)
class Logprobs:
    """Of n ids; the alternatives of all of them stand one after the other."""

    own: npt.NDArray[np.float32]
    """[n] natural, LOWEST_LOGPROB or more"""
    ranks: npt.NDArray[np.uint32]
    """[n] 1 + the number of ids that the model finds likelier"""
    top_counts: npt.NDArray[np.uint32]
    """[n] alternatives of each"""
    top_ids: npt.NDArray[np.uint32]
    """[sum of top_counts] likeliest first, the lower id first among equals; the id itself where it is one of them"""
    top: npt.NDArray[np.float32]
    """[sum of top_counts] as `own`"""

    @classmethod
    def none(cls) -> Logprobs:
        """Of no ids."""
        return cls.joined(())

    @classmethod
    def of(
        cls, logits: npt.NDArray[np.float32], token_ids: npt.NDArray[np.int64], tops: npt.NDArray[np.int64]
    ) -> Logprobs:
        """By logits [n, vocab], with `tops` [n] alternatives, at most the vocabulary. The softmax is in float64."""
        tops = tops.clip(max=logits.shape[1])
        return cls.chosen(*kernels.score(logits, token_ids, int(tops.max(initial=0))), tops)

    @classmethod
    def chosen(
        cls,
        own: npt.NDArray[np.float64],
        ranks: npt.NDArray[np.int64],
        top_ids: npt.NDArray[np.int64],
        top: npt.NDArray[np.float64],
        tops: npt.NDArray[np.int64],
    ) -> Logprobs:
        """Of each id `tops` [n] of the alternatives [n, most] that were found for it."""
        wanted = np.arange(top.shape[1]) < tops[:, None]
        return cls(
            _told(own), ranks.astype(np.uint32), tops.astype(np.uint32), top_ids[wanted].astype(np.uint32),
            _told(top[wanted]),
        )  # fmt: skip

    @classmethod
    def joined(cls, parts: Sequence[Logprobs]) -> Logprobs:
        """Those of all parts, in order."""
        floats, numbers = np.zeros(0, np.float32), np.zeros(0, np.uint32)
        empty = cls(floats, numbers, numbers, numbers, floats)
        return cls(*(np.concatenate([getattr(p, f.name) for p in (empty, *parts)]) for f in fields(cls)))

    def where(self, kept: npt.NDArray[np.bool_]) -> Logprobs:
        """Those of the ids marked in `kept`, [n]."""
        if kept.all():
            return self
        tops = np.repeat(kept, self.top_counts)
        return Logprobs(self.own[kept], self.ranks[kept], self.top_counts[kept], self.top_ids[tops], self.top[tops])

    def __getitem__(self, span: slice) -> Logprobs:
        kept = np.zeros(len(self.own), np.bool_)
        kept[span] = True
        return self.where(kept)

    def __len__(self) -> int:
        return len(self.own)


def _told(logprobs: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    return np.nan_to_num(logprobs, nan=LOWEST_LOGPROB).clip(min=LOWEST_LOGPROB).astype(np.float32)
