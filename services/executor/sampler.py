"""Draws the next id of each row from its logits.

The order of operations, each working on what those before it left:

 1. bans: what a mask, allowed_token_ids, banned_token_ids, and up to min_tokens the stop ids rule out has no
    probability; no later step gives any back
 2. logit_bias is added; -inf bans too
 3. repetition_penalty, of ids in prompt or output: a positive score is divided by it, another one multiplied (Keskar
    et al. 2019, CTRL, section 4.1)
 4. presence_penalty, of ids in the output, is subtracted once
 5. frequency_penalty is subtracted for each time an id stands in the output
 6. temperature divides; below GREEDY_BELOW the likeliest id is taken instead, the lower one of equals, and nothing
    that follows matters
 7. top_k keeps the k likeliest
 8. top_p keeps the fewest whose probabilities, among those that top_k left, reach it (Holtzman et al. 2020, "The
    Curious Case of Neural Text Degeneration", section 3.1)
 9. min_p drops what is less likely than this share of the likeliest (Nguyen et al. 2024, "Turning Up the Heat")
10. one id is drawn: the first, by number, whose summed probability passes the noise of (seed, output position)

The filters 7 to 9 keep a first part of the ids in order of falling score, the lower id first among equals, and at least
one. Scores are float64 from 1 on. A row that no id is left for, or whose logits hold NaN or +inf, fails alone.
Log-probabilities and ranks are of the model's own logits, before any of this.

A row's result is a function of that row alone, to the bit. Parameters come as columns, and only rows that need a step
are touched by it: a greedy row without bans, bias and penalties costs one search for its largest logit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.cpu import sampling as kernels
from services.executor import noise
from services.executor.logprobs import LOWEST_LOGPROB, Logprobs
from services.executor.sampling_columns import Float64s, History, Int64s, SampleRows
from services.executor.sampling_params import GREEDY_BELOW, SamplingParams

__all__ = ["LOWEST_LOGPROB", "Masks", "Sampled", "Sampler", "SamplingParams"]

Float32s = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Masks:
    """Which ids masked rows may draw."""

    rows: Int64s
    """[n] numbers of sampling rows"""
    words: npt.NDArray[np.uint32]
    """[n, ceil(vocab / 32)] bit i of word j allows id 32 j + i"""


@dataclass(frozen=True, eq=False)
class Sampled:
    """One id a row."""

    token_ids: Int64s
    failed: npt.NDArray[np.bool_]
    """no id could be drawn; the row's id means nothing, and it has no logprobs"""
    scored: Int64s
    """[n] rows that logprobs are told of, rising"""
    logprobs: Logprobs
    """of `scored`"""
    idless: npt.NDArray[np.bool_]
    """those of the failed rows whose logits are good, while bans and bias leave no id"""


class Sampler:
    """Draws from a vocabulary of `vocab_size` ids; columns past it (a padded lm_head) are never drawn."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._counts = np.zeros((0, vocab_size), np.int32)  # all 0 between calls

    def sample(self, logits: torch.Tensor, rows: SampleRows, masks: Masks | None = None) -> Sampled:
        """Logits [rows, vocab_size or more], any float dtype, are read, never written."""
        if logits.ndim != 2 or len(logits) != len(rows) or logits.shape[1] < self._vocab_size:
            raise ValueError(f"logits are {tuple(logits.shape)}, wanted ({len(rows)}, {self._vocab_size} or more)")
        own: Float32s = logits[:, : self._vocab_size].float().numpy()
        token_ids = own.argmax(axis=1)  # NaN wins
        failed = ~np.isfinite(own[np.arange(len(own)), token_ids])
        idless = np.zeros(len(own), np.bool_)
        places, scores = self._adjust(own, rows, masks)
        if len(scores):
            changed = places >= 0
            token_ids[changed] = scores.argmax(axis=1)
            best = scores.max(axis=1)
            idless[changed] = ~failed[changed] & np.isneginf(best)
            failed[changed] |= ~np.isfinite(best)
        self._draw(own, places, scores, rows, token_ids, failed)
        scored = np.flatnonzero((rows.columns["logprobs"] >= 0) & ~failed)
        logprobs = _logprobs(own, scored, token_ids, rows.columns["logprobs"])
        return Sampled(token_ids, failed, scored, logprobs, idless)

    def _adjust(self, own: Float32s, rows: SampleRows, masks: Masks | None) -> tuple[Int64s, Float64s]:
        """Where each row's scores are, -1 where they are its logits; and scores after bans, bias and penalties."""
        places = np.full(len(rows), -1)
        parts = [rows.allowed.rows, rows.banned.rows, rows.biased.rows, rows.history.rows]
        if masks is not None:
            parts.append(masks.rows)
        if not any(map(len, parts)):
            return places, np.zeros((0, self._vocab_size))
        for part in parts:
            places[part] = 0
        which = np.flatnonzero(places == 0)
        places[which] = np.arange(len(which))
        scores = own[which].astype(np.float64)
        if masks is not None:
            _mask(scores, places[masks.rows], masks.words)
        _allow(scores, places[rows.allowed.rows], rows.allowed.ids)
        scores[places[rows.banned.rows], rows.banned.ids] = -np.inf
        scores[places[rows.biased.rows], rows.biased.ids] += rows.biased.values
        self._penalize(scores, places, rows.history, rows.columns)
        return places, scores

    def _penalize(self, scores: Float64s, places: Int64s, history: History, columns: npt.NDArray[np.void]) -> None:
        """Touches the ids in history alone. One that is there twice is read twice before it is written twice."""
        if not len(history.rows):
            return
        if history.ids.max() >= self._vocab_size:
            raise IndexError(f"an id of the history is past the vocabulary, {self._vocab_size}")
        if len(self._counts) < len(scores):
            self._counts = np.zeros(scores.shape, np.int32)
        flat = places[history.rows] * self._vocab_size + history.ids
        counts = self._counts.reshape(-1)
        np.add.at(counts, flat[history.in_output], 1)
        in_output = counts[flat]
        counts[flat] = 0
        penalties = columns[history.rows]
        repetition, before = penalties["repetition_penalty"], scores.reshape(-1)[flat]
        after = np.where(before > 0, before / repetition, before * repetition)
        after -= penalties["presence_penalty"] * (in_output > 0)
        after -= penalties["frequency_penalty"] * in_output
        scores.reshape(-1)[flat] = after

    def _draw(
        self,
        own: Float32s,
        places: Int64s,
        scores: Float64s,
        rows: SampleRows,
        token_ids: Int64s,
        failed: npt.NDArray[np.bool_],
    ) -> None:
        """Draws at random for the rows that are not greedy."""
        which = np.flatnonzero((rows.columns["temperature"] >= GREEDY_BELOW) & ~failed)
        if not len(which):
            return
        columns = rows.columns[which]
        draws = kernels.Draws(
            temperature=columns["temperature"],
            top_k=columns["top_k"],
            top_p=columns["top_p"],
            min_p=columns["min_p"],
            uniform=noise.uniform(columns["seed"], rows.positions[which].astype(np.uint64)),
        )
        token_ids[which] = kernels.draw(own, scores, which, places[which], draws)


def _mask(scores: Float64s, places: Int64s, words: npt.NDArray[np.uint32]) -> None:
    as_bytes = np.ascontiguousarray(words, "<u4").view(np.uint8)
    masked = scores[places]
    masked[np.unpackbits(as_bytes, axis=1, count=scores.shape[1], bitorder="little") == 0] = -np.inf
    scores[places] = masked


def _allow(scores: Float64s, places: Int64s, ids: Int64s) -> None:
    """Of the places named, ids that are not beside them are banned."""
    if not len(places):
        return
    kept = scores[places, ids]
    scores[places] = -np.inf
    scores[places, ids] = kept


_NO_LOGPROBS = Logprobs.none()


def _logprobs(own: Float32s, scored: Int64s, token_ids: Int64s, wanted: Int64s) -> Logprobs:
    if not len(scored):
        return _NO_LOGPROBS
    logits = own if len(scored) == len(own) else own[scored]
    return Logprobs.of(logits, token_ids[scored], wanted[scored])
