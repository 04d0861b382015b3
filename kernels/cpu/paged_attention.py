"""Paged causal attention on the CPU: float32 arithmetic, grouped queries, any block size, any head size, windows, caps.

The softmax is computed online over tiles of keys (Milakov and Gimelshein 2018, "Online normalizer calculation for
softmax"; Dao et al. 2022, "FlashAttention"), keys and values are found through block tables (Kwon et al. 2023,
"PagedAttention") in the layout and the types of kv_cache.py; scores are products of queries and panels of 16 keys, what
comes out is products of weights and values, both by the tiles of tile.py, which widen what is stored as they read it.

One work item is (row, kv head, tile of the row's queries). All G = query heads / kv heads that share a kv head are
handled together, so each key and value is fetched once for G * tile queries. Items of one call write disjoint outputs.

    keys of an item:   panel | panel | panel | panel   a tile of 64, its beginning a multiple of 16
                         ^ tokens before what any query of the item sees, and after, are computed where they stand in
                           a panel with others, and left out of the softmax; their values are not read

Floating point: products may be reassociated, but NaN and infinity are kept (no nnan, ninf), so that a row whose KV
holds NaN is seen to fail.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import get_num_threads, njit, prange, set_num_threads

from kernels.cpu import tile
from kernels.cpu.compiled import INNER, LOG2_E, OPTIONS, exp2
from kernels.cpu.kv_cache import LayerCache, Rows

_F32 = np.float32
_KEY_TILE = 64
_QUERIES_AN_ITEM = 96
"""Query heads * tokens an item aims at: their queries, scores and sums stay in the second level of cache."""
Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]


__all__ = ["attend", "get_num_threads", "set_num_threads", "work_items"]


def work_items(query_starts: Int64s, contexts: Int64s, heads: int, kv_heads: int, threads: int) -> Int64s:
    """Cuts a step into items [n, 4] int64 (row, kv head, first query in the row, queries), balanced for `threads`.

    `query_starts` [rows + 1] and `contexts` [rows] as in `attend`. Threads get equal, contiguous runs of items, so
    items are dealt to them longest first. All layers share a cut, so windows, which differ by layer, do not count.
    """
    counts = np.diff(query_starts)
    tile = max(1, _QUERIES_AN_ITEM // (heads // kv_heads))
    tiles = -(-counts // tile)
    rows = np.repeat(np.arange(len(counts)), tiles)
    first = (np.arange(len(rows)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * tile
    queries = np.minimum(tile, counts[rows] - first)
    cost = queries * (contexts[rows] - counts[rows] + first + queries)
    order = np.argsort(-cost, kind="stable")
    items = np.empty((len(rows) * kv_heads, 4), np.int64)
    for column, values in ((0, rows), (2, first), (3, queries)):
        items[:, column] = np.repeat(values[order], kv_heads)
    items[:, 1] = np.tile(np.arange(kv_heads), len(rows))
    return np.concatenate([items[i::threads] for i in range(threads)])


@njit(**INNER)
def _gather_keys(keys, kv_head, table, begin, first, last, panel):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """panel [head_dim, 16] = keys of tokens begin..begin+15, where a block is no multiple of a panel.

    Those before `first` and after `last` repeat these two: nothing that is not written is read.
    """
    block_tokens = keys.shape[3]
    for t in range(tile.OUTPUTS):
        token = min(max(begin + t, first), last)
        block = keys[table[token // block_tokens], kv_head]
        for d in range(panel.shape[0]):
            panel[d, t] = block[d, token % block_tokens]


@njit(**INNER)
def _scores(q, rows, keys, values, kv_head, table, begin, first, count, gathered, places, scores):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """scores[:rows, :count] = q [rows, head_dim] @ keys of tokens begin..begin+count-1, by whole panels.

    Meanwhile the tile's values are asked for. `gathered` and `places` are scratch.
    """
    head_dim, block_tokens = keys.shape[2], keys.shape[3]
    beside = tile.PANELS_BESIDE[min(rows, tile.ROWS)]
    panels = (count + tile.OUTPUTS - 1) // tile.OUTPUTS
    stride = tile.OUTPUTS if block_tokens % tile.OUTPUTS else block_tokens
    for p in range(0, panels, beside):
        width = min(beside, panels - p)
        for i in range(width):
            token = begin + (p + i) * tile.OUTPUTS
            if block_tokens % tile.OUTPUTS:
                _gather_keys(keys, kv_head, table, token, first, begin + count - 1, gathered[i])
                places[:, i] = gathered[i].ctypes.data
            else:
                block, offset = table[token // block_tokens], token % block_tokens
                places[0, i] = keys[block, kv_head].ctypes.data + offset * keys.itemsize
                places[1, i] = values[block, kv_head, offset].ctypes.data
        for r in range(0, rows, tile.ROWS):
            x = q.ctypes.data + r * head_dim * 4
            y = scores.ctypes.data + (r * _KEY_TILE + p * tile.OUTPUTS) * 4
            tile.multiply(
                keys, min(tile.ROWS, rows - r), width, x, head_dim, places.ctypes.data, stride, head_dim,
                y, _KEY_TILE, 0, tile.OUTPUTS * keys.itemsize,
            )  # fmt: skip


@njit(**INNER)
def _multiply_by_scales(numbers, rows, scales, kv_head, table, begin, first, count):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """numbers[:rows, t] *= the scale of token begin + t, for t from `first` to count - 1."""
    block_tokens = scales.shape[2]
    for t in range(first, count):
        scale = scales[table[(begin + t) // block_tokens], kv_head, (begin + t) % block_tokens]
        for r in range(rows):
            numbers[r, t] *= scale


@njit(**INNER)
def _row_max(row, count):  # type: ignore[no-untyped-def]
    """The largest of row[:count], NaN left out. Four chains, since a NaN-safe maximum is not vectorized."""
    m0 = m1 = m2 = m3 = _F32(-np.inf)
    whole = count - count % 4
    for i in range(0, whole, 4):
        m0 = row[i] if row[i] > m0 else m0
        m1 = row[i + 1] if row[i + 1] > m1 else m1
        m2 = row[i + 2] if row[i + 2] > m2 else m2
        m3 = row[i + 3] if row[i + 3] > m3 else m3
    for i in range(whole, count):
        m0 = row[i] if row[i] > m0 else m0
    return max(max(m0, m1), max(m2, m3))


@njit(**INNER)
def _exp2_row(row, count, shift):  # type: ignore[no-untyped-def]
    """row[:count] = 2^(row - shift), row[count:] = 0; returns the sum. Below 2^-126 it is 2^-126, in effect 0."""
    total = _F32(0)
    for i in range(count):
        x = row[i] - shift
        row[i] = exp2(_F32(-126) if x < _F32(-126) else x)
        total += row[i]
    for i in range(count, row.shape[0]):
        row[i] = _F32(0)
    return total


@njit(**INNER)
def _cap_scores(scores, rows, count, cap):  # type: ignore[no-untyped-def]
    """scores[:rows, :count] = cap * log2(e) * tanh(scores): soft caps (Gemma Team 2024, "Gemma 2", section 2)."""
    for r in range(rows):
        for t in range(count):
            scores[r, t] = cap * LOG2_E * np.tanh(scores[r, t])


@njit(**INNER)
def _softmax_tile(scores, out, maxima, sums, begin, count, first_position, window, group):  # type: ignore[no-untyped-def]
    """Turns a tile of scores into weights relative to each query's running maximum, rescaling what came before.

    Query r stands at position first_position + r // group and sees the `window` tokens up to it:

        tile:   begin | unseen ... | seen ... | unseen ... | begin + count
                       0        hidden     visible
    """
    for r in range(maxima.shape[0]):
        position = first_position + r // group
        visible = min(count, position + 1 - begin)
        hidden = max(0, position + 1 - window - begin)
        if visible <= hidden:
            scores[r, :] = _F32(0)
            continue
        scores[r, :hidden] = _F32(0)
        seen = scores[r, hidden:]
        top = max(maxima[r], _row_max(seen, visible - hidden))
        if top > maxima[r]:
            keep = np.exp2(maxima[r] - top)
            maxima[r] = top
            sums[r] *= keep
            for d in range(out.shape[1]):
                out[r, d] *= keep
        sums[r] += _exp2_row(seen, visible - hidden, top)


@njit(**INNER)
def _pad_values(block, offset, tokens, padded):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """padded[:tokens] = the block's values from `offset` on, where a head is no multiple of 16; the rest stays 0."""
    for t in range(tokens):
        for d in range(block.shape[1]):
            padded[t, d] = block[offset + t, d]


@njit(**INNER)
def _add_values(weights, rows, keys, values, kv_head, table, begin, first, count, end, padded, places, out):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """out += weights[:rows, first:count] @ values of tokens begin+first..begin+count-1, block by block.

    Meanwhile the keys of the next tile are asked for, up to token `end`. `padded`, [key tile, width of out], and
    `places` are scratch.
    """
    block_tokens, head_dim, width = values.shape[2], values.shape[3], out.shape[1]
    beside = tile.PANELS_BESIDE[min(rows, tile.ROWS)]
    panels = width // tile.OUTPUTS
    t = first
    while t < count:
        token = begin + t
        offset = token % block_tokens
        tokens = min(block_tokens - offset, count - t)
        block = values[table[token // block_tokens], kv_head]
        w, stride = block.ctypes.data + offset * head_dim * values.itemsize, head_dim
        if width != head_dim:
            _pad_values(block, offset, tokens, padded)
            w, stride = padded.ctypes.data, width
        following = min(token + _KEY_TILE, end - 1)
        next_keys = keys[table[following // block_tokens], kv_head]
        ahead = next_keys.ctypes.data + following % block_tokens * keys.itemsize
        for p in range(0, panels, beside):
            for i in range(min(beside, panels - p)):
                d = (p + i) * tile.OUTPUTS
                places[0, i] = w + d * values.itemsize
                places[1, i] = ahead + d * block_tokens * keys.itemsize
            for r in range(0, rows, tile.ROWS):
                x = weights.ctypes.data + (r * _KEY_TILE + t) * 4
                y = out.ctypes.data + (r * width + p * tile.OUTPUTS) * 4
                tile.multiply(
                    values, min(tile.ROWS, rows - r), min(beside, panels - p), x, _KEY_TILE, places.ctypes.data,
                    stride, tokens, y, width, 1, block_tokens * keys.itemsize,
                )  # fmt: skip
        t += tokens


@njit(**INNER)
def item_space(rows, keys, values):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """What `attend_item` computes in: `rows` is the most of an item, its queries * the heads that share a kv head."""
    head_dim = keys.shape[2]
    width = (head_dim + tile.OUTPUTS - 1) // tile.OUTPUTS * tile.OUTPUTS
    return (
        np.empty((rows, head_dim), np.float32),
        np.empty((rows, width), np.float32),
        np.empty((rows, _KEY_TILE), np.float32),
        np.empty((tile.PANELS if keys.shape[3] % tile.OUTPUTS else 0, head_dim, tile.OUTPUTS), keys.dtype),
        np.zeros((_KEY_TILE if width != head_dim else 0, width), values.dtype),
        np.empty(rows, np.float32),
        np.empty(rows, np.float32),
        np.empty((2, tile.PANELS), np.int64),
    )


@njit(**INNER)
def attend_item(  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    q, keys, values, key_scales, value_scales, table, first_query, queries, first_position, kv_head, scale, window,
    cap, space, out,
):  # fmt: skip
    """Attention of `queries` tokens, the first at row `first_query` of q and at `first_position`, for one kv head."""
    heads, head_dim = q.shape[1], q.shape[2]
    group = heads // keys.shape[1]
    rows = queries * group
    local_q, local_out, scores, gathered, padded, maxima, sums, places = space
    local_out[:rows], maxima[:rows], sums[:rows] = _F32(0), _F32(-np.inf), _F32(0)
    factor = scale / cap if cap > _F32(0) else scale * LOG2_E
    for r in range(rows):
        source = q[first_query + r // group, kv_head * group + r % group]
        for d in range(head_dim):
            local_q[r, d] = source[d] * factor
    end = first_position + queries
    if window <= 0:
        window = end
    first = max(0, first_position + 1 - window)
    for begin in range(first - first % tile.OUTPUTS, end, _KEY_TILE):
        count = min(_KEY_TILE, end - begin)
        unseen = max(0, first - begin)
        _scores(local_q, rows, keys, values, kv_head, table, begin, first, count, gathered, places, scores)
        if key_scales.shape[0]:
            _multiply_by_scales(scores, rows, key_scales, kv_head, table, begin, unseen, count)
        if cap > _F32(0):
            _cap_scores(scores, rows, count, cap)
        _softmax_tile(scores, local_out, maxima[:rows], sums, begin, count, first_position, window, group)
        if value_scales.shape[0]:
            _multiply_by_scales(scores, rows, value_scales, kv_head, table, begin, unseen, count)
        _add_values(scores, rows, keys, values, kv_head, table, begin, unseen, count, end, padded, places, local_out)
    for r in range(rows):
        target = out[first_query + r // group, kv_head * group + r % group]
        for d in range(head_dim):
            target[d] = local_out[r, d] / sums[r]


@njit(parallel=True, **OPTIONS)
def _attend(  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    q, keys, values, key_scales, value_scales, tables, slots, query_starts, contexts, items, scale, window, cap, out
):  # fmt: skip
    for i in prange(items.shape[0]):
        row, kv_head, first, queries = items[i, 0], items[i, 1], items[i, 2], items[i, 3]
        computed = contexts[row] - (query_starts[row + 1] - query_starts[row])
        space = item_space(queries * (q.shape[1] // keys.shape[1]), keys, values)
        attend_item(
            q, keys, values, key_scales, value_scales, tables[slots[row]], query_starts[row] + first, queries,
            computed + first, kv_head, scale, window, cap, space, out,
        )  # fmt: skip


def attend(
    q: Float32s,
    cache: LayerCache,
    rows: Rows,
    items: Int64s,
    scale: float,
    window: int,
    cap: float,
    out: Float32s,
) -> None:
    """Attends, causally, to the tokens of each row, whose keys and values, the new tokens' included, are written.

    q [tokens, heads, head_dim]: the new tokens of all rows, one row after the other. items [n, 4] from `work_items`.
    scale: of the scores. window: the tokens a query sees, its own included; 0: all before it; values of tokens that no
    query of an item sees are not read. cap: a score s becomes cap * tanh(s / cap); 0: it stays. out as q, written. All
    C-contiguous. Nothing is checked here: the caller owns what the tables say. Offsets are 64-bit.
    """
    _attend(
        q, cache.keys, cache.values, cache.key_scales, cache.value_scales,
        rows.tables, rows.slots, rows.query_starts, rows.contexts, items, _F32(scale), window, _F32(cap), out,
    )  # fmt: skip
