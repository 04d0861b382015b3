"""What is written into the cache, against norms and rotations written out in float64 and torch's own rounding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from kernels.cpu import kv_cache

STORED = {"float32": np.float32, "bfloat16": np.uint16, "int8": np.int8}
NO_ANGLES, NO_GAIN = np.zeros((1, 0), np.float32), np.zeros(0, np.float32)
EPSILON = 1e-6


@dataclass
class Step:
    """Rows of (tokens computed before, new tokens), and a cache of poison for them."""

    rows: list[tuple[int, int]]
    stored: str = "float32"
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 24
    block_tokens: int = 16

    def __post_init__(self) -> None:
        rng = np.random.default_rng(5)
        tokens = sum(new for _, new in self.rows)
        every = self.heads + 2 * self.kv_heads
        self.projected = rng.standard_normal((tokens, every, self.head_dim), dtype=np.float32)
        self.contexts = np.array([before + new for before, new in self.rows], np.int64)
        self.starts = np.cumsum([0, *(new for _, new in self.rows)]).astype(np.int64)
        needed = -(-self.contexts // self.block_tokens)
        blocks = iter(rng.permutation(np.arange(1, needed.sum() + 1)).tolist())
        self.slots = rng.permutation(len(self.rows)).astype(np.int64)
        self.tables = np.full((len(self.rows), int(needed.max())), -1, np.int32)
        for slot, count in zip(self.slots, needed, strict=True):
            self.tables[slot, :count] = [next(blocks) for _ in range(count)]
        vectors = (int(needed.sum()) + 1, self.kv_heads)
        poison = {"float32": np.nan, "bfloat16": 0x7FC0, "int8": 77}[self.stored]
        kind, scales = STORED[self.stored], (*vectors, self.block_tokens) if self.stored == "int8" else (0, 0, 0)
        self.cache = kv_cache.LayerCache(
            np.full((*vectors, self.head_dim, self.block_tokens), poison, kind),
            np.full((*vectors, self.block_tokens, self.head_dim), poison, kind),
            np.full(scales, np.nan, np.float32),
            np.full(scales, np.nan, np.float32),
        )

    def write(self, cos=NO_ANGLES, sin=NO_ANGLES, q_gain=NO_GAIN, k_gain=NO_GAIN) -> np.ndarray:  # type: ignore[no-untyped-def]
        q = np.full((len(self.projected), self.heads, self.head_dim), np.nan, np.float32)
        rows = kv_cache.Rows(self.tables, self.slots, self.starts, self.contexts)
        kv_cache.write(self.projected, cos, sin, q_gain, k_gain, EPSILON, q, self.cache, rows)
        return q

    def kept(self) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of the new tokens [tokens, kv_heads, head_dim] float32, as attention reads them."""
        keys, values = [], []
        for row, (before, new) in enumerate(self.rows):
            for t in range(before, before + new):
                block, offset = self.tables[self.slots[row], t // self.block_tokens], t % self.block_tokens
                scales = (1.0, 1.0)
                if self.stored == "int8":
                    both = (self.cache.key_scales, self.cache.value_scales)
                    scales = tuple(one[block, :, offset, None] for one in both)
                keys.append(self._read(self.cache.keys[block, :, :, offset]) * scales[0])
                values.append(self._read(self.cache.values[block, :, offset]) * scales[1])
        return np.array(keys), np.array(values)

    def _read(self, stored: np.ndarray) -> np.ndarray:
        return (stored.astype(np.uint32) << 16).view(np.float32) if self.stored == "bfloat16" else stored

    def split(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        q, k, v = np.split(self.projected, [self.heads, self.heads + self.kv_heads], axis=1)
        return q, k, v


ROWS = [(5, 1), (0, 20), (16, 16), (0, 1)]
MANY = [(5, 1), (0, 200), (3, 100)]
"""Enough tokens for other threads to be woken."""


def placed(x: np.ndarray, gain: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """x [tokens, heads, head_dim] normed and rotated by as many angles as there are, in float64."""
    wide = x.astype(np.float64)
    wide = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + EPSILON) * gain
    half = cos.shape[1] // 2
    first, second, rest = np.split(wide, [half, 2 * half], axis=-1)
    turned = np.concatenate([first, second], -1) * cos[:, None] + np.concatenate([-second, first], -1) * sin[:, None]
    return np.concatenate([turned, rest], axis=-1)


@pytest.mark.parametrize("rows", [ROWS, MANY])
@pytest.mark.parametrize("angles", [2, 10, 24])
def test_queries_and_keys_are_normed_and_rotated(rows: list[tuple[int, int]], angles: int) -> None:
    step = Step(rows)
    rng = np.random.default_rng(1)
    cos, sin = rng.standard_normal((2, len(step.projected), angles), dtype=np.float32)
    q_gain, k_gain = rng.standard_normal((2, 24), dtype=np.float32)
    q, (keys, values) = step.write(cos, sin, q_gain, k_gain), step.kept()
    before_q, before_k, before_v = step.split()
    np.testing.assert_allclose(q, placed(before_q, q_gain, cos, sin), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(keys, placed(before_k, k_gain, cos, sin), rtol=1e-5, atol=1e-5)
    assert np.array_equal(values, before_v)


@pytest.mark.parametrize("rows", [ROWS, MANY])
@pytest.mark.parametrize("block_tokens", [1, 3, 16, 32])
def test_what_is_neither_normed_nor_rotated_is_kept_as_it_is_and_nothing_else_is_touched(
    rows: list[tuple[int, int]], block_tokens: int
) -> None:
    step = Step(rows, block_tokens=block_tokens)
    q, (keys, values) = step.write(), step.kept()
    for got, given in zip((q, keys, values), step.split(), strict=True):
        assert np.array_equal(got, given)
    written = len(step.projected) * 2 * 24
    assert np.isfinite(step.cache.keys).sum() == np.isfinite(step.cache.values).sum() == written


def test_bfloat16_is_rounded_as_torch_does() -> None:
    step = Step(MANY, "bfloat16")
    ties = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x80000001], np.uint32).view(np.float32)
    step.projected[3, :, :5] = ties
    step.projected[4, 4:, 0], step.projected[4, 4:, 1], step.projected[4, 4:, 2] = np.nan, np.inf, -np.inf
    step.write()
    for kept, given in zip(step.kept(), step.split()[1:], strict=True):
        expected = torch.from_numpy(given.copy()).to(torch.bfloat16).float().numpy()
        assert np.array_equal(kept, expected, equal_nan=True)


def test_int8_is_off_by_half_a_step_of_its_scale_at_most() -> None:
    step = Step(MANY, "int8")
    step.projected[3] = 0
    step.projected[4] *= 1e-30
    step.projected[5] *= 1e30
    step.write()
    for kept, given in zip(step.kept(), step.split()[1:], strict=True):
        step_size = np.abs(given).max(axis=-1, keepdims=True) / 127
        assert (np.abs(kept - given) <= 0.5001 * step_size).all()
        assert np.abs(kept).max(axis=-1) == pytest.approx(np.abs(given).max(axis=-1), rel=1e-6)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_int8_shows_a_vector_that_is_not_finite_and_no_other(poison: float) -> None:
    step = Step(ROWS, "int8")
    step.projected[2, 4:, 7] = poison
    step.write()
    for kept in step.kept():
        assert np.isnan(kept[2]).all() and np.isfinite(np.delete(kept, 2, axis=0)).all()


@pytest.mark.parametrize("stored", STORED)
def test_a_token_is_written_the_same_whatever_its_neighbours(stored: str) -> None:
    together = Step(MANY, stored)
    rng = np.random.default_rng(1)
    cos, sin = rng.standard_normal((2, len(together.projected), 24), dtype=np.float32)
    gains = rng.standard_normal((2, 24), dtype=np.float32)
    q, kept = together.write(cos, sin, *gains), together.kept()
    alone = Step(MANY, stored)
    for i in range(0, 301, 50):
        row = int(np.searchsorted(alone.starts, i, side="right")) - 1
        one = slice(i, i + 1)
        out = np.empty_like(q[one])
        context = np.array([alone.contexts[row] - alone.starts[row + 1] + i + 1])
        rows = kv_cache.Rows(alone.tables, alone.slots[row : row + 1], np.array([0, 1]), context)
        kv_cache.write(alone.projected[one], cos[one], sin[one], *gains, EPSILON, out, alone.cache, rows)
        assert np.array_equal(out, q[one])
        assert all(np.array_equal(a[i], b[i]) for a, b in zip(alone.kept(), kept, strict=True))
