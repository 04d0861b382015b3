"""The sampling kernels against float64 numpy, at the edges where a border falls."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from kernels.cpu import sampling
from kernels.cpu.sampling import Draws, draw, score

NONE = np.zeros((0, 0))


def draws(count: int, vocab: int, **changes: Any) -> Draws:
    """`count` rows of one setting, their noise evenly spread."""
    columns = {"temperature": 1.0, "top_k": vocab, "top_p": 1.0, "min_p": 0.0} | changes
    uniform = (np.arange(count) + 0.5) / count
    whole = {name: np.full(count, value) for name, value in columns.items()}
    return Draws(**whole, uniform=uniform)


def drawn(logits: list[float] | np.ndarray[Any, Any], count: int = 2000, **changes: Any) -> set[int]:
    """Ids that evenly spread noise draws of one row."""
    row = np.array([logits], np.float32)
    asked = draws(count, row.shape[1], **changes)
    return set(draw(row, NONE, np.zeros(count, np.int64), np.full(count, -1), asked).tolist())


def test_e_to_a_power_is_right_to_the_last_bits() -> None:
    x = -np.concatenate([np.random.default_rng(0).random(5001) * 708, [0.0, 1e-300, 708.0]])
    mine = x.copy()
    sampling._exp(mine)
    expected = np.exp(x.astype(np.longdouble))
    assert float(np.max(np.abs(mine - expected) / expected)) < 4e-16
    beyond = np.array([-708.0001, -1e300, -np.inf, -0.0])
    sampling._exp(beyond)
    assert beyond.tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("vocab", [1, 2, 3, 255, 256, 257, 511, 513, 4099])
def test_a_draw_is_the_first_id_whose_summed_probability_passes_the_noise(vocab: int) -> None:
    logits = np.random.default_rng(vocab).standard_normal((1, vocab)).astype(np.float32) * 2
    probabilities = np.exp(logits[0].astype(np.float64))
    sums = np.cumsum(probabilities) / probabilities.sum()
    asked = draws(500, vocab)
    ids = draw(logits, NONE, np.zeros(500, np.int64), np.full(500, -1), asked)
    expected = np.searchsorted(sums, asked.uniform, side="right")
    near = np.abs(sums[:, None] - asked.uniform).min(axis=0) < 1e-12
    assert (ids == expected)[~near].all() and near.sum() < 5


@pytest.mark.parametrize("vocab", [7, 300, 1000])
def test_an_id_without_probability_is_never_drawn_even_at_the_ends_of_the_noise(vocab: int) -> None:
    random = np.random.default_rng(3)
    logits = np.full((400, vocab), -np.inf, np.float32)
    some = np.sort([1, vocab // 2, vocab - 2])
    logits[:, some] = random.standard_normal((400, 3))
    logits[:100, some] = 0.0
    rows, places = np.arange(400), np.full(400, -1)
    for noise, expected in (0.0, some[0]), (1 - 2**-53, some[-1]):
        for changes in ({}, {"top_p": 1 - 2**-24}, {"min_p": 1e-30}, {"top_k": 3}):
            asked = draws(400, vocab, **changes)
            asked.uniform[:] = noise
            assert set(draw(logits, NONE, rows, places, asked).tolist()) == {expected}


def kept(logits: np.ndarray[Any, Any], top_k: int, top_p: float, min_p: float) -> set[int]:
    """What the filters leave, by float64 sums over all ids in order."""
    weights = np.exp(logits.astype(np.float64) - logits.max())
    order = np.lexsort((np.arange(len(logits)), -logits))[:top_k]
    order = (
        order[: np.searchsorted(np.cumsum(weights[order]), top_p * weights[order].sum()) + 1] if top_p < 1 else order
    )
    return set(order[weights[order] >= min_p].tolist())


@pytest.mark.parametrize("spread", [0.0, 1e-3, 0.3, 2.0, 40.0])
@pytest.mark.parametrize("outlier", [None, -1e30, -np.inf, 60.0])
def test_filters_keep_a_first_part_of_the_ids_however_scores_lie(spread: float, outlier: float | None) -> None:
    logits = (np.random.default_rng(9).standard_normal(700) * spread).astype(np.float32)
    logits[300:500] = logits[:200]  # ties
    if outlier is not None:
        logits[123] = outlier
    finite = int(np.isfinite(logits).sum())
    for top_k, top_p, min_p in (
        (1, 1.0, 0.0),
        (5, 1.0, 0.0),
        (401, 1.0, 0.0),
        (699, 1.0, 0.0),
        (700, 0.43, 0.0),
        (700, 1e-9, 0.0),
        (700, 0.9999, 0.0),
        (700, 1.0, 0.2),
        (700, 1.0, 1.0),
        (350, 0.77, 0.01),
        (30, 0.5, 0.3),
    ):
        asked = kept(logits, min(top_k, finite), top_p, min_p)
        x = (logits.astype(np.float64) - logits.max()).copy()
        weights = x.copy()
        sampling._exp(weights)
        sampling._filter(x, weights, np.empty(700, np.int16), sampling._widest(x), top_k, top_p, min_p)
        # An id may lose its weight to underflow alone.
        possible = set(np.flatnonzero(np.exp(x) > 0).tolist())
        assert set(np.flatnonzero(weights).tolist()) == asked & possible, (top_k, top_p, min_p)


def test_top_p_of_exact_sums_keeps_just_enough() -> None:
    assert drawn([0.0] * 4, top_p=0.75) == {0, 1, 2}
    assert drawn([0.0] * 4, top_p=0.5) == {0, 1}
    assert drawn([0.0] * 4, top_p=0.5000001) == {0, 1, 2}
    assert drawn([0.0] * 4, top_k=3, top_p=1 / 3) == {0}


def test_rows_are_read_from_logits_or_from_adjusted_scores() -> None:
    logits = np.zeros((3, 5), np.float32)
    logits[0, 4] = logits[2, 1] = 200
    adjusted = np.zeros((2, 5))
    adjusted[0, 2], adjusted[1, 3] = 200, 200
    rows, places = np.array([0, 1, 2, 1]), np.array([-1, 0, -1, 1])
    assert draw(logits, adjusted, rows, places, draws(4, 5)).tolist() == [4, 2, 1, 3]


def test_padding_behind_the_vocabulary_is_not_read() -> None:
    wide = np.full((2, 40), 300.0, np.float32)
    wide[:, :33] = 0.0
    wide[1, :33] = np.arange(33)
    ids = draw(wide[:, :33], NONE, np.zeros(66, np.int64), np.full(66, -1), draws(66, 33))
    assert set(ids.tolist()) == set(range(33))
    logprobs, ranks, top, _ = score(wide[:, :33], np.array([32, 0]), 2)
    assert logprobs[0] == pytest.approx(-math.log(33)) and ranks.tolist() == [1, 33]
    assert top.tolist() == [[0, 1], [32, 31]]


@pytest.mark.parametrize("vocab", [1, 5, 300, 4097])
def test_scores_are_numpys_log_softmax_and_its_order(vocab: int) -> None:
    random = np.random.default_rng(1)
    logits = random.integers(-30, 30, (6, vocab)).astype(np.float32) / 2
    logits[1] = 0.0
    logits[2, ::2] = -np.inf
    logits[2, vocab // 2 | 1 if vocab > 1 else 0] = 1.0
    ids = random.integers(0, vocab, 6)
    top = min(vocab, 23)
    logprobs, ranks, top_ids, top_logprobs = score(logits, ids, top)
    exact = logits.astype(np.float64)
    with np.errstate(divide="ignore"):
        exact = exact - exact.max(axis=1, keepdims=True)
        exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(logprobs, exact[np.arange(6), ids], rtol=1e-13, atol=1e-14)
    assert ranks.tolist() == [1 + int((logits[i] > logits[i, ids[i]]).sum()) for i in range(6)]
    for i in range(6):
        order = np.lexsort((np.arange(vocab), -logits[i]))[:top]
        assert top_ids[i].tolist() == order.tolist()
        np.testing.assert_allclose(top_logprobs[i], exact[i, order], rtol=1e-13, atol=1e-14)
