"""The paged KV cache on the CPU: how keys and values lie, and the kernel that writes them.

    block table of a slot            keys    [num_blocks, kv_heads, head_dim, block_tokens]
    token  0..B-1  ->  7   ------>   values  [num_blocks, kv_heads, block_tokens, head_dim]
    token  B..2B-1 ->  3             scales  [num_blocks, kv_heads, block_tokens], of keys and of values; int8 alone

Keys lie token beside token, so that 16 tokens of a block are a panel of weights for the tiles of tile.py, as 16 numbers
of a value are: attention reads both as they are stored (Kwon et al. 2023, "PagedAttention", has keys in such a split
layout too).

Stored is float32; or bfloat16, as the bits of its numbers in uint16, rounded to nearest, ties to even; or int8, with a
scale a token and head: the largest magnitude over 127. A vector that holds NaN or infinity gets a scale of NaN, so that
it is seen to fail.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit, prange

from kernels.cpu.compiled import INNER, OPTIONS

_F32 = np.float32
_PARALLEL_FROM = 48
"""Tokens from which waking the other threads costs less than it saves."""
_PIECES = 16
"""Pieces of work, several a thread."""
Float32s = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class LayerCache:
    """Keys and values of one layer, laid out as above; scales of no blocks where there are none.

    Of all layers: the same with one dimension more, the first.
    """

    keys: npt.NDArray[Any]
    values: npt.NDArray[Any]
    key_scales: Float32s
    value_scales: Float32s


@dataclass(frozen=True, eq=False)
class Rows:
    """Where the tokens of a step's rows stand, as all layers see it."""

    tables: npt.NDArray[np.int32]
    """[slots, entries] a block id a block of tokens; entries past a row's context are not read"""
    slots: npt.NDArray[np.int64]
    """[rows] a row's line in `tables`"""
    query_starts: npt.NDArray[np.int64]
    """[rows + 1] where a row's tokens begin in the flat batch"""
    contexts: npt.NDArray[np.int64]
    """[rows] a row's tokens, the new ones included"""


@njit(**INNER)
def _store(x, block, first, step):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """block[first], block[first + step], ... = x [head_dim] float32, as the block stores it; returns the scale."""
    if block.itemsize == 4:
        for i in range(x.shape[0]):
            block[first + i * step] = x[i]
        return _F32(1)
    if block.itemsize == 2:
        bits = x.view(np.uint32)
        for i in range(x.shape[0]):
            odd = (bits[i] >> np.uint32(16)) & np.uint32(1)
            rounded = (bits[i] + np.uint32(0x7FFF) + odd) >> np.uint32(16)
            block[first + i * step] = rounded if x[i] == x[i] else np.uint32(0x7FC0)
        return _F32(1)
    largest, spoilt = _F32(0), _F32(0)
    for i in range(x.shape[0]):
        largest = max(largest, abs(x[i]))
        spoilt += x[i] * _F32(0)  # NaN, where x is not finite
    if largest == _F32(0) or spoilt != spoilt:
        for i in range(x.shape[0]):
            block[first + i * step] = 0
        return spoilt
    scale = largest / _F32(127)
    for i in range(x.shape[0]):
        block[first + i * step] = np.int32(np.rint(x[i] / scale))
    return scale


@njit(**INNER)
def _place(x, gain, epsilon, cos, sin, out):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """out [head_dim] = x, normed where there is a gain, its first numbers rotated by as many angles as there are.

    out_i = x_i cos_i - x_(i+n/2) sin_i and out_(i+n/2) = x_(i+n/2) cos_(i+n/2) + x_i sin_(i+n/2), i < n/2, of n angles
    (Su et al. 2021, "RoFormer", with the halves apart).
    """
    factor = _F32(1)
    if gain.shape[0]:
        total = _F32(0)
        for i in range(x.shape[0]):
            total += x[i] * x[i]
        factor = _F32(1) / np.sqrt(total / _F32(x.shape[0]) + epsilon)
        for i in range(x.shape[0]):
            out[i] = x[i] * factor * gain[i]
    else:
        for i in range(x.shape[0]):
            out[i] = x[i]
    half = cos.shape[0] // 2
    for i in range(half):
        a, b = out[i], out[i + half]
        out[i] = a * cos[i] - b * sin[i]
        out[i + half] = b * cos[i + half] + a * sin[i + half]


@njit(**INNER)
def write_head(  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    token, kv_head, block, offset, projected, cos, sin, q_gain, k_gain, epsilon, q, keys, values, key_scales,
    value_scales, key,
):  # fmt: skip
    """One kv head of a token, which lies at `offset` of `block`, and the query heads that share it; `key`: scratch."""
    heads, kv_heads, head_dim, block_tokens = q.shape[1], keys.shape[1], keys.shape[2], keys.shape[3]
    group = heads // kv_heads
    for h in range(kv_head * group, (kv_head + 1) * group):
        _place(projected[token, h], q_gain, epsilon, cos, sin, q[token, h])
    _place(projected[token, heads + kv_head], k_gain, epsilon, cos, sin, key)
    scale = _store(key, keys[block, kv_head].reshape(-1), offset, block_tokens)
    value = projected[token, heads + kv_heads + kv_head]
    value_scale = _store(value, values[block, kv_head].reshape(-1), offset * head_dim, 1)
    if key_scales.shape[0]:
        key_scales[block, kv_head, offset], value_scales[block, kv_head, offset] = scale, value_scale


@njit(**INNER)
def _write_part(  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    first, last, projected, cos, sin, q_gain, k_gain, epsilon, q, keys, values, key_scales, value_scales,
    tables, slots, query_starts, contexts,
):  # fmt: skip
    """Tokens first..last-1 of the flat batch."""
    block_tokens = keys.shape[3]
    key = np.empty(keys.shape[2], np.float32)
    for row in range(slots.shape[0]):
        begin, end = query_starts[row], query_starts[row + 1]
        for i in range(max(first, begin), min(last, end)):
            position = contexts[row] - end + i
            block, offset = tables[slots[row], position // block_tokens], position % block_tokens
            angle = i if cos.shape[1] else 0
            for h in range(keys.shape[1]):
                write_head(
                    i, h, block, offset, projected, cos[angle], sin[angle], q_gain, k_gain, epsilon, q, keys, values,
                    key_scales, value_scales, key,
                )  # fmt: skip


@njit(parallel=True, **OPTIONS)
def _write(  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    projected, cos, sin, q_gain, k_gain, epsilon, q, keys, values, key_scales, value_scales,
    tables, slots, query_starts, contexts,
):  # fmt: skip
    tokens = q.shape[0]
    if tokens < _PARALLEL_FROM:
        _write_part(
            np.int64(0), tokens, projected, cos, sin, q_gain, k_gain, epsilon, q, keys, values, key_scales,
            value_scales, tables, slots, query_starts, contexts,
        )  # fmt: skip
    else:
        for p in prange(_PIECES):
            piece = np.int64(p)  # prange counts in uint64, for which all that is called would be compiled once more
            _write_part(
                tokens * piece // _PIECES, tokens * (piece + 1) // _PIECES, projected, cos, sin, q_gain, k_gain,
                epsilon, q, keys, values, key_scales, value_scales, tables, slots, query_starts, contexts,
            )  # fmt: skip


def write(
    projected: Float32s,
    cos: Float32s,
    sin: Float32s,
    q_gain: Float32s,
    k_gain: Float32s,
    epsilon: float,
    q: Float32s,
    cache: LayerCache,
    rows: Rows,
) -> None:
    """Norms and rotates queries and keys, and writes keys and values of a step's tokens into their blocks.

    projected [tokens, heads + 2 * kv_heads, head_dim]: a token's query heads, then its key heads, then its value heads.
    cos and sin [tokens, angles], at most head_dim of them and an even number; [1, 0]: nothing is rotated. q_gain and
    k_gain [head_dim] of an RMSNorm with `epsilon` before the rotation; [0]: no norm. q [tokens, heads, head_dim] is
    written. All float32 and C-contiguous. Nothing is checked here: the caller owns what the tables say. Offsets are
    64-bit.
    """
    _write(
        projected, cos, sin, q_gain, k_gain, _F32(epsilon), q,
        cache.keys, cache.values, cache.key_scales, cache.value_scales,
        rows.tables, rows.slots, rows.query_starts, rows.contexts,
    )  # fmt: skip
