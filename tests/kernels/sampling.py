"""The sampling kernel's answer written out in extended precision, and calls of the kernel on the shim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kernels.sampling import Row, Sampling, pack
from services.executor import noise
from tests.kernels.hostshim.hostshim import HostDevice
from tests.kernels.paged import stored

FAR = 1e-9
"""A share of probability far above what float64 and 44-bit weights lose."""
UNTOUCHED = -7
"""What lies in an output before."""


@dataclass
class Drawn:
    """What the kernel wrote."""

    ids: np.ndarray
    """[rows] int64"""
    failed: np.ndarray
    """[rows] int32"""
    kept: np.ndarray
    """[rows, vocab] bool; of random rows alone"""

    def same_bits(self, other: Drawn) -> bool:
        return all((getattr(self, name) == getattr(other, name)).all() for name in ("ids", "failed", "kept"))


def draw(
    device: HostDevice,
    logits: np.ndarray,
    rows: Sequence[Row | None],
    *,
    masks: np.ndarray | None = None,
    dtype: str = "float32",
    threads: int = 64,
) -> Drawn:
    """`logits` [rows, vocab] are rounded to dtype; `masks` [mask rows, vocab] bool: true where an id is allowed."""
    count, vocab = logits.shape
    words = -(-vocab // 32)
    # A vocabulary padded by ids that would win, and rows of masks by bits that would allow them.
    padded = stored(np.concatenate([logits, np.full((count, 3), 3e4, logits.dtype)], axis=1), dtype)
    ids, failed = np.full(count, UNTOUCHED, np.int64), np.full(count, UNTOUCHED, np.int32)
    kept, packed = np.zeros((count, words), np.uint32), pack(rows)
    call = Sampling(device, dtype=dtype, threads=threads)
    call.params.set(
        logits=device.pointer(padded),
        rows=device.pointer(packed),
        token_ids=device.pointer(ids),
        failed=device.pointer(failed),
        kept=device.pointer(kept),
        logits_stride=padded.shape[1],
        vocab=vocab,
    )
    if masks is not None:
        bits = words_of(masks)
        call.params.set(masks=device.pointer(bits), mask_stride=bits.shape[1])
    call(count)
    return Drawn(ids, failed, np.unpackbits(kept.view(np.uint8), axis=1, bitorder="little")[:, :vocab].astype(bool))


def words_of(masks: np.ndarray) -> np.ndarray:
    """[mask rows, words + 1] uint32, all bits past the vocabulary set."""
    padded = np.ones((len(masks), (-(-masks.shape[1] // 32) + 1) * 32), bool)
    padded[:, : masks.shape[1]] = masks
    return np.ascontiguousarray(np.packbits(padded, axis=1, bitorder="little").view(np.uint32))


@dataclass(frozen=True)
class Expected:
    """Of one random row."""

    kept: np.ndarray
    """[vocab] bool"""
    id: int
    slack: float
    """How far the nearest filter, or the number that was drawn, was from another answer, as a share of probability."""


def expected(logits: np.ndarray, row: Row, mask: np.ndarray | None = None) -> Expected:
    """The filters and the draw as generation.proto tells them, one after the other, in numpy's long double."""
    assert row.temperature is not None
    scores = logits.astype(np.longdouble)
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    shares = np.exp((scores - scores.max()) / np.longdouble(row.temperature))
    order = np.lexsort((np.arange(len(scores)), -scores))
    order = order[scores[order] > -np.inf]
    slack = np.inf
    if row.top_k > 0:
        order = order[: row.top_k]
    if row.top_p < 1:
        sums = shares[order].cumsum() / shares[order].sum()
        count = int((sums < row.top_p).sum()) + 1
        slack = min(slack, float(np.abs(sums - row.top_p).min()))
        order = order[:count]
    if row.min_p > 0:
        beside = shares[order] / shares[order[0]]
        slack = min([slack, *(float(abs(share - row.min_p)) for share in beside if share < 1)])
        order = order[beside >= row.min_p]
    kept = np.zeros(len(scores), bool)
    kept[order] = True
    uniform = noise.uniform(np.array([row.seed], np.uint64), np.array([row.position], np.uint64))[0]
    sums = np.where(kept, shares, 0).cumsum()
    target = uniform * sums[-1]
    drawn = int((sums <= target).sum())
    return Expected(kept, drawn, min(slack, float(np.abs(sums - target).min() / sums[-1])))


def mixed_rows(count: int, vocab: int, seed: int = 0) -> list[Row]:
    """Temperatures, filters and seeds of all kinds."""
    rng = np.random.default_rng(seed)
    return [
        Row(
            float(rng.choice([0.01, 0.3, 1.0, 1.7, 100.0])),
            int(rng.choice([-1, 0, 1, 7, 50, vocab - 1, vocab, 2 * vocab])),
            float(rng.choice([1.0, 0.9, 0.5, 0.999, 1e-9])),
            float(rng.choice([0.0, 0.0, 0.05, 0.3, 1.0])),
            int(rng.integers(1 << 63)) * 2,
            int(rng.integers(1 << 40)),
        )
        for _ in range(count)
    ]


def mixed_logits(count: int, vocab: int, seed: int = 0) -> np.ndarray:
    """Smooth ones, ones with many ties, ones with a few far ahead, ones with holes."""
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((count, vocab)) * 3).astype(np.float32)
    logits[1::4] = np.round(logits[1::4])
    logits[2::4, rng.integers(0, vocab, 3)] += 15
    logits[3::4][rng.random(logits[3::4].shape) < 0.3] = -np.inf
    logits[3::4, 0] = 0
    return logits


def check(logits: np.ndarray, rows: Sequence[Row], drawn: Drawn, masks: np.ndarray | None = None) -> None:
    """Ids kept and drawn are those of the written-out filters, where rounding cannot make others."""
    close = 0
    for at, row in enumerate(rows):
        mask = None if row.mask_row is None or masks is None else masks[row.mask_row]
        wanted = expected(logits[at], row, mask)
        if wanted.slack < FAR:
            close += 1
            continue
        assert (drawn.kept[at] == wanted.kept).all(), (
            f"row {at}, {row}: {np.flatnonzero(drawn.kept[at] != wanted.kept)}"
        )
        assert drawn.ids[at] == wanted.id, f"row {at}, {row}"
    assert not drawn.failed.any()
    assert close <= len(rows) // 10, "too few rows say anything"
