"""Draws the next id of each row from its logits.

In this order: stop ids are banned up to min_tokens; logit bias; repetition, presence and frequency penalty;
temperature; top-k, top-p, min-p. Each filter works on what those before it left. All three keep a first part of the ids
in order of falling probability, the lower id first among equals, so a row comes down to how many ids are kept.

A row's result is a function of that row alone, to the bit: rows that need the same work share tensors, but only
operations whose result for a row does not depend on the other rows (or on the number of threads) are used. That rules
out torch.sum over floats and torch.exp, whose last bits depend on how the work is split; softmax over the last
dimension, cumsum and sort go row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from services.executor import noise
from services.executor.sampling_params import SamplingParams

__all__ = ["LOWEST_LOGPROB", "SampleRow", "Sampled", "Sampler", "SamplingParams"]

LOWEST_LOGPROB = -9999.0
"""Reported where the model itself gives an id no probability: a number that any client can parse."""

_WIDTHS = (256, 4096)
"""Ids put in order at first, then for the rows that keep more, and at last all of them."""


@dataclass(frozen=True)
class SampleRow:
    """What the sampler sees of one row."""

    params: SamplingParams
    prompt_ids: NDArray[np.uint32]
    output_ids: NDArray[np.uint32]
    """output so far; its length is the output position of the draw"""

    @property
    def position(self) -> int:
        """Output position of the draw, from 0."""
        return len(self.output_ids)


@dataclass(frozen=True)
class Sampled:
    """One id a row."""

    token_ids: NDArray[np.int64]
    failed: NDArray[np.bool_]
    """no id could be drawn (NaN or +inf logits, or every id banned); the row's other values mean nothing"""
    logprobs: NDArray[np.float32]
    """natural, of the model's own logits; only where params.logprobs"""
    ranks: NDArray[np.uint32]
    """1 + the number of ids that the model finds likelier; only where params.logprobs"""


class Sampler:
    """Draws from a vocabulary of `vocab_size` ids; columns past it (a padded lm_head) are never drawn."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> Sampled:
        """Logits [rows, vocab_size or more], any float dtype, are read, never written."""
        if logits.ndim != 2 or len(logits) != len(rows) or logits.shape[1] < self._vocab_size:
            raise ValueError(f"logits are {tuple(logits.shape)}, wanted ({len(rows)}, {self._vocab_size} or more)")
        own = logits[:, : self._vocab_size].float()
        best, token_ids = own.max(dim=-1)  # NaN wins
        failed = ~best.isfinite()
        scores = self._adjust(own, rows, token_ids, failed)
        self._draw(own, scores, rows, token_ids, failed)
        logprobs, ranks = self._logprobs(own, rows, token_ids)
        return Sampled(token_ids.cpu().numpy(), failed.cpu().numpy(), logprobs, ranks)

    def _adjust(
        self, own: torch.Tensor, rows: Sequence[SampleRow], token_ids: torch.Tensor, failed: torch.Tensor
    ) -> dict[int, torch.Tensor]:
        """Logits after bans, bias and penalties, [vocab] float64, of the rows that have any; takes their likeliest."""
        which = [i for i, row in enumerate(rows) if row.params.adjusts_at(row.position)]
        if not which:
            return {}
        changed = [rows[i] for i in which]
        scores = own[which].double()
        _ban(scores, changed)
        _bias(scores, changed)
        _penalize(scores, changed)
        best, token_ids[which] = scores.max(dim=-1)
        failed[which] |= ~best.isfinite()
        return dict(zip(which, scores, strict=True))

    def _draw(
        self,
        own: torch.Tensor,
        adjusted: dict[int, torch.Tensor],
        rows: Sequence[SampleRow],
        token_ids: torch.Tensor,
        failed: torch.Tensor,
    ) -> None:
        """Draws at random for the rows that are not greedy."""
        lost = failed.tolist()
        which = [i for i, row in enumerate(rows) if not row.params.is_greedy and not lost[i]]
        if not which:
            return
        scores = own[which].double()
        for at, i in enumerate(which):
            if i in adjusted:
                scores[at] = adjusted[i]
        params = [rows[i].params for i in which]
        probabilities = _probabilities(scores, params)
        uniform = noise.uniform(
            np.array([p.seed for p in params], dtype=np.uint64),
            np.array([rows[i].position for i in which], dtype=np.uint64),
        )
        token_ids[which] = _inverse_cdf(probabilities, torch.from_numpy(uniform).to(own.device))

    def _logprobs(
        self, own: torch.Tensor, rows: Sequence[SampleRow], token_ids: torch.Tensor
    ) -> tuple[NDArray[np.float32], NDArray[np.uint32]]:
        logprobs, ranks = np.zeros(len(rows), np.float32), np.zeros(len(rows), np.uint32)
        which = [i for i, row in enumerate(rows) if row.params.logprobs]
        if which:
            logprobs[which], ranks[which] = own_logprobs(own[which], token_ids[which])
        return logprobs, ranks


def own_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> tuple[NDArray[np.float32], NDArray[np.uint32]]:
    """Natural log-probability and rank (from 1) of one id a row, by logits [rows, vocab] as they are.

    The softmax is taken in float64. An id that the logits give no probability has LOWEST_LOGPROB.
    """
    which = token_ids.unsqueeze(-1)
    own = logits.double().log_softmax(dim=-1).gather(-1, which).squeeze(-1)
    own = own.nan_to_num(nan=LOWEST_LOGPROB).clamp(min=LOWEST_LOGPROB)
    ranks = (logits > logits.gather(-1, which)).sum(dim=-1).add(1)
    return own.cpu().numpy().astype(np.float32), ranks.cpu().numpy().astype(np.uint32)


def _probabilities(scores: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """What temperature and filters make of scores, [rows, vocab] float64; 0 for an id that is cut off."""
    probabilities = (scores / _column([p.temperature for p in params], scores)).softmax(dim=-1)
    cut = [at for at, p in enumerate(params) if p.filters(scores.shape[1])]
    if cut:
        kept = probabilities[cut]
        probabilities[cut] = kept.where(_kept(kept, [params[at] for at in cut]), 0.0)
    return probabilities


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    """[rows, 1], float64 on the device of `like`."""
    return torch.tensor(values, dtype=torch.float64, device=like.device).unsqueeze(-1)


def _ban(scores: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    at = [(i, token) for i, row in enumerate(rows) for token in row.params.bans_at(row.position)]
    if at:
        which, ids = torch.tensor(at, device=scores.device).T
        scores[which, ids] = -torch.inf


def _bias(scores: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    entries = [(i, token, bias) for i, row in enumerate(rows) for token, bias in row.params.logit_bias]
    if entries:
        at = torch.tensor([entry[:2] for entry in entries], device=scores.device).T
        scores[at[0], at[1]] += torch.tensor([bias for *_, bias in entries], dtype=scores.dtype, device=scores.device)


def _penalize(scores: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    """Repetition counts prompt and output (Keskar et al. 2019, CTRL, section 4.1), the other two the output alone."""
    which = [i for i, row in enumerate(rows) if row.params.penalizes]
    if not which:
        return
    penalized = [rows[i] for i in which]
    params = [row.params for row in penalized]
    in_output = _counts(scores, [row.output_ids for row in penalized])
    seen = (in_output + _counts(scores, [row.prompt_ids for row in penalized])) > 0
    repetition = _column([p.repetition_penalty for p in params], scores)
    before = scores[which]
    after = before.where(~seen, torch.where(before > 0, before / repetition, before * repetition))
    after = after - _column([p.presence_penalty for p in params], scores) * (in_output > 0)
    scores[which] = after - _column([p.frequency_penalty for p in params], scores) * in_output


def _counts(scores: torch.Tensor, ids: Sequence[NDArray[np.uint32]]) -> torch.Tensor:
    """How often each id occurs in each row's ids, [rows, vocab] int32. An id past the vocabulary raises IndexError."""
    counts = torch.zeros(len(ids), scores.shape[1], dtype=torch.int32, device=scores.device)
    which = torch.from_numpy(np.repeat(np.arange(len(ids)), [len(row) for row in ids])).to(scores.device)
    flat = torch.from_numpy(np.concatenate(ids).astype(np.int64)).to(scores.device)
    return counts.index_put_((which, flat), torch.ones_like(flat, dtype=torch.int32), accumulate=True)


def _kept(probabilities: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Which ids top-k, top-p and min-p leave, [rows, vocab] bool."""
    vocab_size = probabilities.shape[1]
    limits = _Limits(
        torch.tensor([p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]).to(probabilities.device),
        torch.tensor([p.top_p for p in params], dtype=torch.float64, device=probabilities.device),
        torch.tensor([p.min_p for p in params], dtype=torch.float64, device=probabilities.device),
    )
    count = torch.empty(len(params), dtype=torch.int64, device=probabilities.device)
    least = torch.empty_like(probabilities[:, 0])
    pending = torch.arange(len(params), device=probabilities.device)
    for width in (*(width for width in _WIDTHS if width < vocab_size), vocab_size):
        falling = _falling(probabilities[pending], width)
        count[pending], settled = limits.rows(pending).count(falling, vocab_size)
        least[pending] = falling.gather(-1, count[pending].clamp(max=width).unsqueeze(-1) - 1).squeeze(-1)
        pending = pending[~settled]
        if not len(pending):
            break
    above = probabilities > least.unsqueeze(-1)
    equal = probabilities == least.unsqueeze(-1)
    room = count - above.sum(dim=-1)
    if (equal.sum(dim=-1) > room).any():
        equal &= equal.cumsum(dim=-1) <= room.unsqueeze(-1)
    return above | equal


def _falling(probabilities: torch.Tensor, width: int) -> torch.Tensor:
    """The `width` largest of each row, largest first."""
    if width == probabilities.shape[1]:
        return probabilities.sort(dim=-1, descending=True).values
    return probabilities.topk(width).values


@dataclass(frozen=True)
class _Limits:
    """Columns, [rows]; a filter that is off has top_k = vocabulary, top_p = 1, min_p = 0."""

    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor

    def rows(self, which: torch.Tensor) -> _Limits:
        return _Limits(self.top_k[which], self.top_p[which], self.min_p[which])

    def count(self, falling: torch.Tensor, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """How many ids are kept, [rows], from their largest probabilities in falling order, [rows, width].

        Also whether that is settled, [rows] bool: always when width is the vocabulary, else where the answer lies
        within the width.
        """
        width = falling.shape[1]
        sums = falling.cumsum(dim=-1)
        left = sums.gather(-1, self.top_k.clamp(max=width).unsqueeze(-1) - 1).squeeze(-1)
        left = left.where(self.top_k < vocab_size, 1.0)
        by_top_p = (sums < (self.top_p * left).unsqueeze(-1)).sum(dim=-1) + 1
        by_min_p = (falling >= (self.min_p * falling[:, 0]).unsqueeze(-1)).sum(dim=-1)
        by_min_p = by_min_p.where(by_min_p < width, vocab_size)
        count = self.top_k.minimum(by_min_p).minimum(by_top_p.where(self.top_p < 1.0, vocab_size))
        if width == vocab_size:
            return count.clamp(min=1, max=vocab_size), torch.ones_like(count, dtype=torch.bool)
        known = (self.top_k <= width) | (self.top_k == vocab_size) | (self.top_p >= 1.0)
        return count.clamp(min=1), known & (count <= width)


def _inverse_cdf(probabilities: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """First id, [rows], whose summed probability passes uniform * sum. Rows need not sum to 1, only to more than 0.

    There always is one: uniform is at most 1 - 2**-53, whose product with a normal float64 is below that float64. An
    id of probability 0 adds nothing to the sum, so it is never the first.
    """
    sums = probabilities.cumsum(dim=-1)
    return torch.searchsorted(sums, uniform.unsqueeze(-1) * sums[:, -1:], right=True).squeeze(-1)
