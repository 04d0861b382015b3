"""All layers of a decode step in one parallel region: a token a row, at most MOST_ROWS rows.

A layer by itself is a dozen calls from Python, for each of which other threads are woken; at few rows that takes as
long as what they compute. Here threads are woken once and go through the phases of phases.py together, five a layer:

    qkv        norm(x) @ queries, keys and values      a piece: some panels of weights
    attention  rotate, write to the cache, attend      a piece: a row's kv head
    output     x += attended @ output                  a piece: some panels
    gate_up    silu(gate) * up of norm(x)              a piece: some panels of gates and those of ups beside them
    down       x += inner @ down                       a piece: some panels

A norm is computed by each thread for itself, which takes less than to wait for another's. What a number is computed by
are the functions that compute it in larger steps (linear.py, elementwise.py, kv_cache.py, paged_attention.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit, prange, set_num_threads

from kernels.cpu import phases, tile
from kernels.cpu.compact import multiply_piece, panels_at, work_space
from kernels.cpu.compiled import IN_ORDER, INNER, PART
from kernels.cpu.elementwise import rms_norm_row, silu_multiply_row
from kernels.cpu.kv_cache import LayerCache, Rows, write_head
from kernels.cpu.linear import ALONE_BELOW
from kernels.cpu.paged_attention import attend_item, item_space

MOST_ROWS = 96
_PIECE_BYTES = 32_768
"""Of weights, at least: a few microseconds."""
_PIECE_PANELS = 8
"""At most."""
_PIECES_A_THREAD = 4
"""At least, where that leaves whole tiles."""
_PHASES = 5
_PLAIN, _ADDED, _GATES = 0, 1, 2
"""What becomes of a product: it is written, or added to what is there, or its gates are multiplied with its ups."""

Float32s = npt.NDArray[np.float32]
Int64s = npt.NDArray[np.int64]


class Weights(NamedTuple):
    """Of layers that are alike. Where there is no bias, or no norm of heads, their arrays are empty."""

    panels: npt.NDArray[Any]
    """any of the products' panels, for their type"""
    addresses: Int64s
    """[layers, 4] of the panels of qkv, output, gate_up and down; kept alive by the caller"""
    outliers: Int64s
    """[layers, 4] addresses, of compact panels' outliers; 0: none"""
    biases: Float32s
    """[layers, outputs of the four, one after the other], or [layers, 0]"""
    gains: Float32s
    """[layers, 2, width] of the norms before attention and before the MLP"""
    epsilon: np.float32
    head_gains: Float32s
    """[layers, 2, head_dim] of queries and keys, or [layers, 2, 0]"""
    head_epsilon: np.float32
    scales: Float32s
    """[layers] of scores"""
    windows: Int64s
    """[layers] 0: none"""
    caps: Float32s
    """[layers] 0: none"""


class Buffers(NamedTuple):
    """What threads hand one another within a step."""

    projected: Float32s
    """[rows, heads + 2 * kv_heads, head_dim]"""
    queries: Float32s
    """[rows, heads, head_dim]"""
    attended: Float32s
    """[rows, heads, head_dim]"""
    inner: Float32s
    """[rows, inner width]"""
    counters: Int64s
    """of `counters`"""


class _Step(NamedTuple):
    """Of rows: where they stand, and what is turned by."""

    tables: npt.NDArray[np.int32]
    slots: Int64s
    contexts: Int64s
    order: Int64s
    cos: Float32s
    sin: Float32s
    keys: npt.NDArray[Any]
    values: npt.NDArray[Any]
    key_scales: Float32s
    value_scales: Float32s


class _Space(NamedTuple):
    """Of one thread, within a step. Made before it takes a piece: one that fails then would be waited for forever."""

    normed: Float32s
    parts: Float32s
    key: Float32s
    product: tuple[npt.NDArray[Any], ...]
    """of linear.py"""
    item: tuple[npt.NDArray[Any], ...]
    """of attention"""


def counters(layers: int) -> Int64s:
    """Of a step through so many layers."""
    return phases.counters(_PHASES * layers)


def run(
    x: Float32s, weights: Weights, cache: LayerCache, rows: Rows, cos: Float32s, sin: Float32s, buffers: Buffers,
    threads: int,
) -> None:  # fmt: skip
    """x [rows, width] becomes what the layers make of it, and each row's key and value are written.

    `cache` is of all layers: its arrays have one dimension more, the first. cos and sin [rows, angles], or [1, 0]: no
    rotation. All C-contiguous. Nothing is checked here: the caller owns what the tables say.
    """
    order = np.argsort(-rows.contexts, kind="stable")
    step = _Step(
        rows.tables, rows.slots, rows.contexts, order, cos, sin,
        cache.keys, cache.values, cache.key_scales, cache.value_scales,
    )  # fmt: skip
    if buffers.projected.size * x.shape[1] * len(weights.addresses) > ALONE_BELOW:
        _run(x, weights, step, buffers, threads)
        return
    set_num_threads(1)
    try:
        _run(x, weights, step, buffers, 1)
    finally:
        set_num_threads(threads)


@njit(**PART)
def _multiply(x, panels, outliers, bias, out, space):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """The first columns of out = x @ panels + bias, where that is not empty."""
    for r in range(x.shape[0]):
        for i in range(bias.shape[0]):
            out[r, i] = bias[i]
    multiply_piece(x, panels, outliers, out, bias.shape[0] > 0, 0, x.shape[0], 0, panels.shape[0], space.product)


@njit(**PART)
def _piece_panels(rows, count, each_bytes, threads):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """Of a piece: whole tiles, if there are some pieces a thread then."""
    size = min(max(1, (_PIECE_BYTES + each_bytes - 1) // each_bytes), _PIECE_PANELS)
    beside = tile.PANELS_BESIDE[min(rows, tile.ROWS)]
    if size % beside and count >= beside * _PIECES_A_THREAD * threads:
        size += beside - size % beside
    return size


@njit(**PART)
def _product(x, gain, epsilon, panels, outliers, bias, out, kind, counters, phase, space, threads):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """out = x @ panels + bias, or what `kind` makes of it; x is normed before where there is a gain."""
    halves = 2 if kind == _GATES else 1
    count, outputs = panels.shape[0] // halves, out.shape[1]
    size = _piece_panels(x.shape[0], count, panels.strides[0] * halves, threads)
    large = count // (size * threads) * threads  # as many for each thread; what is left goes panel by panel
    pieces = large + count - large * size
    piece = phases.take(counters, phase, pieces)
    source = space.normed if gain.shape[0] else x
    if piece >= 0 and gain.shape[0]:
        for r in range(x.shape[0]):
            rms_norm_row(x[r], x[r, :0], gain, epsilon, space.normed[r])
    while piece >= 0:
        first = piece * size if piece < large else large * size + piece - large
        last = first + (size if piece < large else 1)
        begin, end = first * tile.OUTPUTS, min(last * tile.OUTPUTS, outputs)
        for half in range(halves):
            theirs = bias[half * outputs + begin : half * outputs + end]
            theirs_panels = panels[half * count + first : half * count + last]
            _multiply(source, theirs_panels, outliers, theirs, space.parts[half], space)
        for r in range(x.shape[0]):
            part = space.parts[0, r, : end - begin]
            if kind == _GATES:
                silu_multiply_row(part, space.parts[1, r], out[r, begin:end])
            elif kind == _ADDED:
                for i in range(end - begin):
                    out[r, begin + i] += part[i]
            else:
                for i in range(end - begin):
                    out[r, begin + i] = part[i]
        phases.give(counters, phase)
        piece = phases.take(counters, phase, pieces)
    phases.wait(counters, phase, pieces)


@njit(**PART)
def _attention(layer, weights, step, buffers, phase, space):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """Of each row and kv head: rotates, writes, attends."""
    keys, values = step.keys[layer], step.values[layer]
    key_scales, value_scales = step.key_scales[layer], step.value_scales[layer]
    block_tokens, kv_heads = keys.shape[3], keys.shape[1]
    q_gain, k_gain = weights.head_gains[layer, 0], weights.head_gains[layer, 1]
    pieces = step.order.shape[0] * kv_heads
    piece = phases.take(buffers.counters, phase, pieces)
    while piece >= 0:
        row, kv_head = step.order[piece // kv_heads], piece % kv_heads
        table, position = step.tables[step.slots[row]], step.contexts[row] - 1
        angle = row if step.cos.shape[1] else 0
        write_head(
            row, kv_head, table[position // block_tokens], position % block_tokens, buffers.projected,
            step.cos[angle], step.sin[angle], q_gain, k_gain, weights.head_epsilon, buffers.queries, keys, values,
            key_scales, value_scales, space.key,
        )  # fmt: skip
        attend_item(
            buffers.queries, keys, values, key_scales, value_scales, table, row, 1, position, kv_head,
            weights.scales[layer], weights.windows[layer], weights.caps[layer], space.item, buffers.attended,
        )  # fmt: skip
        phases.give(buffers.counters, phase)
        piece = phases.take(buffers.counters, phase, pieces)
    phases.wait(buffers.counters, phase, pieces)


@njit(**INNER)
def _work(x, weights, step, buffers, threads):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """What each thread does."""
    rows, width = x.shape
    counters, inner = buffers.counters, buffers.inner
    projected, attended = buffers.projected.reshape(rows, -1), buffers.attended.reshape(rows, -1)
    space = _Space(
        np.empty((rows, width), np.float32),
        np.empty((2, rows, _PIECE_PANELS * tile.OUTPUTS), np.float32),
        np.empty(buffers.queries.shape[2], np.float32),
        work_space(rows),
        item_space(buffers.queries.shape[1] // step.keys.shape[2], step.keys[0], step.values[0]),
    )
    sources, outs, kinds = (x, attended, x, inner), (projected, x, inner, x), (_PLAIN, _ADDED, _GATES, _ADDED)
    for layer in range(weights.addresses.shape[0]):
        phase, begin = layer * _PHASES, 0
        for product in range(4):
            source, out, kind = sources[product], outs[product], kinds[product]
            outputs = out.shape[1] * (2 if kind == _GATES else 1)
            count = (outputs + tile.OUTPUTS - 1) // tile.OUTPUTS
            panels = panels_at(weights.addresses[layer, product], weights.panels, count, source.shape[1])
            gain = weights.gains[layer, product // 2, : width if product % 2 == 0 else 0]
            bias = weights.biases[layer, begin : begin + outputs]  # of nothing, where there are none
            outliers = weights.outliers[layer, product]
            _product(source, gain, weights.epsilon, panels, outliers, bias, out, kind, counters, phase, space, threads)
            begin += outputs
            phase += 1
            if product == 0:
                _attention(layer, weights, step, buffers, phase, space)
                phase += 1


@njit(parallel=True, **IN_ORDER)
def _run(x, weights, step, buffers, threads):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    buffers.counters[:] = 0
    for _ in prange(threads):
        _work(x, weights, step, buffers, threads)
