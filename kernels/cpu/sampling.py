"""Drawing ids and scoring them, a row in a few passes over its logits and all rows in one parallel region.

A row's result depends on that row alone, to the bit, whatever rows stand beside it and however many threads there are:
each is computed whole by one thread, and there is one compiled function for any number of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import get_num_threads, njit, prange

# Nothing is reordered: rounding to whole numbers relies on it, and so does a border that falls between two sums.
_OPTIONS: dict[str, Any] = {"fastmath": {"contract"}, "error_model": "numpy", "nogil": True, "cache": True}
# But for the largest of some numbers, which is the same in any order; none of them is NaN.
_ANY_ORDER: dict[str, Any] = _OPTIONS | {"fastmath": {"reassoc", "nnan", "nsz"}}

_BLOCK = 256
"""Ids whose weights are summed together, so that a draw looks at a block's ids only where it falls into it."""
_BUCKETS = 4096
"""Of scores, by their distance from the best: a filter's border falls into one, whose ids alone are put in order."""

_LOWEST = -708.0
"""e to the power of less is taken for 0; it is below the least normal float64."""
_LOG2_E = 1 / math.log(2)
# ln 2 in two parts (Cody and Waite 1980): a whole number below 2^11 times the first is exact.
_LN2_HIGH = 6.93147180369123816490e-01
_LN2_LOW = 1.90821492927058770002e-10
_ROUND = 1.5 * 2.0**52
"""Added to a number, it leaves its nearest whole number in the lowest bits."""
_E = tuple(1 / math.factorial(k) for k in range(14))
"""Taylor coefficients of e^x, |x| <= ln(2)/2: the first one left out adds less than 1e-17."""
_E2, _E3, _E4, _E5, _E6, _E7, _E8, _E9, _E10, _E11, _E12, _E13 = _E[2:]

Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Draws:
    """Columns, [rows], of rows drawn at random. A filter that is off has top_k = vocabulary, top_p = 1, min_p = 0."""

    temperature: Float64s
    top_k: Int64s
    top_p: Float64s
    min_p: Float64s
    uniform: Float64s
    """[0, 1)"""


def draw(logits: Float32s, adjusted: Float64s, rows: Int64s, places: Int64s, draws: Draws) -> Int64s:
    """One id for each of `rows`, [n] int64, by the probabilities that temperature and filters make of its scores.

    Row i's scores are adjusted[places[i]], [any, vocab] float64, or, where places[i] is -1, logits[rows[i]], [any,
    vocab] float32; none is NaN or +inf and one is finite. top_k, top_p and min_p each keep a first part of the ids in
    order of falling score, the lower id first among equals. The id is the first, by number, whose summed weight passes
    uniform * sum.
    """
    ids = np.empty(len(rows), np.int64)
    threads = min(get_num_threads(), max(1, len(rows)))
    _draw(
        logits,
        adjusted,
        rows,
        places,
        draws.temperature,
        draws.top_k,
        draws.top_p,
        draws.min_p,
        draws.uniform,
        np.empty((threads, logits.shape[1]), np.float64),
        np.empty((threads, logits.shape[1]), np.int16),
        ids,
    )
    return ids


def score(logits: Float32s, token_ids: Int64s, top: int) -> tuple[Float64s, Int64s, Int64s, Float64s]:
    """Log-probability and rank of one id a row, and its `top` likeliest ids: float64 [rows], int64 [rows] from 1,
    int64 and float64 [rows, top], likeliest first, the lower id first among equals. `top` is at most the vocabulary.

    Logits are [rows, vocab] float32; the results of a row that holds NaN or +inf mean nothing.
    """
    rows = len(logits)
    logprobs, ranks = np.empty(rows, np.float64), np.empty(rows, np.int64)
    top_ids, top_logprobs = np.empty((rows, top), np.int64), np.empty((rows, top), np.float64)
    threads = min(get_num_threads(), max(1, rows))
    weights = np.empty((threads, logits.shape[1]), np.float64)
    _score(logits, token_ids, weights, logprobs, ranks, top_ids, top_logprobs)
    return logprobs, ranks, top_ids, top_logprobs


@njit(**_OPTIONS)
def _exp(x):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """x becomes e^x in place, for x <= 0, within 2 units in the last place; 0 for x below _LOWEST."""
    shifted = np.empty(_BLOCK, np.float64)
    bits = shifted.view(np.int64)
    powers = np.empty(_BLOCK, np.float64)
    power_bits = powers.view(np.int64)
    for start in range(0, x.shape[0], _BLOCK):
        part = x[start : start + _BLOCK]  # a slice is indexed from 0: only that is computed four at a time
        for i in range(part.shape[0]):
            shifted[i] = max(part[i], _LOWEST) * _LOG2_E + _ROUND
        for i in range(part.shape[0]):
            power_bits[i] = (bits[i] + np.int64(1023)) << np.int64(52)
        for i in range(part.shape[0]):
            whole = shifted[i] - _ROUND
            f = (max(part[i], _LOWEST) - whole * _LN2_HIGH) - whole * _LN2_LOW
            tail = _E7 + f * (_E8 + f * (_E9 + f * (_E10 + f * (_E11 + f * (_E12 + f * _E13)))))
            value = 1.0 + f * (1.0 + f * (_E2 + f * (_E3 + f * (_E4 + f * (_E5 + f * (_E6 + f * tail))))))
            part[i] = value * powers[i] if part[i] >= _LOWEST else 0.0


@njit(**_OPTIONS)
def _sum(x):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """Of sums of blocks, in order: what `_locate` adds up too."""
    total = 0.0
    for start in range(0, x.shape[0], _BLOCK):
        total += _block_sum(x[start : start + _BLOCK])
    return total


@njit(**_OPTIONS)
def _block_sum(x):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """Four sums side by side, which the processor adds at once."""
    a, b, c, d = 0.0, 0.0, 0.0, 0.0
    fours = x.shape[0] // 4
    for i in range(fours):
        a += x[4 * i]
        b += x[4 * i + 1]
        c += x[4 * i + 2]
        d += x[4 * i + 3]
    for i in range(4 * fours, x.shape[0]):
        a += x[i]
    return (a + b) + (c + d)


@njit(**_OPTIONS)
def _locate(weights, uniform):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """First id whose summed weight passes uniform * sum; never one of weight 0.

    uniform is at most 1 - 2^-53, whose product with a normal float64 is below that float64: some block passes. In it
    the ids are added one by one, in another order than the block's sum: should none pass, it is the last with a weight.
    """
    n = weights.shape[0]
    target = uniform * _sum(weights)
    below = 0.0
    start = 0
    while start < n:
        after = below + _block_sum(weights[start : start + _BLOCK])
        if after > target:
            break
        below = after
        start += _BLOCK
    last = 0
    for i in range(start, min(start + _BLOCK, n)):
        if weights[i] > 0.0:
            last = i
            below += weights[i]
            if below > target:
                return i
    return last


@njit(**_OPTIONS)
def _bucket(weights, scores_range, buckets):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """Bucket of each id by its distance from the best score, [vocab] distances (-inf where there is no weight)."""
    scale = (_BUCKETS - 1) / scores_range if scores_range > 0.0 else 0.0
    for i in range(weights.shape[0]):
        distance = -weights[i]
        buckets[i] = np.int16(distance * scale) if distance <= scores_range else np.int16(-1)


@njit(**_OPTIONS)
def _in_order(x, bucket, buckets, count):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """Ids of a bucket, best first, the lower one first among equals; x are scaled distances from the best, <= 0."""
    ids = np.empty(count, np.int64)
    at = 0
    for i in range(x.shape[0]):
        if buckets[i] == bucket:
            ids[at] = i
            at += 1
    # Merge sort, runs of 1, 2, 4, ...: numpy's takes longer to compile than all the rest here.
    merged = np.empty(count, np.int64)
    width = 1
    while width < count:
        for low in range(0, count, 2 * width):
            middle, high = min(low + width, count), min(low + 2 * width, count)
            left, right = low, middle
            for to in range(low, high):
                if left < middle and (right >= high or x[ids[left]] >= x[ids[right]]):
                    merged[to] = ids[left]
                    left += 1
                else:
                    merged[to] = ids[right]
                    right += 1
        ids, merged = merged, ids
        width *= 2
    return ids


@njit(**_OPTIONS)
def _filter(x, weights, buckets, scores_range, top_k, top_p, min_p):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Weights of ids that a filter drops become 0. x is [vocab] (score - best) / temperature, weights e^x."""
    n = x.shape[0]
    if top_k >= n and top_p >= 1.0:
        for i in range(n):
            weights[i] = weights[i] if weights[i] >= min_p else 0.0
        return
    _bucket(x, scores_range, buckets)
    counts = np.zeros(_BUCKETS, np.int64)
    sums = np.zeros(_BUCKETS, np.float64)
    for i in range(n):
        b = buckets[i]
        if b >= 0:
            counts[b] += 1
            sums[b] += weights[i]
    border, kept, left = _BUCKETS, 0, 0.0  # buckets before the border are kept, and the first `kept` ids of it
    ids = np.empty(0, np.int64)
    if top_k < n:
        seen = 0
        for b in range(_BUCKETS):
            if seen + counts[b] >= top_k:
                border, kept = b, top_k - seen
                ids = _in_order(x, b, buckets, counts[b])
                for i in range(kept):
                    left += weights[ids[i]]
                break
            seen += counts[b]
            left += sums[b]
    else:
        for b in range(_BUCKETS):
            left += sums[b]
    if top_p < 1.0:
        target, below = top_p * left, 0.0
        for b in range(min(border + 1, _BUCKETS)):
            if below + sums[b] >= target or b == border:
                if b != border:
                    border, kept = b, counts[b]
                    ids = _in_order(x, b, buckets, counts[b])
                for i in range(kept):
                    below += weights[ids[i]]
                    if below >= target:
                        kept = i + 1
                        break
                break
            below += sums[b]
    for i in range(n):
        if buckets[i] > border or weights[i] < min_p:
            weights[i] = 0.0
    if border < _BUCKETS:
        for i in range(kept, len(ids)):
            weights[ids[i]] = 0.0


@njit(**_ANY_ORDER)
def _largest(scores):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    best = scores[0]
    for i in range(scores.shape[0]):
        best = max(best, scores[i])
    return best


@njit(**_ANY_ORDER)
def _widest(x):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """The longest distance of an id whose weight is not 0."""
    widest = 0.0
    for i in range(x.shape[0]):
        widest = min(widest, x[i] if x[i] >= _LOWEST else 0.0)
    return -widest


@njit(**_OPTIONS)
def _distances(scores, temperature, x):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """x = (score - best) / temperature."""
    best = np.float64(_largest(scores))
    inverse = 1.0 / temperature
    for i in range(scores.shape[0]):
        x[i] = (np.float64(scores[i]) - best) * inverse


@njit(parallel=True, **_OPTIONS)
def _draw(  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    logits, adjusted, rows, places, temperature, top_k, top_p, min_p, uniform, spaces, buckets, ids
):
    vocab = logits.shape[1]
    threads = spaces.shape[0]
    for thread in prange(threads):
        weights = spaces[thread]
        for i in range(thread, rows.shape[0], threads):
            if places[i] >= 0:
                _distances(adjusted[places[i]], temperature[i], weights)
            else:
                _distances(logits[rows[i], :vocab], temperature[i], weights)
            if top_k[i] < vocab or top_p[i] < 1.0 or min_p[i] > 0.0:
                x = weights.copy()
                _exp(weights)
                _filter(x, weights, buckets[thread], _widest(x), top_k[i], top_p[i], min_p[i])
            else:
                _exp(weights)
            ids[i] = _locate(weights, uniform[i])


@njit(**_OPTIONS)
def _likeliest(logits, ids):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """The len(ids) largest in falling order, the lower id first among equals: read in order, each put in its place."""
    size, count = ids.shape[0], 0
    for i in range(logits.shape[0]):
        value = logits[i]
        if count == size and not value > logits[ids[size - 1]]:
            continue
        if count < size:
            count += 1
        at = count - 1
        while at > 0 and value > logits[ids[at - 1]]:
            ids[at] = ids[at - 1]
            at -= 1
        ids[at] = i


@njit(parallel=True, **_OPTIONS)
def _score(  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    logits, token_ids, spaces, logprobs, ranks, top_ids, top_logprobs
):
    threads = spaces.shape[0]
    for thread in prange(threads):
        weights = spaces[thread]
        for row in range(thread, logits.shape[0], threads):
            own = logits[row]
            _distances(own, 1.0, weights)
            distance = weights[token_ids[row]]
            top = weights.copy() if top_ids.shape[1] else weights[:0]
            _exp(weights)
            log_sum = np.log(_sum(weights))
            logprobs[row] = distance - log_sum
            rank = 1
            for i in range(own.shape[0]):
                rank += own[i] > own[token_ids[row]]
            ranks[row] = rank
            if top_ids.shape[1]:
                _likeliest(own, top_ids[row])
                for k in range(top_ids.shape[1]):
                    top_logprobs[row, k] = top[top_ids[row, k]] - log_sum
