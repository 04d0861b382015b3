"""Weights of bfloat16 in 12 bits each, to the bit: a step of few rows takes as long as reading them does.

A bfloat16 is a sign, 8 bits of exponent and 7 of fraction. Trained weights of one matrix are of few exponents, so sign
and fraction are kept as they are, and the exponent becomes a code of 4 bits: its place in a table of 16 that a group of
64 depths by 16 outputs has for itself. (Zhang et al. 2025, "70% Size, 100% Accuracy", DFloat11, has codes of variable
length: 11 bits a weight, but no vector unpacks them.)

    a panel, bytes   [header | block 0 | block 1 | ..]   16 outputs; a multiple of 64
    header           16 exponents for each group, then an int32 for each: 1 + its place among the outliers, or 0
    block, 8 depths  [16 words: signs and fractions of depths 0-3 | 16 of 4-7 | 16 words: codes of all 8]

A word is an output's. Of signs and fractions, rotated right by 8 j bits, it has those of depth j where a float32 has
them (bits 31 and 16-22); of codes, shifted right by 4 j, that of depth j lowest: so a processor with AVX-512 unpacks 16
weights in four instructions (compact_tile.py).

A group with more than 16 exponents is an outlier, kept as bfloat16 besides: of numbers from a normal distribution one
in 100,000 is, of a t distribution with 3 degrees of freedom one in 33.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import carray, njit, prange, types
from numba.extending import intrinsic, overload

from kernels.cpu import compact_tile, linear, pages, phases, tile
from kernels.cpu.compact_tile import BLOCK, BLOCK_BYTES, GROUP, KEPT_BITS
from kernels.cpu.compiled import IN_ORDER, INNER_IN_ORDER

IS_SERVED = compact_tile.IS_SERVED
"""Whether this processor computes with compact weights; others keep 16 bits."""
_OUTLIERS_IN = 16
"""Of so many groups one may be an outlier; with more, a matrix stays as it is."""
_EXPONENTS = 16
_LINE = 64
_AHEAD_BYTES = 2048
"""How far before its use a word is asked of memory. Measured."""
_FEW_ROWS = 24
"""Up to so many are multiplied with what each tile unpacks in registers; more with slices that are unpacked once."""
Float32s = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Compact(linear.Packed):
    """Compact weights of a linear layer; `panels` is [panels, panel_bytes] uint8."""

    inputs: int
    outliers: npt.NDArray[np.uint16]
    """[n, GROUP, 16] the bits of groups that are kept as they were"""

    @property
    def depth(self) -> int:
        return self.inputs


def compact_bytes(outputs: int, depth: int) -> int:
    """Bytes that a weight [outputs, depth] takes without outliers."""
    return -(-outputs // tile.OUTPUTS) * int(panel_bytes(depth))


def fits(depth: int) -> bool:
    """Whether weights of this depth can be compact here."""
    return IS_SERVED and depth > 0 and depth % BLOCK == 0


def pack(weight: npt.NDArray[np.uint16]) -> linear.Packed:
    """Packs a weight [outputs, depth], the bits of bfloat16; a copy. Not compact where that does not fit."""
    outputs, depth = weight.shape
    if not fits(depth):
        return linear.pack(weight)
    panels = pages.empty((-(-outputs // tile.OUTPUTS), int(panel_bytes(depth))), np.uint8)
    groups = len(panels) * -(-depth // GROUP)
    outliers = np.zeros((groups // _OUTLIERS_IN + 1, GROUP, tile.OUTPUTS), np.uint16)
    count = _pack(np.ascontiguousarray(weight), panels, outliers)
    if count > len(outliers):
        return linear.pack(weight)
    return Compact(panels, outputs, depth, outliers[:count].copy())


def unpack(weights: linear.Packed) -> linear.Packed:
    """The same weights, not compact."""
    if not isinstance(weights, Compact):
        return weights
    panels = pages.empty((len(weights.panels), weights.depth, tile.OUTPUTS), np.uint16)
    _unpack(weights.panels, weights.outliers, weights.outputs, panels)
    return linear.Packed(panels, weights.outputs)


def joined(parts: Sequence[linear.Packed]) -> linear.Packed:
    """The outputs of all parts, one after the other; all but the last have whole panels. Compact where all are."""
    outputs = sum(one.outputs for one in parts)
    compact = [one for one in parts if isinstance(one, Compact)]
    if len(compact) < len(parts):
        return linear.Packed(pages.concatenate([unpack(one).panels for one in parts]), outputs)
    panels = pages.concatenate([one.panels for one in compact])
    first = before = 0
    for one in compact:
        places = _places(panels[first : first + len(one.panels)], one.depth)
        places += np.where(places > 0, before, 0).astype(np.int32)
        first, before = first + len(one.panels), before + len(one.outliers)
    return Compact(panels, outputs, compact[0].depth, np.concatenate([one.outliers for one in compact]))


def part(weights: linear.Packed, begin: int, end: int) -> linear.Packed:
    """Outputs begin..end-1 of weights, which they share with them; both ends lie between panels or at the end."""
    panels = weights.panels[begin // tile.OUTPUTS : -(-end // tile.OUTPUTS)]
    if isinstance(weights, Compact):
        return Compact(panels, end - begin, weights.depth, weights.outliers)
    return linear.Packed(panels, end - begin)


def gather(weights: linear.Packed, outputs: npt.NDArray[np.int64], out: Float32s) -> None:
    """As linear.gather."""
    if not isinstance(weights, Compact):
        linear.gather(weights, outputs, out)
        return
    linear.check_outputs(weights, outputs)
    _gather(weights.panels, outliers_address(weights), outputs, out)


def multiply(x: Float32s, weights: linear.Packed, bias: Float32s | None, out: Float32s, threads: int) -> None:
    """As linear.multiply, to the bit."""
    if not isinstance(weights, Compact):
        linear.multiply(x, weights, bias, out, threads)
        return
    linear.check_shapes(x, weights, out)
    if bias is not None:
        out[:] = bias
    if len(x):
        alone = x.size * weights.outputs < linear.ALONE_BELOW
        _multiply(x, weights.panels, outliers_address(weights), out, bias is not None, 1 if alone else threads)


def outliers_address(weights: linear.Packed) -> int:
    """Of the outliers, for compiled code; 0 where there are none."""
    return int(weights.outliers.ctypes.data) if isinstance(weights, Compact) and len(weights.outliers) else 0


def _places(panels: npt.NDArray[np.uint8], depth: int) -> npt.NDArray[np.int32]:
    """[panels, groups] a view: each group's 1 + place among the outliers, or 0."""
    groups = -(-depth // GROUP)
    return panels[:, _EXPONENTS * groups : (_EXPONENTS + 4) * groups].view(np.int32)


@njit(**INNER_IN_ORDER)
def _header_bytes(depth):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    groups = (depth + GROUP - 1) // GROUP
    return (groups * (_EXPONENTS + 4) + _LINE - 1) // _LINE * _LINE


@njit(**IN_ORDER)
def panel_bytes(depth):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """Of a panel of this depth, a multiple of BLOCK."""
    return _header_bytes(depth) + depth // BLOCK * BLOCK_BYTES


@intrinsic  # type: ignore[untyped-decorator]
def _pointer(context: Any, address: Any) -> Any:
    """An address as what numba makes an array of."""

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], ir.PointerType(ir.IntType(8)))

    return types.voidptr(types.int64), generate


def panels_at(address: Any, like: Any, count: Any, depth: Any) -> Any:
    """For compiled code: the panels that stand at an address, in the type of `like`."""
    raise NotImplementedError


@overload(panels_at, jit_options={"nogil": True, "error_model": "numpy"})
def _panels_at(address, like, count, depth):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    if like.dtype == types.uint8:
        return lambda address, like, count, depth: carray(_pointer(address), (count, panel_bytes(depth)), np.uint8)
    return lambda address, like, count, depth: carray(_pointer(address), (count, depth, tile.OUTPUTS), like.dtype)


@njit(**INNER_IN_ORDER)
def _outlier(panel, group, groups):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """1 + a group's place among the outliers, or 0."""
    return np.int64(panel[_EXPONENTS * groups : (_EXPONENTS + 4) * groups].view(np.int32)[group])


@njit(**INNER_IN_ORDER)
def _pack_group(weight, panel, group, code, words):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """Writes a group of weight [outputs, depth] and its table; whether it has no more exponents than that holds."""
    outputs, depth = weight.shape
    begin, end = group * GROUP, min((group + 1) * GROUP, depth)
    code[:] = -1
    found = 0
    for o in range(outputs):
        for k in range(begin, end):
            exponent = (weight[o, k] >> 7) & 255
            if code[exponent] < 0:
                if found == _EXPONENTS:
                    return False
                code[exponent] = found
                panel[group * _EXPONENTS + found] = exponent
                found += 1
    for o in range(outputs):
        for k in range(begin, end):
            bits = np.uint32(weight[o, k])
            block, j = k // BLOCK, k % BLOCK
            first, turn = block * (BLOCK_BYTES // 4) + o, np.uint32(8 * (j % 4))
            kept = (bits & np.uint32(KEPT_BITS)) << np.uint32(16)
            if turn:
                kept = (kept << turn) | (kept >> (np.uint32(32) - turn))
            words[first + j // 4 * tile.OUTPUTS] |= kept
            theirs = code[(bits >> np.uint32(7)) & np.uint32(255)]
            words[first + 2 * tile.OUTPUTS] |= np.uint32(theirs) << np.uint32(4 * j)
    return True


@njit(**IN_ORDER)
def _pack(weight, panels, outliers):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """How many outliers there are; where `outliers` does not hold them all, one more than it holds."""
    outputs, depth = weight.shape
    groups = (depth + GROUP - 1) // GROUP
    code = np.empty(256, np.int64)
    count = 0
    for p in range(panels.shape[0]):
        theirs = weight[p * tile.OUTPUTS : min((p + 1) * tile.OUTPUTS, outputs)]
        panel = panels[p]
        places = panel[_EXPONENTS * groups : (_EXPONENTS + 4) * groups].view(np.int32)
        words = panel[_header_bytes(depth) :].view(np.uint32)
        for group in range(groups):
            if _pack_group(theirs, panel, group, code, words):
                continue
            if count == outliers.shape[0]:
                return count + 1
            begin, end = group * GROUP, min((group + 1) * GROUP, depth)
            for o in range(theirs.shape[0]):
                for k in range(begin, end):
                    outliers[count, k - begin, o] = theirs[o, k]
            count += 1
            places[group] = count
    return count


@njit(**INNER_IN_ORDER)
def _bits(panel, depth, outliers, words, k, o):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """Of the bfloat16 of one output and depth."""
    groups = (depth + GROUP - 1) // GROUP
    group = k // GROUP
    place = _outlier(panel, group, groups)
    if place:
        return np.uint32(outliers[place - 1, k - group * GROUP, o])
    j = k % BLOCK
    first = k // BLOCK * (BLOCK_BYTES // 4) + o
    kept, turn = words[first + j // 4 * tile.OUTPUTS], np.uint32(8 * (j % 4))
    if turn:
        kept = (kept >> turn) | (kept << (np.uint32(32) - turn))
    code = (words[first + 2 * tile.OUTPUTS] >> np.uint32(4 * j)) & np.uint32(15)
    exponent = np.uint32(panel[group * _EXPONENTS + code])
    return ((kept >> np.uint32(16)) & np.uint32(KEPT_BITS)) | (exponent << np.uint32(7))


@njit(**IN_ORDER)
def _unpack(panels, outliers, outputs, out):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """Missing outputs stay 0."""
    for p in range(panels.shape[0]):
        words = panels[p, _header_bytes(out.shape[1]) :].view(np.uint32)
        for k in range(out.shape[1]):
            for o in range(min(tile.OUTPUTS, outputs - p * tile.OUTPUTS)):
                out[p, k, o] = _bits(panels[p], out.shape[1], outliers, words, k, o)


@njit(**INNER_IN_ORDER)
def _widen(panel, depth, outliers, begin, end, out):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """out [.., 16] float32 = depths begin..end-1 of a panel, both multiples of BLOCK."""
    groups = (depth + GROUP - 1) // GROUP
    words = panel.ctypes.data + _header_bytes(depth)
    at = begin
    while at < end:
        group = at // GROUP
        until = min((group + 1) * GROUP, end)
        place = _outlier(panel, group, groups)
        if place:
            kept_at = _pointer(outliers + (place - 1) * (2 * GROUP * tile.OUTPUTS))
            bits = carray(kept_at, (GROUP, tile.OUTPUTS), np.uint16)
            target = out.view(np.uint32)
            for k in range(at, until):
                for o in range(tile.OUTPUTS):
                    target[k - begin, o] = np.uint32(bits[k - group * GROUP, o]) << np.uint32(16)
        else:
            compact_tile.unpack(
                words + at * (BLOCK_BYTES // BLOCK), panel.ctypes.data + group * _EXPONENTS, until - at,
                out[at - begin :].ctypes.data,
            )  # fmt: skip
        at = until


@njit(**IN_ORDER)
def _gather(panels, outliers, outputs, out):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """A panel is unpacked for one of its outputs: quicker than to look for each of its bits."""
    depth = out.shape[1]
    widened = np.empty((depth, tile.OUTPUTS), np.float32)
    for i in range(outputs.shape[0]):
        _widen(panels[outputs[i] // tile.OUTPUTS], depth, outliers, 0, depth, widened)
        lane = outputs[i] % tile.OUTPUTS
        for k in range(depth):
            out[i, k] = widened[k, lane]


@njit(**INNER_IN_ORDER)
def _good_until(panels, first, count, depth, outliers, begin):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """Up to which depth from `begin` on, where a group begins, none of so many panels has an outlier."""
    if outliers == 0:
        return depth
    groups = (depth + GROUP - 1) // GROUP
    for group in range(begin // GROUP, groups):
        for p in range(first, first + count):
            if _outlier(panels[p], group, groups):
                return group * GROUP
    return depth


@njit(**INNER_IN_ORDER)
def _height(rows):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """Of the next tile for so many rows."""
    height = min(rows, np.int64(compact_tile.ROWS))
    while compact_tile.BESIDE[height] == 0:
        height -= 1
    return height


@njit(**INNER_IN_ORDER)
def _few_rows(x, panels, outliers, first, count, rows, source, y, y_stride, resume, space):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Rows that are few by `count` panels, read as they are but for outliers."""
    places = space[2]
    depth = x.shape[1]
    at, go_on = np.int64(0), np.int64(resume)
    while at < depth:
        until = _good_until(panels, first, count, depth, outliers, at)
        if until > at:
            r = np.int64(0)
            while r < rows:
                height = _height(rows - r)
                beside = count if count == compact_tile.BESIDE[height] else np.int64(1)
                for p in range(0, count, beside):
                    for i in range(beside):
                        begin = panels[first + p + i].ctypes.data
                        places[0, i] = begin + _header_bytes(depth) + at * (BLOCK_BYTES // BLOCK)
                        places[1, i] = begin + at // GROUP * _EXPONENTS
                    compact_tile.multiply(
                        height, beside, source + (r * depth + at) * 4, depth, places.ctypes.data, until - at,
                        y + (r * y_stride + p * tile.OUTPUTS) * 4, y_stride, go_on, np.int64(_AHEAD_BYTES),
                    )  # fmt: skip
                r += height
        else:
            until = min(at + GROUP, depth)
            _widened_tile(x, panels, outliers, first, count, rows, source, at, until, y, y_stride, go_on, space)
        at, go_on = until, np.int64(1)


@njit(**INNER_IN_ORDER)
def _widened_tile(x, panels, outliers, first, count, rows, source, begin, end, y, y_stride, resume, space):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Any number of rows by `count` panels, a slice of depth, by way of float32."""
    widened, _, places = space
    depth = x.shape[1]
    tiles = (rows + tile.ROWS - 1) // tile.ROWS
    step = (BLOCK_BYTES // BLOCK + tiles - 1) // tiles  # tiles share what is asked for ahead: the next panels' slice
    for p in range(count):
        _widen(panels[first + p], depth, outliers, begin, end, widened[p])
        places[0, p] = widened[p].ctypes.data
        words = panels[first + p].ctypes.data + _header_bytes(depth)
        places[1, p] = words + begin * (BLOCK_BYTES // BLOCK) + count * panels.strides[0]
    for t in range(tiles):
        r = rows * t // tiles
        tile.multiply(
            widened, rows * (t + 1) // tiles - r, count, source + (r * depth + begin) * 4, depth, places.ctypes.data,
            tile.OUTPUTS, end - begin, y + r * y_stride * 4, y_stride, resume, step,
        )  # fmt: skip
        for p in range(count):
            places[1, p] += step * (end - begin)


@njit(**INNER_IN_ORDER)
def work_space(rows):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """As linear.work_space, for either form of weights."""
    size = tile.PANELS * linear.SLICE * tile.OUTPUTS
    widened = np.empty(size + _LINE // 4, np.float32)
    begin = -(widened.ctypes.data // 4) % (_LINE // 4)  # a vector that lies in two lines is written twice as slowly
    return (
        widened[begin : begin + size].reshape(tile.PANELS, linear.SLICE, tile.OUTPUTS),
        np.empty((rows, tile.OUTPUTS), np.float32),
        np.empty((2, tile.PANELS), np.int64),
    )


@njit(**INNER_IN_ORDER)
def _compact_piece(x, panels, outliers, out, resume, first_row, rows, first_panel, last_panel, space):  # type: ignore[no-untyped-def]  # pragma: no cover
    """As linear.multiply_piece; slices go outermost, so that one of the inputs serves all panels."""
    _, tail, _ = space
    depth, outputs = x.shape[1], out.shape[1]
    whole = outputs // tile.OUTPUTS
    few = rows <= _FEW_ROWS
    most = tile.PANELS_BESIDE[tile.ROWS]
    beside = np.int64(compact_tile.BESIDE[_height(rows)] if few else linear.even_tiles(last_panel - first_panel, most))
    slices = 1 if few else (depth + linear.SLICE - 1) // linear.SLICE
    source, blocks = x.ctypes.data + first_row * depth * 4, depth // BLOCK
    for s in range(slices):
        begin, end = blocks * s // slices * BLOCK, blocks * (s + 1) // slices * BLOCK
        go_on = np.int64(1 if resume or s > 0 else 0)
        first = first_panel
        while first < last_panel:
            count = min(beside, max(min(last_panel, whole) - first, 1))
            if few and count < beside:
                count = np.int64(1)
            y, y_stride = out.ctypes.data + (first_row * outputs + first * tile.OUTPUTS) * 4, outputs
            if first == whole:
                if s == 0:
                    for r in range(rows):
                        for i in range(outputs - whole * tile.OUTPUTS):
                            tail[r, i] = out[first_row + r, whole * tile.OUTPUTS + i]
                y, y_stride = tail.ctypes.data, np.int64(tile.OUTPUTS)
            if few:
                _few_rows(x, panels, outliers, first, count, rows, source, y, y_stride, go_on, space)
            else:
                _widened_tile(
                    x, panels, outliers, first, count, rows, source, begin, end, y, y_stride, go_on, space
                )  # fmt: skip
            if first == whole and s == slices - 1:
                for r in range(rows):
                    for i in range(outputs - whole * tile.OUTPUTS):
                        out[first_row + r, whole * tile.OUTPUTS + i] = tail[r, i]
            first += count


def multiply_piece(
    x: Any, panels: Any, outliers: Any, out: Any, resume: Any, first_row: Any, rows: Any, first_panel: Any,
    last_panel: Any, space: Any,
) -> None:  # fmt: skip
    """For compiled code: linear.multiply_piece for either form of weights; `outliers` is their address, or 0."""
    raise NotImplementedError


@overload(multiply_piece, jit_options={"nogil": True, "error_model": "numpy"})
def _multiply_piece(x, panels, outliers, out, resume, first_row, rows, first_panel, last_panel, space):  # type: ignore[no-untyped-def]
    if panels.dtype == types.uint8:
        return lambda x, panels, outliers, out, resume, first_row, rows, first_panel, last_panel, space: _compact_piece(
            x, panels, outliers, out, resume, first_row, rows, first_panel, last_panel, space
        )
    return lambda x, panels, outliers, out, resume, first_row, rows, first_panel, last_panel, space: (
        linear.multiply_piece(x, panels, out, resume, first_row, rows, first_panel, last_panel, space)
    )


@njit(**INNER_IN_ORDER)
def _multiply_pieces(x, panels, outliers, out, resume, blocks, group, runs, taken):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    rows = x.shape[0]
    space = work_space(min(rows, linear.ROW_BLOCK))
    while True:
        piece = phases.fetch_add(taken.ctypes.data, 1)
        if piece >= blocks * runs:
            break
        first_row, count, first, last = linear.piece_bounds(piece, rows, panels.shape[0], blocks, group, runs)
        _compact_piece(x, panels, outliers, out, resume, first_row, count, first, last, space)


@njit(parallel=True, **IN_ORDER)
def _multiply(x, panels, outliers, out, resume, threads):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """As linear's: threads take pieces until none is left."""
    blocks, group, runs = linear.pieces(x.shape[0], panels.shape[0], threads)
    taken = np.zeros(1, np.int64)
    if threads == 1:
        _multiply_pieces(x, panels, outliers, out, resume, blocks, group, runs, taken)
    else:
        for _ in prange(threads):
            _multiply_pieces(x, panels, outliers, out, resume, blocks, group, runs, taken)
