"""Linear layers on the CPU: weights packed once, in float32 or in the checkpoint's own bfloat16; float32 arithmetic.

    weight [outputs, depth]        packed [panels, depth, 16]: a panel is 16 outputs, contiguous in the order it is read
    o0:  a0 a1 a2 ..               panel 0:  a0 b0 .. p0 | a1 b1 .. p1 | a2 ..
    o1:  b0 b1 b2 ..                         (16 weights of depth 0, then of depth 1, ...; missing outputs are 0)

A bfloat16 is the upper half of a float32, so widening it is a shift and loses nothing, and a step of few rows, which
memory bounds, reads half the bytes.

Few rows read the panels as they are. More rows are cut so that each level of cache holds what is used again (Goto and
van de Geijn 2008, "Anatomy of High-Performance Matrix Multiplication"): a block of rows by a slice of depth stays in
the second level; a slice of one panel, widened, stays in the first; tiles of 6 rows run over it.

An output is one chain of multiply-adds in the order of depth, beginning with the bias (tile.py). So its bits depend
neither on the other rows of the product nor on the number of threads, and NaN and infinity stay in their row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit, prange

from kernels.cpu import pages, phases, tile
from kernels.cpu.compiled import IN_ORDER, INNER_IN_ORDER

_MANY_SUMS = tile.PANELS_BESIDE[tile.ROWS] > 1
"""Whether a tile of all rows has several panels: so many multiply-adds hide that weights are widened."""

SLICE = 192 if _MANY_SUMS else 320
"""The most depth of a slice: the panels of a tile, widened, are 48 or 20 KiB. Measured."""
_TILES_AT_ONCE = 4 if _MANY_SUMS else 1
"""Up to so many tiles of rows, each reads the panels as they are; more get them widened, slice by slice. Measured."""
ROW_BLOCK = 264 if _MANY_SUMS else 96
"""The most rows of a block, a slice of whose inputs is 200 or 120 KiB, a part of the second level: weights are read,
and widened, once a block. Measured."""
_SHARES = 8
"""Pieces of work a thread, so that a thread that is held up by a neighbour leaves its rest to the others."""

_AHEAD_BYTES = 3072
"""How far before its use a weight is asked of memory where a panel is read once."""

ALONE_BELOW = 400_000
"""Multiply-adds below which waking other threads takes longer than they save, some 15 us."""

Float32s = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Packed:
    """Weights of a linear layer."""

    panels: npt.NDArray[Any]
    """[panels, depth, 16] float32, or the bits of bfloat16 as uint16"""
    outputs: int

    @property
    def depth(self) -> int:
        """Inputs of the layer."""
        return int(self.panels.shape[1])


def packed_bytes(outputs: int, depth: int, itemsize: int) -> int:
    """Bytes that a weight [outputs, depth] takes once packed."""
    return -(-outputs // tile.OUTPUTS) * tile.OUTPUTS * depth * itemsize


def pack(weight: npt.NDArray[Any]) -> Packed:
    """Packs a weight [outputs, depth], float32 or the bits of bfloat16 as uint16; a copy. Raises TypeError."""
    if weight.dtype not in (np.float32, np.uint16):
        raise TypeError(f"weights are {weight.dtype}; packed are float32, and bfloat16 as uint16")
    outputs, depth = weight.shape
    panels = pages.empty((-(-outputs // tile.OUTPUTS), depth, tile.OUTPUTS), weight.dtype)
    whole = outputs // tile.OUTPUTS
    panels[:whole] = weight[: whole * tile.OUTPUTS].reshape(whole, tile.OUTPUTS, depth).transpose(0, 2, 1)
    if rest := outputs - whole * tile.OUTPUTS:
        panels[whole] = 0
        panels[whole, :, :rest] = weight[whole * tile.OUTPUTS :].T
    return Packed(panels, outputs)


def gather(weights: Packed, outputs: npt.NDArray[np.int64], out: Float32s) -> None:
    """out [n, depth] float32 = the weights of each of `outputs` [n]: an embedding held as its tied output layer.

    Raises IndexError for an output that there is not.
    """
    check_outputs(weights, outputs)
    panel, lane = np.divmod(outputs, tile.OUTPUTS)
    rows = weights.panels[panel, :, lane]
    if rows.dtype == np.uint16:
        np.left_shift(rows, 16, out=out.view(np.uint32), dtype=np.uint32)
    else:
        out[:] = rows


def multiply(x: Float32s, weights: Packed, bias: Float32s | None, out: Float32s, threads: int) -> None:
    """out = x @ weight.T + bias, by `threads` of numba's threads.

    x [rows, depth], bias [outputs] and out [rows, outputs] are float32 and C-contiguous. Raises ValueError.
    """
    rows = len(x)
    check_shapes(x, weights, out)
    if bias is not None:
        out[:] = bias
    if rows and weights.depth:
        alone = x.size * weights.outputs < ALONE_BELOW
        _multiply(x, weights.panels, out, bias is not None, 1 if alone else threads)
    elif bias is None:
        out[:] = 0


def check_outputs(weights: Packed, outputs: npt.NDArray[np.int64]) -> None:
    """Raises IndexError for one that there is not."""
    if len(outputs) and not 0 <= outputs.min() <= outputs.max() < weights.outputs:
        raise IndexError(f"outputs {outputs.min()} to {outputs.max()} are asked for, there are {weights.outputs}")


def check_shapes(x: Float32s, weights: Packed, out: Float32s) -> None:
    """Raises ValueError where a product is not of these."""
    if x.shape != (len(x), weights.depth) or out.shape != (len(x), weights.outputs):
        raise ValueError(
            f"x {x.shape} and out {out.shape} do not fit {weights.outputs} outputs and {weights.depth} inputs"
        )


@njit(**INNER_IN_ORDER)
def _widen(panel, begin, count, out):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """out [slice, 16] float32 = panel [depth, 16] of bfloat16 from `begin`, `count` deep."""
    source, target = panel[begin : begin + count].reshape(-1), out[:count].reshape(-1).view(np.uint32)
    for i in range(source.shape[0]):
        target[i] = np.uint32(source[i]) << np.uint32(16)


@njit(**INNER_IN_ORDER)
def work_space(rows):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """What `multiply_piece` computes in, for so many rows at most."""
    return (
        np.empty((tile.PANELS, SLICE if rows > _TILES_AT_ONCE * tile.ROWS else 0, tile.OUTPUTS), np.float32),
        np.empty((rows, tile.OUTPUTS), np.float32),
        np.empty((2, tile.PANELS), np.int64),
    )


@njit(**INNER_IN_ORDER)
def even_tiles(panels, most):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """Panels of each tile, at most `most`, so that the last is not much narrower: 3 and 3 of 6, and not 4 and 2."""
    tiles = max(1, (panels + most - 1) // most)
    return max(1, (panels + tiles - 1) // tiles)


@njit(**INNER_IN_ORDER)
def multiply_piece(x, panels, out, resume, first_row, rows, first_panel, last_panel, space):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Rows first_row.. of out, the outputs of panels first_panel..last_panel-1."""
    widened, tail, places = space
    depth, outputs = panels.shape[1], out.shape[1]
    tiles = (rows + tile.ROWS - 1) // tile.ROWS
    widens = panels.itemsize == 2 and tiles > _TILES_AT_ONCE
    slices = 1 if tiles <= _TILES_AT_ONCE else (depth + SLICE - 1) // SLICE
    beside = even_tiles(last_panel - first_panel, tile.PANELS_BESIDE[min(rows, tile.ROWS)])
    each = depth * tile.OUTPUTS * panels.itemsize
    ahead = _AHEAD_BYTES if tiles == 1 else beside * each
    step = tile.OUTPUTS * panels.itemsize // tiles  # tiles share what is asked for ahead
    whole = outputs // tile.OUTPUTS
    for s in range(slices):
        begin = depth * s // slices
        count = depth * (s + 1) // slices - begin
        go_on = 1 if resume or s > 0 else 0
        first = first_panel
        while first < last_panel:
            last = min(first + beside, last_panel, max(whole, first + 1))
            for p in range(first, last):
                at = panels.ctypes.data + p * each + begin * tile.OUTPUTS * panels.itemsize
                places[1, p - first] = at + ahead
                if widens:
                    _widen(panels[p], begin, count, widened[p - first])
                    at = widened[p - first].ctypes.data
                places[0, p - first] = at
            y, y_stride = out.ctypes.data + (first_row * outputs + first * tile.OUTPUTS) * 4, outputs
            if first == whole:
                if s == 0:
                    for r in range(rows):
                        for i in range(outputs - whole * tile.OUTPUTS):
                            tail[r, i] = out[first_row + r, whole * tile.OUTPUTS + i]
                y, y_stride = tail.ctypes.data, np.int64(tile.OUTPUTS)
            for t in range(tiles):
                r = rows * t // tiles
                height = rows * (t + 1) // tiles - r
                source = x.ctypes.data + ((first_row + r) * depth + begin) * 4
                if widens:
                    tile.multiply(
                        widened, height, last - first, source, depth, places.ctypes.data, tile.OUTPUTS, count,
                        y + r * y_stride * 4, y_stride, go_on, step,
                    )  # fmt: skip
                else:
                    tile.multiply(
                        panels, height, last - first, source, depth, places.ctypes.data, tile.OUTPUTS, count,
                        y + r * y_stride * 4, y_stride, go_on, step,
                    )  # fmt: skip
                for i in range(last - first):
                    places[1, i] += step * count
            if first == whole and s == slices - 1:
                for r in range(rows):
                    for i in range(outputs - whole * tile.OUTPUTS):
                        out[first_row + r, whole * tile.OUTPUTS + i] = tail[r, i]
            first = last


@njit(**INNER_IN_ORDER)
def panel_group(rows, panels, threads):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """Panels that pieces are multiples of: as many as a tile has, or one fewer where threads then end together."""
    beside = np.int64(tile.PANELS_BESIDE[min(rows, tile.ROWS)])
    if beside < 3 or threads == 1:
        return beside
    most = ((panels + beside - 1) // beside + threads - 1) // threads * beside
    fewer = ((panels + beside - 2) // (beside - 1) + threads - 1) // threads * (beside - 1)
    return beside - 1 if 30 * fewer < 29 * most else beside


@njit(**INNER_IN_ORDER)
def piece_bounds(piece, rows, panels, blocks, group, runs):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """(first row, rows, first panel, the panel after the last) of one of `pieces`."""
    block, run, groups = piece // runs, piece % runs, (panels + group - 1) // group
    first_row = rows * block // blocks
    count = rows * (block + 1) // blocks - first_row
    return first_row, count, groups * run // runs * group, min(groups * (run + 1) // runs * group, panels)


@njit(**INNER_IN_ORDER)
def _multiply_pieces(x, panels, out, resume, blocks, group, runs, taken):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    rows = x.shape[0]
    space = work_space(min(rows, ROW_BLOCK))
    while True:
        piece = phases.fetch_add(taken.ctypes.data, 1)
        if piece >= blocks * runs:
            break
        first_row, count, first, last = piece_bounds(piece, rows, panels.shape[0], blocks, group, runs)
        multiply_piece(x, panels, out, resume, first_row, count, first, last, space)


@njit(**INNER_IN_ORDER)
def pieces(rows, panels, threads):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """(blocks of rows, panels that pieces are multiples of, runs of such) that the pieces of a product are."""
    blocks = (rows + ROW_BLOCK - 1) // ROW_BLOCK
    group = panel_group(rows, panels, threads)
    runs = 1 if threads == 1 else min((panels + group - 1) // group, max(1, threads * _SHARES // blocks))
    return blocks, group, runs


@njit(parallel=True, **IN_ORDER)
def _multiply(x, panels, out, resume, threads):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """Threads take pieces (a block of rows by a run of panels) off a common counter until none is left.

    One thread is the calling one.
    """
    blocks, group, runs = pieces(x.shape[0], panels.shape[0], threads)
    taken = np.zeros(1, np.int64)
    if threads == 1:
        _multiply_pieces(x, panels, out, resume, blocks, group, runs, taken)
    else:
        for _ in prange(threads):
            _multiply_pieces(x, panels, out, resume, blocks, group, runs, taken)
