"""Paged causal attention on the CPU: float32, grouped queries, any block size, any head size, windows, soft caps.

The softmax is computed online over tiles of keys (Milakov and Gimelshein 2018, "Online normalizer calculation for
softmax"; Dao et al. 2022, "FlashAttention"), keys and values are found through block tables (Kwon et al. 2023,
"PagedAttention").

                 block table of a slot          a K or V tensor, [num_blocks, num_kv_heads, block_tokens, head_dim]
    token  0..B-1   ->  entry 0: block 7   ---->  [7, kv_head, token % B, :]
    token  B..2B-1  ->  entry 1: block 3   ---->  [3, kv_head, token % B, :]
    past the context -> entry 2: -1               never read

One work item is (row, kv head, tile of the row's queries). All G = query heads / kv heads that share a kv head are
handled together, so each key and value is fetched once for G * tile queries. Items of one call write disjoint outputs.

Floating point: products may be reassociated, but NaN and infinity are kept (no nnan, ninf), so that a row whose KV
holds NaN is seen to fail.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import get_num_threads, njit, prange, set_num_threads

from kernels.cpu import tile

float32 = _F32 = np.float32
"""Type of `scale` and `cap`: another would compile the kernel once more."""
_KEY_TILE = 64
_QUERIES_AN_ITEM = 96
"""Query heads * tokens an item aims at: a tile of keys is transposed once for all of them."""
_TRANSPOSE_FROM = 8
"""Queries from which transposing a tile of keys costs less than it saves."""
_NAN_SAFE = {"reassoc", "contract", "arcp", "afn", "nsz"}
_OPTIONS: dict[str, Any] = {"fastmath": _NAN_SAFE, "error_model": "numpy", "nogil": True, "cache": True}

_LOG2_E = _F32(1 / math.log(2))
# Taylor coefficients of 2^f, |f| <= 1/2: ln(2)^k / k!. The first one left out adds less than 1.3e-7.
_E1, _E2, _E3, _E4, _E5, _E6 = (_F32(math.log(2) ** k / math.factorial(k)) for k in range(1, 7))

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]


__all__ = ["attend", "float32", "get_num_threads", "set_num_threads", "work_items"]


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


@njit(**_OPTIONS)
def _dot_2x4(q0, q1, k0, k1, k2, k3):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """Eight dot products; eight accumulators are what the sixteen vector registers hold beside the operands."""
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = _F32(0)
    for i in range(q0.shape[0]):
        x, y = q0[i], q1[i]
        a0 += x * k0[i]
        a1 += x * k1[i]
        a2 += x * k2[i]
        a3 += x * k3[i]
        b0 += y * k0[i]
        b1 += y * k1[i]
        b2 += y * k2[i]
        b3 += y * k3[i]
    return a0, a1, a2, a3, b0, b1, b2, b3


@njit(**_OPTIONS)
def _scores(q, keys, kv_head, table, block_tokens, start, count, scores):  # type: ignore[no-untyped-def]
    """scores[:, :count] = q @ keys of tokens start..start+count-1, for few queries; q has an even number of rows.

    A group of four that reaches past `count` repeats the last key: nothing that is not written is read.
    """
    last = count - 1
    for t in range(0, count, 4):
        t0, t1 = start + t, start + min(t + 1, last)
        t2, t3 = start + min(t + 2, last), start + min(t + 3, last)
        k0 = keys[table[t0 // block_tokens], kv_head, t0 % block_tokens]
        k1 = keys[table[t1 // block_tokens], kv_head, t1 % block_tokens]
        k2 = keys[table[t2 // block_tokens], kv_head, t2 % block_tokens]
        k3 = keys[table[t3 // block_tokens], kv_head, t3 % block_tokens]
        for r in range(0, q.shape[0], 2):
            a0, a1, a2, a3, b0, b1, b2, b3 = _dot_2x4(q[r], q[r + 1], k0, k1, k2, k3)
            scores[r, t], scores[r, t + 1], scores[r, t + 2], scores[r, t + 3] = a0, a1, a2, a3
            scores[r + 1, t], scores[r + 1, t + 1], scores[r + 1, t + 2], scores[r + 1, t + 3] = b0, b1, b2, b3


@njit(**_OPTIONS)
def _scores_transposed(q, rows, keys, kv_head, table, block_tokens, start, count, transposed, scores):  # type: ignore[no-untyped-def]
    """The same for many queries, `rows` of q, by tiles; `transposed` is scratch [key tile / 16, head_dim, 16]."""
    head_dim = q.shape[1]
    panels = (count + tile.OUTPUTS - 1) // tile.OUTPUTS
    for p in range(panels):
        panel = transposed[p]
        for t in range(tile.OUTPUTS):
            token = start + min(p * tile.OUTPUTS + t, count - 1)
            key = keys[table[token // block_tokens], kv_head, token % block_tokens]
            for d in range(head_dim):
                panel[d, t] = key[d]
    for p in range(panels):
        w = transposed.ctypes.data + p * head_dim * tile.OUTPUTS * 4
        for r in range(0, rows, tile.ROWS):
            x = q.ctypes.data + r * head_dim * 4
            y = scores.ctypes.data + (r * _KEY_TILE + p * tile.OUTPUTS) * 4
            tile.float32(
                min(tile.ROWS, rows - r), x, head_dim, w, tile.OUTPUTS, head_dim, y, _KEY_TILE, 0, w, tile.OUTPUTS
            )


@njit(**_OPTIONS)
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


@njit(**_OPTIONS)
def _exp2_row(row, count, shift, power_bits, powers):  # type: ignore[no-untyped-def]
    """row[:count] = 2^(row - shift), row[count:] = 0; returns the sum. `powers` is `power_bits` seen as float32.

    2^x = 2^n * 2^f with n = round(x), written into the exponent bits. Below 2^-126 it is 2^-126, in effect 0.
    """
    for i in range(count):
        x = row[i] - shift
        x = _F32(-126) if x < _F32(-126) else x
        n = np.floor(x + _F32(0.5))
        f = x - n
        power_bits[i] = (np.int32(n if n > _F32(-126) else _F32(-126)) + np.int32(127)) << np.int32(23)
        row[i] = _F32(1) + f * (_E1 + f * (_E2 + f * (_E3 + f * (_E4 + f * (_E5 + f * _E6)))))
    total = _F32(0)
    for i in range(count):
        row[i] *= powers[i]
        total += row[i]
    for i in range(count, row.shape[0]):
        row[i] = _F32(0)
    return total


@njit(**_OPTIONS)
def _cap_scores(scores, rows, count, cap):  # type: ignore[no-untyped-def]
    """scores[:rows, :count] = cap * log2(e) * tanh(scores): soft caps (Gemma Team 2024, "Gemma 2", section 2)."""
    for r in range(rows):
        for t in range(count):
            scores[r, t] = cap * _LOG2_E * np.tanh(scores[r, t])


@njit(**_OPTIONS)
def _softmax_tile(scores, out, maxima, sums, start, count, first_position, window, group, power_bits, powers):  # type: ignore[no-untyped-def]
    """Turns a tile of scores into weights relative to each query's running maximum, rescaling what came before.

    Query r stands at position first_position + r // group and sees the `window` tokens up to it:

        tile:   start | unseen ... | seen ... | unseen ... | start + count
                       0        hidden     visible
    """
    for r in range(maxima.shape[0]):
        position = first_position + r // group
        visible = min(count, position + 1 - start)
        hidden = max(0, position + 1 - window - start)
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
        sums[r] += _exp2_row(seen, visible - hidden, top, power_bits, powers)


@njit(**_OPTIONS)
def _add_values(weights, values, kv_head, table, block_tokens, start, count, out):  # type: ignore[no-untyped-def]
    """out += weights[:, :count] @ values, token by token; for any head size."""
    last = count - 1
    for t in range(0, count, 4):
        t0, t1 = start + t, start + min(t + 1, last)
        t2, t3 = start + min(t + 2, last), start + min(t + 3, last)
        v0 = values[table[t0 // block_tokens], kv_head, t0 % block_tokens]
        v1 = values[table[t1 // block_tokens], kv_head, t1 % block_tokens]
        v2 = values[table[t2 // block_tokens], kv_head, t2 % block_tokens]
        v3 = values[table[t3 // block_tokens], kv_head, t3 % block_tokens]
        for r in range(out.shape[0]):
            _add_4(out[r], weights[r, t : t + 4], v0, v1, v2, v3)


@njit(**_OPTIONS)
def _add_4(out, w, v0, v1, v2, v3):  # type: ignore[no-untyped-def]
    w0, w1, w2, w3 = w[0], w[1], w[2], w[3]
    for d in range(out.shape[0]):
        out[d] += w0 * v0[d] + w1 * v1[d] + w2 * v2[d] + w3 * v3[d]


@njit(**_OPTIONS)
def _add_values_tiled(weights, rows, values, kv_head, table, block_tokens, start, count, out):  # type: ignore[no-untyped-def]
    """The same, block by block, for `rows` of weights and a head size that is a multiple of 16."""
    head_dim = out.shape[1]
    t = 0
    while t < count:
        first = (start + t) % block_tokens
        tokens = min(block_tokens - first, count - t)
        block = values[table[(start + t) // block_tokens], kv_head]
        following = values[table[min(start + t + tokens, start + count - 1) // block_tokens], kv_head]
        for d in range(0, head_dim, tile.OUTPUTS):
            w = block.ctypes.data + (first * head_dim + d) * 4
            ahead = following.ctypes.data + d * 4
            for r in range(0, rows, tile.ROWS):
                x = weights.ctypes.data + (r * _KEY_TILE + t) * 4
                y = out.ctypes.data + (r * head_dim + d) * 4
                height = min(tile.ROWS, rows - r)
                tile.float32(height, x, _KEY_TILE, w, head_dim, tokens, y, head_dim, 1, ahead, head_dim * 4)
        t += tokens


@njit(**_OPTIONS)
def _attend_item(q, keys, values, table, first_query, queries, first_position, kv_head, scale, window, cap, out):  # type: ignore[no-untyped-def]
    """Attention of `queries` tokens, the first at row `first_query` of q and at `first_position`, for one kv head."""
    heads, head_dim = q.shape[1], q.shape[2]
    block_tokens = keys.shape[2]
    group = heads // keys.shape[1]
    rows = queries * group
    even = rows + rows % 2
    local_q = np.zeros((even, head_dim), np.float32)
    local_out = np.zeros((even, head_dim), np.float32)
    scores = np.zeros((even, _KEY_TILE), np.float32)
    many = rows >= _TRANSPOSE_FROM
    transposed = np.empty((_KEY_TILE // tile.OUTPUTS if many else 0, head_dim, tile.OUTPUTS), np.float32)
    maxima = np.full(rows, -np.inf, np.float32)
    sums = np.zeros(rows, np.float32)
    power_bits = np.empty(_KEY_TILE, np.int32)
    powers = power_bits.view(np.float32)
    factor = scale / cap if cap > _F32(0) else scale * _LOG2_E
    for r in range(rows):
        source = q[first_query + r // group, kv_head * group + r % group]
        for d in range(head_dim):
            local_q[r, d] = source[d] * factor
    end = first_position + queries
    if window <= 0:
        window = end
    for start in range(max(0, first_position + 1 - window), end, _KEY_TILE):
        count = min(_KEY_TILE, end - start)
        if many:
            _scores_transposed(local_q, rows, keys, kv_head, table, block_tokens, start, count, transposed, scores)
        else:
            _scores(local_q, keys, kv_head, table, block_tokens, start, count, scores)
        if cap > _F32(0):
            _cap_scores(scores, rows, count, cap)
        _softmax_tile(scores, local_out, maxima, sums, start, count, first_position, window, group, power_bits, powers)
        if head_dim % tile.OUTPUTS == 0:
            _add_values_tiled(scores, rows, values, kv_head, table, block_tokens, start, count, local_out)
        else:
            _add_values(scores, values, kv_head, table, block_tokens, start, count, local_out)
    for r in range(rows):
        target = out[first_query + r // group, kv_head * group + r % group]
        for d in range(head_dim):
            target[d] = local_out[r, d] / sums[r]


@njit(**_OPTIONS)
def _write_kv(k, v, keys, values, tables, slots, query_starts, contexts):  # type: ignore[no-untyped-def]
    block_tokens = keys.shape[2]
    for row in range(slots.shape[0]):
        table = tables[slots[row]]
        begin, end = query_starts[row], query_starts[row + 1]
        position = contexts[row] - (end - begin)
        for i in range(begin, end):
            block, offset = table[position // block_tokens], position % block_tokens
            for h in range(keys.shape[1]):
                for d in range(keys.shape[3]):
                    keys[block, h, offset, d] = k[i, h, d]
                    values[block, h, offset, d] = v[i, h, d]
            position += 1


@njit(parallel=True, **_OPTIONS)
def attend(q, k, v, keys, values, tables, slots, query_starts, contexts, items, scale, window, cap, out):  # type: ignore[no-untyped-def]
    """Writes the new tokens' keys and values into their blocks, then attends, causally, to the tokens of each row.

    q [tokens, heads, head_dim] float32, k and v [tokens, kv_heads, head_dim] float32: the new tokens of all rows, one
    row after the other. keys and values [num_blocks, kv_heads, block_tokens, head_dim] float32, written. tables
    [slots, entries] int32, a block id a block of tokens; entries past a row's context are not read. slots [rows] int64:
    a row's line in `tables`. query_starts [rows + 1] int64: where a row's tokens begin. contexts [rows] int64: a row's
    tokens, the new ones included. items [n, 4] int64 from `work_items`. scale: float32, of the scores. window: int, the
    tokens a query sees, its own included; 0: all before it; tokens that no query of an item sees are not read. cap:
    float32, a score s becomes cap * tanh(s / cap); 0: it stays. out as q, written.
    All C-contiguous. Nothing is checked here: the caller owns what the tables say. Offsets are 64-bit.
    """
    _write_kv(k, v, keys, values, tables, slots, query_starts, contexts)
    for i in prange(items.shape[0]):
        row, kv_head, first, queries = items[i, 0], items[i, 1], items[i, 2], items[i, 3]
        computed = contexts[row] - (query_starts[row + 1] - query_starts[row])
        _attend_item(
            q,
            keys,
            values,
            tables[slots[row]],
            query_starts[row] + first,
            queries,
            computed + first,
            kv_head,
            scale,
            window,
            cap,
            out,
        )
