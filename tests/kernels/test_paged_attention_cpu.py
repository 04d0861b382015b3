"""The CPU kernel against a float64 reference written out here, with everything it must not read poisoned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from kernels.cpu import kv_cache, paged_attention
from tests.kernels.memory import untouched

# float32 with sums of at most a few hundred terms of size about 1: 1e-5 is some 80 units in the last place.
TOLERANCE = 1e-5
NO_SCALES, NO_ANGLES, NO_GAIN = (np.zeros(shape, np.float32) for shape in ((0, 0, 0), (1, 0), 0))


@dataclass
class Step:
    """A step's arguments: rows of (tokens computed before, new tokens)."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    tables: np.ndarray
    slots: np.ndarray
    query_starts: np.ndarray
    contexts: np.ndarray
    key_scales: np.ndarray = field(default_factory=lambda: NO_SCALES)
    value_scales: np.ndarray = field(default_factory=lambda: NO_SCALES)

    def attend(self, threads: int = 1, *, window: int = 0, cap: float = 0.0) -> np.ndarray:
        out, q = np.full_like(self.q, np.nan), np.full_like(self.q, np.nan)
        heads, kv_heads = self.q.shape[1], self.k.shape[1]
        items = paged_attention.work_items(self.query_starts, self.contexts, heads, kv_heads, threads)
        rows = kv_cache.Rows(self.tables, self.slots, self.query_starts, self.contexts)
        cache = kv_cache.LayerCache(self.keys, self.values, self.key_scales, self.value_scales)
        projected = np.concatenate([self.q, self.k, self.v], axis=1)
        kv_cache.write(projected, NO_ANGLES, NO_ANGLES, NO_GAIN, NO_GAIN, 0.0, q, cache, rows)
        paged_attention.attend(q, cache, rows, items, self.q.shape[2] ** -0.5, window, cap, out)
        return out


def make(
    rows: Sequence[tuple[int, int]],
    *,
    block_tokens: int = 16,
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 32,
    seed: int = 0,
) -> tuple[Step, list[tuple[np.ndarray, np.ndarray]]]:
    """A step over blocks in scrambled order, and each row's whole keys and values [context, kv_heads, head_dim].

    NaN stands in every place of the KV tensors that holds no token, -1 in every table entry that names no block.
    """
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    contexts = np.array([before + new for before, new in rows], np.int64)
    needed = -(-contexts // block_tokens)
    blocks = rng.permutation(np.arange(1, needed.sum() + 1)).astype(np.int32)
    slots = rng.permutation(len(rows) + 2)[: len(rows)].astype(np.int64)
    tables = np.full((len(rows) + 2, int(needed.max()) + 3), -1, np.int32)
    values = np.full((int(needed.sum()) + 1, kv_heads, block_tokens, head_dim), np.nan, np.float32)
    keys = values.transpose(0, 1, 3, 2).copy()
    whole, taken = [], 0
    for row, (before, new) in enumerate(rows):
        table = tables[slots[row]]
        table[: needed[row]] = blocks[taken : taken + needed[row]]
        taken += needed[row]
        k, v = normal(before + new, kv_heads, head_dim), normal(before + new, kv_heads, head_dim)
        for t in range(before):
            keys[table[t // block_tokens], :, :, t % block_tokens] = k[t]
            values[table[t // block_tokens], :, t % block_tokens] = v[t]
        whole.append((k, v))
    new_k = np.concatenate([k[before:] for (before, _), (k, _) in zip(rows, whole, strict=True)])
    new_v = np.concatenate([v[before:] for (before, _), (_, v) in zip(rows, whole, strict=True)])
    starts = np.concatenate([[0], np.cumsum([new for _, new in rows])]).astype(np.int64)
    q = normal(int(starts[-1]), heads, head_dim)
    return Step(q, new_k, new_v, keys, values, tables, slots, starts, contexts), whole


def store(step: Step, kind: str) -> None:
    """Has the step's cache hold bfloat16 or int8: NaN stays in every place that holds no token."""
    if kind == "bfloat16":
        step.keys, step.values = ((one.view(np.uint32) >> 16).astype(np.uint16) for one in (step.keys, step.values))
        return
    with np.errstate(invalid="ignore"):
        for name, axis in (("key", 2), ("value", 3)):
            vectors = getattr(step, f"{name}s")
            scales = np.abs(vectors).max(axis=axis) / np.float32(127)
            setattr(step, f"{name}s", np.rint(vectors / np.expand_dims(scales, axis)).astype(np.int8))
            setattr(step, f"{name}_scales", scales)


def stored(step: Step, kind: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """What the cache holds of each row after the step, float32, as `make` gives it."""
    keys, values = step.keys.transpose(0, 1, 3, 2), step.values
    if kind == "bfloat16":
        keys, values = ((one.astype(np.uint32) << 16).view(np.float32) for one in (keys, values))
    elif kind == "int8":
        keys, values = keys * step.key_scales[..., None], values * step.value_scales[..., None]
    block_tokens = values.shape[2]
    whole = []
    for slot, context in zip(step.slots, step.contexts, strict=True):
        tokens = np.arange(context)
        place = (step.tables[slot, tokens // block_tokens], slice(None), tokens % block_tokens)
        whole.append((keys[place], values[place]))
    return whole


def reference(
    step: Step, whole: list[tuple[np.ndarray, np.ndarray]], *, window: int = 0, cap: float = 0.0
) -> np.ndarray:
    """softmax(q k / sqrt(d)) v in float64, query by query, over the last `window` tokens, scores bent by `cap`."""
    out = np.empty(step.q.shape)
    group = step.q.shape[1] // step.k.shape[1]
    for row, (k, v) in enumerate(whole):
        begin, end = step.query_starts[row : row + 2]
        for i in range(begin, end):
            last = step.contexts[row] - (end - begin) + (i - begin) + 1
            seen = slice(max(0, last - window) if window else 0, last)
            for h in range(step.q.shape[1]):
                scores = k[seen, h // group].astype(np.float64) @ step.q[i, h] / np.sqrt(step.q.shape[2])
                scores = cap * np.tanh(scores / cap) if cap else scores
                weights = np.exp(scores - scores.max())
                out[i, h] = weights @ v[seen, h // group] / weights.sum()
    return out


def check(rows: Sequence[tuple[int, int]], **shape: int) -> None:
    step, whole = make(rows, **shape)
    np.testing.assert_allclose(step.attend(), reference(step, whole), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("block_tokens", [1, 3, 16, 32])
def test_decode_at_every_edge_of_a_block_and_of_a_key_tile(block_tokens: int) -> None:
    edges = {0, 1, 62, 63, 64, 65, 127, 128, 129}
    edges |= {n * block_tokens + d for n in (1, 2, 5) for d in (-2, -1, 0, 1)}
    check([(before, 1) for before in sorted(edges) if before >= 0], block_tokens=block_tokens)


@pytest.mark.parametrize("block_tokens", [1, 3, 16, 32])
def test_prefill_alone_and_on_top_of_what_is_computed(block_tokens: int) -> None:
    rows = [(0, 1), (0, 2), (0, 15), (0, 16), (0, 17), (0, 33), (0, 100), (1, 2), (15, 2), (16, 16), (63, 2), (70, 65)]
    check(rows, block_tokens=block_tokens)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 16, 33])
def test_any_number_of_query_heads_a_kv_head(group: int) -> None:
    check([(20, 1), (0, 40), (70, 3), (5, 2)], heads=3 * group, kv_heads=3)


@pytest.mark.parametrize("head_dim", [1, 2, 8, 13, 30, 64, 80, 128])
def test_any_head_size(head_dim: int) -> None:
    check([(20, 1), (0, 40), (70, 3)], head_dim=head_dim)


EDGES = [(0, 1), (0, 130), (30, 1), (63, 2), (64, 1), (64, 64), (65, 1), (100, 70), (200, 1), (3, 5)]
"""Rows around the edges of blocks, of key tiles of 64 and of the windows below."""


@pytest.mark.parametrize("block_tokens", [1, 16])
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 63, 64, 65, 100, 1000])
def test_a_window_lets_a_query_see_the_last_tokens_alone(window: int, block_tokens: int) -> None:
    step, whole = make(EDGES, block_tokens=block_tokens)
    expected = reference(step, whole, window=window)
    np.testing.assert_allclose(step.attend(window=window), expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("heads", [2, 6, 34])
@pytest.mark.parametrize("window", [1, 20, 64])
def test_a_window_with_any_number_of_query_heads_a_kv_head(window: int, heads: int) -> None:
    step, whole = make(EDGES, heads=heads)
    expected = reference(step, whole, window=window)
    np.testing.assert_allclose(step.attend(2, window=window), expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("new", [1, 40])
def test_tokens_before_the_window_of_every_query_are_not_read(new: int) -> None:
    step, whole = make([(100, new)])
    expected = reference(step, whole, window=10)
    table = step.tables[step.slots[0]]
    for token in range(100 + 1 - 10):
        step.keys[table[token // 16], :, :, token % 16] = step.values[table[token // 16], :, token % 16] = np.nan
    table[: (100 + 1 - 10) // 16] = -1
    # One item would reach from the first query's window on; 40 queries are several, and each starts at its own.
    np.testing.assert_allclose(step.attend(window=10), expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("spread", [1.0, 60.0])
@pytest.mark.parametrize("cap", [0.5, 20.0, 50.0])
def test_a_soft_cap_bends_scores_by_tanh(cap: float, spread: float) -> None:
    """Scores of some +-7, and of some +-400, where every cap bites."""
    step, whole = make(EDGES)
    step.q *= spread
    expected = reference(step, whole, cap=cap)
    assert np.abs(expected - reference(step, whole)).max() > (1e-3 if spread == 1.0 else 1e-2)
    np.testing.assert_allclose(step.attend(cap=cap), expected, atol=TOLERANCE if spread == 1.0 else 1e-4)


def test_a_window_and_a_soft_cap_in_one_layer() -> None:
    step, whole = make(EDGES)
    expected = reference(step, whole, window=33, cap=2.0)
    np.testing.assert_allclose(step.attend(window=33, cap=2.0), expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_window_as_long_as_the_row_changes_no_bit() -> None:
    step, _ = make(EDGES)
    np.testing.assert_array_equal(step.attend(window=10_000), step.attend())


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
@pytest.mark.parametrize("shape", [{}, {"block_tokens": 3}, {"block_tokens": 32, "head_dim": 13}, {"heads": 34}])
def test_smaller_keys_and_values_are_computed_with_as_they_are_stored(kind: str, shape: dict[str, int]) -> None:
    """Within float32's rounding of what the cache holds: nothing is lost on the way from it."""
    step, _ = make(EDGES, **shape)
    store(step, kind)
    for window, cap in ((0, 0.0), (33, 2.0)):
        out = step.attend(2, window=window, cap=cap)
        expected = reference(step, stored(step, kind), window=window, cap=cap)
        np.testing.assert_allclose(out, expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
@pytest.mark.parametrize("new", [1, 40])
def test_nan_in_one_row_of_smaller_keys_and_values_shows_in_that_row_alone(kind: str, new: int) -> None:
    step, _ = make([(40, new), (40, new), (40, new)])
    store(step, kind)
    clean = step.attend()
    step.k[new] = np.nan
    out = step.attend()
    assert np.isnan(out[new : 2 * new]).all()
    assert np.array_equal(np.delete(out, slice(new, 2 * new), 0), np.delete(clean, slice(new, 2 * new), 0))


def test_prefill_and_decode_rows_in_one_step_with_more_threads_than_items() -> None:
    step, whole = make([(100, 1), (0, 90), (30, 1), (64, 64), (3, 1)])
    expected = reference(step, whole)
    for threads in (1, 2, 3, 16):
        np.testing.assert_allclose(step.attend(threads), expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_new_keys_and_values_are_written_to_their_place_and_nowhere_else() -> None:
    rows = [(5, 1), (0, 20), (16, 16)]
    step, whole = make(rows)
    keys, values = step.keys.copy(), step.values.copy()
    step.attend()
    for row, (before, new) in enumerate(rows):
        for t in range(before, before + new):
            block = step.tables[step.slots[row], t // 16]
            keys[block, :, :, t % 16], values[block, :, t % 16] = whole[row][0][t], whole[row][1][t]
    np.testing.assert_array_equal(step.keys, keys)
    np.testing.assert_array_equal(step.values, values)


def test_rows_that_share_blocks_read_the_same_tokens() -> None:
    step, whole = make([(32, 1), (32, 1)])
    first, second = step.slots
    step.tables[second, :2] = step.tables[first, :2]
    for whole_of_first, whole_of_second in zip(whole[0], whole[1], strict=True):
        whole_of_second[:32] = whole_of_first[:32]
    np.testing.assert_allclose(step.attend(), reference(step, whole), atol=TOLERANCE, rtol=TOLERANCE)


def test_a_row_is_the_same_to_the_bit_whatever_its_neighbours() -> None:
    step, _ = make([(77, 1), (50, 30), (0, 64)], seed=3)
    together = step.attend()
    begin, end = step.query_starts[1:3]
    alone = Step(
        step.q[begin:end],
        step.k[begin:end],
        step.v[begin:end],
        step.keys,
        step.values,
        step.tables,
        step.slots[1:2],
        np.array([0, end - begin]),
        step.contexts[1:2],
    )
    np.testing.assert_array_equal(alone.attend(2), together[begin:end])


@pytest.mark.parametrize("new", [1, 40])
def test_nan_in_one_row_shows_in_that_row_alone(new: int) -> None:
    step, whole = make([(40, new), (40, new), (40, new)])
    step.values[step.tables[step.slots[1], 0], :, 3] = np.nan
    out, expected = step.attend(), reference(step, whole)
    assert np.isnan(out[new : 2 * new]).all()
    for begin in (0, 2 * new):
        np.testing.assert_allclose(out[begin : begin + new], expected[begin : begin + new], atol=TOLERANCE)


@pytest.mark.parametrize("new", [1, 40])
def test_nan_and_infinite_scores_become_nan_as_in_torch(new: int) -> None:
    for poison in (np.nan, np.inf):
        step, _ = make([(40, new)])
        step.keys[step.tables[step.slots[0], 1], :, :, 2] = poison
        assert np.isnan(step.attend()).all(axis=(1, 2)).all()


def test_scores_far_apart_and_far_from_zero_keep_their_softmax() -> None:
    step, whole = make([(80, 1), (0, 80)])
    step.q *= 60.0  # scores of some +-400: e^400 is past float32
    np.testing.assert_allclose(step.attend(), reference(step, whole), atol=2e-4)


def test_work_items_cover_every_query_of_every_kv_head_once_and_share_the_load() -> None:
    starts, contexts = np.array([0, 1, 101, 102]), np.array([500, 300, 7])
    items = paged_attention.work_items(starts, contexts, 9, 3, 2)
    covered = sorted((r, h, q) for r, h, first, count in items.tolist() for q in range(first, first + count))
    assert covered == [(r, h, q) for r in range(3) for h in range(3) for q in range(starts[r + 1] - starts[r])]
    # Cost of an item: its queries times the keys it reads. Threads get equal runs of the list.
    cost = [c * (contexts[r] - (starts[r + 1] - starts[r]) + f + c) for r, _, f, c in items.tolist()]
    first_half = sum(cost[: -(-len(cost) // 2)])
    assert 0.4 < first_half / sum(cost) < 0.6


def test_offsets_are_64_bit() -> None:
    """Blocks past 2^31 elements of their tensor; only the pages touched are ever backed by memory."""
    step, whole = make([(20, 1)], block_tokens=16, kv_heads=2, head_dim=128)
    block_elements = 2 * 16 * 128
    far = 2**31 // block_elements + 5
    keys = np.empty((far + 3, 2, 128, 16), np.float32)
    values = np.empty((far + 3, 2, 16, 128), np.float32)
    table = step.tables[step.slots[0]]
    for i, block in enumerate((far, far + 2)):
        keys[block], values[block] = step.keys[table[i]], step.values[table[i]]
        table[i] = block
    step.keys, step.values = keys, values
    np.testing.assert_allclose(step.attend(), reference(step, whole), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("rows", [[(40, 1), (3, 1)], [(5, 30)]], ids=["decode", "prefill"])
def test_X8_blocks_past_two_to_the_31_elements(rows: list[tuple[int, int]]) -> None:
    near, _ = make(rows)
    far, _ = make(rows)
    block = near.values[0].size
    shift = 2**31 // block
    for name in ("keys", "values"):
        small = getattr(far, name)
        large = untouched((shift + len(small)) * block, np.float32).reshape(-1, *small.shape[1:])
        large[shift:] = small
        setattr(far, name, large)
    far.tables[far.tables >= 0] += shift
    np.testing.assert_array_equal(far.attend(), near.attend())
    np.testing.assert_array_equal(far.values[shift:], near.values)
    assert not far.values[: len(near.values)].any(), "a block was written where a 32-bit offset would point"
