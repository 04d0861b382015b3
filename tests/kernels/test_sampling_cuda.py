"""The CUDA sampling kernel, run on the CPU, against the draw written out in float64 and against the CPU sampler."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from kernels.launch import Sample
from services.executor import noise
from services.executor.sampler import Sampler, SampleRow
from services.executor.sampling_params import SamplingParams
from tests.kernels.hostshim.hostshim import HostDevice
from tests.kernels.paged import loaded, stored

ORDERS = [("forward", 1), ("reverse", 1), ("random", 1), ("random", 2), ("random", 3)]
NEAR = 1e-5
"""Of a cumulative distribution: float32 exponents, and weights in steps of 2^-40."""


@dataclass(frozen=True)
class Row:
    """How a row is sampled."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 0


FILTERS = [
    Row(),
    Row(temperature=0.0),
    Row(temperature=1e-30),
    Row(temperature=0.3),
    Row(top_k=1),
    Row(top_k=7),
    Row(top_k=100_000),
    Row(top_p=0.05),
    Row(top_p=0.6),
    Row(top_p=1e-9),
    Row(min_p=0.2),
    Row(min_p=1.0),
    Row(temperature=1.7, top_k=50, top_p=0.7, min_p=0.01),
    Row(top_k=5, top_p=0.99),
]


def draw(logits: np.ndarray, rows: list[Row], dtype: str, allowed: np.ndarray | None, **options: object) -> np.ndarray:
    """[rows] int32. `allowed` [rows, vocab] bool."""
    device = HostDevice(**options)  # type: ignore[arg-type]
    bits, out = stored(logits, dtype), np.full(len(rows), -7, np.int32)
    columns = {
        "temperatures": np.array([row.temperature for row in rows], np.float32),
        "top_k": np.array([row.top_k for row in rows], np.int32),
        "top_p": np.array([row.top_p for row in rows], np.float32),
        "min_p": np.array([row.min_p for row in rows], np.float32),
        "seeds": np.array([row.seed for row in rows], np.uint64),
        "positions": np.array([row.position for row in rows], np.int64),
    }
    if allowed is not None:
        words = np.zeros((len(rows), -(-logits.shape[1] // 32) * 4), np.uint8)
        packed = np.packbits(allowed, axis=1, bitorder="little")
        words[:, : packed.shape[1]] = packed
        columns |= {"masks": words, "mask_rows": np.arange(len(rows), dtype=np.int32)[::-1].copy()}
        columns["masks"] = words[::-1].copy()
    call = Sample(device, dtype=dtype)
    call.params.set(out=device.pointer(out), logits=device.pointer(bits))
    call.params.set(**{name: device.pointer(column) for name, column in columns.items()})
    call.params.set(logits_stride=logits.shape[1], mask_stride=-(-logits.shape[1] // 32), vocab=logits.shape[1])
    call(len(rows))
    return out


def distribution(scores: np.ndarray, row: Row) -> np.ndarray:
    """[vocab] float64, not summing to 1: the filters longhand, each on what those before it left."""
    weights = np.exp((scores - scores.max()) / row.temperature)
    falling = np.lexsort((np.arange(len(weights)), -scores))
    count = row.top_k if 0 < row.top_k < len(weights) else len(weights)
    ordered = weights[falling]
    if row.top_p < 1:
        sums = ordered.cumsum()
        count = min(count, int((sums < np.float32(row.top_p) * sums[count - 1]).sum()) + 1)
    count = min(count, int((ordered >= np.float32(row.min_p) * ordered[0]).sum()))
    kept = np.zeros_like(weights)
    kept[falling[:count]] = ordered[:count]
    return kept


def check(logits: np.ndarray, rows: list[Row], dtype: str = "float32", allowed: np.ndarray | None = None) -> None:
    """Every id drawn is the one at which the cumulative distribution passes the row's number, in five orders."""
    scores = loaded(stored(logits, dtype), dtype)
    if allowed is not None:
        scores = np.where(allowed, scores, -np.inf)
    found = draw(logits, rows, dtype, allowed)
    for order, seed in ORDERS[1:]:
        np.testing.assert_array_equal(draw(logits, rows, dtype, allowed, order=order, seed=seed), found)
    for i, row in enumerate(rows):
        if row.temperature == 0:
            assert found[i] == scores[i].argmax()
            continue
        kept = distribution(scores[i], row)
        ends = kept.cumsum() / kept.sum()
        at = noise.uniform(np.array([row.seed], np.uint64), np.array([row.position], np.uint64))[0]
        begin = ends[found[i]] - kept[found[i]] / kept.sum()
        assert begin - NEAR <= at <= ends[found[i]] + NEAR, f"row {i}, {row}: id {found[i]}"
        assert kept[found[i]] > 0, f"row {i}, {row}: id {found[i]} is cut off"


@pytest.mark.parametrize(("dtype", "vocab"), [("float32", 1500), ("bfloat16", 777), ("float16", 64)])
def test_every_filter_in_every_order_of_threads(dtype: str, vocab: int) -> None:
    rng = np.random.default_rng(1)
    rows = [Row(**(vars(row) | {"seed": i * 7919 + 2**40, "position": i})) for i, row in enumerate(FILTERS)]
    check(rng.standard_normal((len(rows), vocab)) * 3, rows, dtype)


def test_a_mask_leaves_what_it_allows() -> None:
    rng = np.random.default_rng(2)
    allowed = rng.random((len(FILTERS), 700)) < 0.1
    check(rng.standard_normal((len(FILTERS), 700)) * 3, FILTERS, allowed=allowed)


def test_among_equal_scores_the_lower_ids_are_kept() -> None:
    logits = np.repeat(np.array([[0.0, 1.0, 1.0, -0.0]]), 250, axis=1).repeat(3, axis=0)
    check(logits, [Row(top_k=100), Row(top_k=600, seed=5), Row(top_p=0.3, seed=9)])
    ones = np.flatnonzero(logits[0] == 1)
    found = draw(logits[:1].repeat(40, axis=0), [Row(top_k=10, seed=seed) for seed in range(40)], "float32", None)
    assert set(found) <= set(ones[:10]) and len(set(found)) > 5


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
def test_a_row_with_nan_or_infinity_fails_alone(bad: float) -> None:
    logits = np.zeros((3, 100))
    logits[1, 40] = bad
    found = draw(logits, [Row(), Row(), Row(temperature=0.0)], "float32", None)
    assert found[1] == -1 and found[0] >= 0 and found[2] == 0


def test_a_row_without_an_allowed_id_fails_alone() -> None:
    allowed = np.ones((2, 100), bool)
    allowed[0] = False
    found = draw(np.zeros((2, 100)), [Row(), Row()], "float32", allowed)
    assert found[0] == -1 and found[1] >= 0


def test_draws_follow_the_distribution() -> None:
    probabilities = np.array([0.5, 0.25, 0.125, 0.0625, 0.0625])
    rows = [Row(seed=seed) for seed in range(2000)]
    found = draw(np.log(probabilities)[None].repeat(len(rows), axis=0), rows, "float32", None)
    counts = np.bincount(found, minlength=5)
    chi_square = ((counts - 2000 * probabilities) ** 2 / (2000 * probabilities)).sum()
    assert chi_square < 18.47  # 0.999 quantile with 4 degrees of freedom


def test_ids_are_the_cpu_samplers() -> None:
    rng = np.random.default_rng(3)
    logits = (rng.standard_normal((len(FILTERS), 1000)) * 3).astype(np.float32)
    rows = [Row(**(vars(row) | {"seed": 1000 + i, "position": 3})) for i, row in enumerate(FILTERS)]
    samples = [
        SampleRow(
            SamplingParams(
                temperature=row.temperature, top_k=row.top_k, top_p=row.top_p, min_p=row.min_p, seed=row.seed
            ),
            np.zeros(1, np.uint32),
            np.zeros(row.position, np.uint32),
        )
        for row in rows
    ]
    sampled = Sampler(1000).sample(torch.from_numpy(logits), samples)
    np.testing.assert_array_equal(draw(logits, rows, "float32", None), sampled.token_ids)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_nothing_races_or_is_touched_outside_the_buffers(sanitizer: str) -> None:
    rng = np.random.default_rng(4)
    rows = [Row(top_k=7), Row(top_p=0.5, min_p=0.01)]
    logits = rng.standard_normal((2, 700))
    found = draw(logits, rows, "float32", np.ones((2, 700), bool), sanitizer=sanitizer)
    np.testing.assert_array_equal(found, draw(logits, rows, "float32", None))


def test_logits_of_another_type_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="float64"):
        Sample(HostDevice(), dtype="float64")
