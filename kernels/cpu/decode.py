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
from llvmlite import ir
from numba import carray, njit, prange, types
from numba.extending import intrinsic

from kernels.cpu import phases, tile
from kernels.cpu.compiled import IN_ORDER, INNER
from kernels.cpu.elementwise import rms_norm_row, silu_multiply_row
from kernels.cpu.kv_cache import LayerCache, Rows, write_head
from kernels.cpu.linear import ALONE_BELOW, ROW_BLOCK, SLICE, multiply_piece
from kernels.cpu.paged_attention import attend_item

_F32 = np.float32
MOST_ROWS = ROW_BLOCK
_PIECE_BYTES = 32_768
"""Of weights, at least: a few microseconds."""
_PIECE_PANELS = 8
"""At most."""
_PHASES = 5

Float32s = npt.NDArray[np.float32]
Int64s = npt.NDArray[np.int64]


class Weights(NamedTuple):
    """Of layers that are alike. Where there is no bias, or no norm of heads, their arrays are empty."""

    panels: npt.NDArray[Any]
    """any of the products' panels, for their type"""
    addresses: Int64s
    """[layers, 4] of the panels [outputs / 16, depth, 16] of qkv, output, gate_up and down; kept alive by the caller"""
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
    """Of one thread, within a step."""

    normed: Float32s
    part: Float32s
    other: Float32s
    key: Float32s
    widened: Float32s
    tail: Float32s


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
    most = weights.panels.size * len(x) * len(weights.addresses)
    _run(x, weights, step, buffers, 1 if most < ALONE_BELOW else threads)


@intrinsic  # type: ignore[untyped-decorator]
def _pointer(context: Any, address: Any) -> Any:
    """An address as what numba makes an array of."""

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], ir.PointerType(ir.IntType(8)))

    return types.voidptr(types.int64), generate


@njit(**INNER)
def _panels(weights, layer, product, outputs, depth):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """[outputs / 16, depth, 16]"""
    shape = ((outputs + tile.OUTPUTS - 1) // tile.OUTPUTS, depth, tile.OUTPUTS)
    return carray(_pointer(weights.addresses[layer, product]), shape, weights.panels.dtype)


@njit(**INNER)
def _piece_panels(panels, at_once):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """Panels of a piece that reads `at_once` of them for each."""
    each = panels.shape[1] * tile.OUTPUTS * panels.itemsize * at_once
    return min(max(1, (_PIECE_BYTES + each - 1) // each), _PIECE_PANELS)


@njit(**INNER)
def _norm(x, gain, epsilon, out):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    for r in range(x.shape[0]):
        rms_norm_row(x[r], x[r, :0], gain, epsilon, out[r])


@njit(**INNER)
def _multiply(x, panels, first, last, bias, out, space):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """The first columns of out = x @ panels first..last-1, plus what is theirs of `bias`, where that is not empty."""
    begin = first * tile.OUTPUTS
    count = min(bias.shape[0] - begin, (last - first) * tile.OUTPUTS) if bias.shape[0] else 0
    for r in range(x.shape[0]):
        for i in range(count):
            out[r, i] = bias[begin + i]
    multiply_piece(x, panels[first:last], out, count > 0, 0, x.shape[0], 0, last - first, space.widened, space.tail)


@njit(**INNER)
def _product(x, gain, epsilon, panels, bias, out, adds, counters, phase, space):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """out = x @ panels + bias, or out += that; x is normed before where there is a gain."""
    size = _piece_panels(panels, 1)
    pieces = (panels.shape[0] + size - 1) // size
    piece = phases.take(counters, phase, pieces)
    source = space.normed if gain.shape[0] else x
    if piece >= 0 and gain.shape[0]:
        _norm(x, gain, epsilon, space.normed)
    while piece >= 0:
        first, last = piece * size, min((piece + 1) * size, panels.shape[0])
        _multiply(source, panels, first, last, bias, space.part, space)
        begin, end = first * tile.OUTPUTS, min(last * tile.OUTPUTS, out.shape[1])
        for r in range(x.shape[0]):
            for i in range(end - begin):
                out[r, begin + i] = space.part[r, i] + (out[r, begin + i] if adds else _F32(0))
        phases.give(counters, phase)
        piece = phases.take(counters, phase, pieces)
    phases.wait(counters, phase, pieces)


@njit(**INNER)
def _gate_up(x, gain, epsilon, panels, bias, inner, counters, phase, space):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """inner = silu(gate) * up of the normed x; the panels of ups follow those of gates."""
    gates, width = panels.shape[0] // 2, inner.shape[1]
    size = _piece_panels(panels, 2)
    pieces = (gates + size - 1) // size
    piece = phases.take(counters, phase, pieces)
    if piece >= 0:
        _norm(x, gain, epsilon, space.normed)
    while piece >= 0:
        first, last = piece * size, min((piece + 1) * size, gates)
        _multiply(space.normed, panels[:gates], first, last, bias[:width], space.part, space)
        _multiply(space.normed, panels[gates:], first, last, bias[width:], space.other, space)
        begin, end = first * tile.OUTPUTS, last * tile.OUTPUTS
        for r in range(x.shape[0]):
            silu_multiply_row(space.part[r, : end - begin], space.other[r], inner[r, begin:end])
        phases.give(counters, phase)
        piece = phases.take(counters, phase, pieces)
    phases.wait(counters, phase, pieces)


@njit(**INNER)
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
            weights.scales[layer], weights.windows[layer], weights.caps[layer], buffers.attended,
        )  # fmt: skip
        phases.give(buffers.counters, phase)
        piece = phases.take(buffers.counters, phase, pieces)
    phases.wait(buffers.counters, phase, pieces)


@njit(**INNER)
def _work(x, weights, step, buffers):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """What each thread does."""
    rows, width = x.shape
    counters, inner = buffers.counters, buffers.inner
    projected, attended = buffers.projected.reshape(rows, -1), buffers.attended.reshape(rows, -1)
    qkv_outputs, out_depth, inner_width = projected.shape[1], attended.shape[1], inner.shape[1]
    space = _Space(
        np.empty((rows, width), np.float32),
        np.empty((rows, _PIECE_PANELS * tile.OUTPUTS), np.float32),
        np.empty((rows, _PIECE_PANELS * tile.OUTPUTS), np.float32),
        np.empty(buffers.queries.shape[2], np.float32),
        np.empty((SLICE, tile.OUTPUTS), np.float32),
        np.empty((0, tile.OUTPUTS), np.float32),
    )
    for layer in range(weights.addresses.shape[0]):
        biases, no_gain, epsilon = weights.biases[layer], weights.gains[layer, 0, :0], weights.epsilon
        # Where there are none, slices of them are empty too.
        qkv_bias, rest = biases[:qkv_outputs], biases[qkv_outputs:]
        phase = layer * _PHASES
        panels = _panels(weights, layer, 0, qkv_outputs, width)
        gain = weights.gains[layer, 0]
        _product(x, gain, epsilon, panels, qkv_bias, projected, False, counters, phase, space)
        _attention(layer, weights, step, buffers, phase + 1, space)
        panels = _panels(weights, layer, 1, width, out_depth)
        _product(attended, no_gain, epsilon, panels, rest[:width], x, True, counters, phase + 2, space)
        panels = _panels(weights, layer, 2, 2 * inner_width, width)
        gain, bias = weights.gains[layer, 1], rest[width : width + 2 * inner_width]
        _gate_up(x, gain, epsilon, panels, bias, inner, counters, phase + 3, space)
        panels = _panels(weights, layer, 3, width, inner_width)
        bias = rest[width + 2 * inner_width :]
        _product(inner, no_gain, epsilon, panels, bias, x, True, counters, phase + 4, space)


@njit(parallel=True, **IN_ORDER)
def _run(x, weights, step, buffers, threads):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    buffers.counters[:] = 0
    if threads == 1:
        _work(x, weights, step, buffers)
    else:
        for _ in prange(threads):
            _work(x, weights, step, buffers)
