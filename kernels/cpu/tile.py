"""The innermost loop of a matrix product, written as LLVM vector instructions so that it is fast without a compiler.

numba does not vectorize a loop that keeps a tile of sums in registers, so the loop is emitted here, instruction by
instruction, as functions that compiled code calls. They are machine code of their own, made once (objects.py), since
numba would compile what it calls again in every function that calls it.

Vectors are 16 float32 wide; LLVM cuts them into what the CPU has: one register of AVX-512's, two of AVX2's, four of
NEON's. A tile is some rows by some panels of 16 outputs, as many panels as registers hold the sums of:

    AVX-512, 32 registers   6 rows by 4 panels    24 sums, 4 weights, inputs broadcast from memory
    AVX2,    16 registers   6 rows by 1 panel     12 sums, 2 weights, 1 input

(Van Zee and van de Geijn 2015, "BLIS", has the second for Haswell.) So many sums do not wait for one another: a
multiply-add takes four cycles or more, in which a core begins eight.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.cpu import objects
from kernels.cpu.vectors import F32S, I8, I32S, I64, LANES, Writer, declared, i64

OUTPUTS = LANES
"""Outputs of a panel of weights."""
ROWS = 6
"""The most rows of a tile."""
PANELS = 4
"""The most panels of a tile."""


def _panels_beside(rows: int) -> int:
    """Panels of a tile of so many rows: registers for their sums, for a panel's weights each, and for an input."""
    fitting = [n for n in range(1, PANELS + 1) if objects.REGISTERS_A_VECTOR * n * (rows + 1) < objects.REGISTERS]
    return max(fitting, default=1)


PANELS_BESIDE = (0, *map(_panels_beside, range(1, ROWS + 1)))
"""The most panels of a tile, by its rows."""

_I16S, _I8S = (ir.VectorType(one, OUTPUTS) for one in (ir.IntType(16), I8))
_SHIFT = ir.Constant(I32S, [16] * OUTPUTS)
_STORED = {types.float32: F32S, types.uint16: _I16S, types.int8: _I8S}
"""How 16 weights of an array lie in memory; uint16 are the bits of bfloat16."""
_BYTES = {F32S: 4, _I16S: 2, _I8S: 1}
_ARGUMENTS = 11
_KIND = ir.FunctionType(ir.VoidType(), [I64] * _ARGUMENTS)


@intrinsic  # type: ignore[untyped-decorator]
def multiply(
    context: Any,
    stored: Any,
    rows: Any,
    panels: Any,
    x: Any,
    x_stride: Any,
    places: Any,
    w_stride: Any,
    depth: Any,
    y: Any,
    y_stride: Any,
    resume: Any,
    ahead_step: Any,
) -> Any:
    """For compiled code: y [rows, panels * 16] float32 = x [rows, depth] float32 @ weights [depth, 16] of each panel,
    plus what y held where `resume` is not 0.

    `stored` is any array of the weights' type: float32, bfloat16 as uint16, or int8. All others are int64, the arrays
    as addresses. rows is 1 to ROWS, panels 1 to PANELS_BESIDE[rows], depth 1 or more. Strides are between rows, in
    elements. places, int64 [2, PANELS]: where each panel's weights stand, and what the cache is asked for meanwhile,
    that line, that plus ahead_step (bytes), ..., one for each element of depth: what will be read next.

    Each output is one chain of fused multiply-adds in the order of depth: its bits depend neither on the tile's shape
    nor on where `depth` is cut, so a row's result is the same whatever rows share the product.
    """
    name = _name(_STORED[stored.dtype])

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        found = builder.module.globals.get(name) or ir.Function(builder.module, _KIND, name)
        builder.call(found, values[1:])
        return _context.get_dummy_value()

    return types.void(stored, *(types.int64,) * _ARGUMENTS), generate


def _name(stored: Any) -> str:
    return f"triptych_tile_{stored.element}"


def _module() -> str:
    """All tiles, as LLVM's text."""
    module = ir.Module("tiles")
    for stored in _STORED.values():
        _dispatcher(module, stored)
    return str(module)


def _dispatcher(module: Any, stored: Any) -> None:
    """The function that goes to the tile of so many rows and panels."""
    function = ir.Function(module, _KIND, _name(stored))
    rows, panels, *arguments = function.args
    b = ir.IRBuilder(function.append_basic_block("entry"))
    end = function.append_basic_block("end")
    switch = b.switch(b.add(b.mul(rows, i64(PANELS + 1)), panels), end)
    for height in range(1, ROWS + 1):
        for width in range(1, PANELS_BESIDE[height] + 1):
            case = function.append_basic_block(f"rows_{height}_panels_{width}")
            switch.add_case(i64(height * (PANELS + 1) + width), case)
            b.position_at_end(case)
            b.call(_tile_function(module, height, width, stored), arguments)
            b.branch(end)
    b.position_at_end(end)
    b.ret_void()


def _tile_function(module: Any, rows: int, panels: int, stored: Any) -> Any:
    kind = ir.FunctionType(ir.VoidType(), [I64] * (_ARGUMENTS - 2))
    function = ir.Function(module, kind, f"{_name(stored)}_{rows}_{panels}")
    function.linkage = "internal"
    function.attributes.add("noinline")
    _Body(function, rows, panels, stored).write()
    return function


class _Body(Writer):
    """Of one tile function."""

    def __init__(self, function: Any, rows: int, panels: int, stored: Any) -> None:
        super().__init__(function)
        self._rows = rows
        self._panels = panels
        self._stored = stored

    def write(self) -> None:
        b, function = self._b, self._function
        x, x_stride, places, w_stride, depth, y, y_stride, resume, ahead_step = function.args
        inputs = [b.add(x, b.mul(x_stride, i64(4 * m))) for m in range(self._rows)]
        outputs = [
            b.add(y, b.add(b.mul(y_stride, i64(4 * m)), i64(4 * OUTPUTS * p)))
            for m in range(self._rows)
            for p in range(self._panels)
        ]
        weights, ahead = (
            [self._load(b.add(places, i64(8 * (PANELS * line + p))), I64, 8) for p in range(self._panels)]
            for line in (0, 1)
        )
        zero = ir.Constant(F32S, [0.0] * OUTPUTS)
        held = b.icmp_signed("!=", resume, i64(0))
        begin = [b.select(held, self._load(at, F32S, 4), zero) for at in outputs]
        w_step = b.mul(w_stride, i64(_BYTES[self._stored]))
        entry, loop, end = b.block, function.append_basic_block("loop"), function.append_basic_block("end")
        b.branch(loop)
        b.position_at_end(loop)
        k = b.phi(I64)
        sums = [b.phi(F32S) for _ in begin]
        for at in ahead:
            self._prefetch(b.add(at, b.mul(k, ahead_step)))
        added = self._step(inputs, [b.add(w, b.mul(k, w_step)) for w in weights], k, sums)
        following = b.add(k, i64(1))
        for phi, first, then in zip([k, *sums], [i64(0), *begin], [following, *added], strict=True):
            phi.add_incoming(first, entry)
            phi.add_incoming(then, loop)
        b.cbranch(b.icmp_signed("<", following, depth), loop, end)
        b.position_at_end(end)
        for value, at in zip(added, outputs, strict=True):
            b.store(value, b.inttoptr(at, ir.PointerType(F32S))).align = 4
        b.ret_void()

    def _step(self, inputs: list[Any], places: list[Any], k: Any, sums: list[Any]) -> list[Any]:
        """The sums after the k-th element of depth, whose weights stand at `places`."""
        b = self._b
        weights = [self._widened(at) for at in places]
        kind = ir.FunctionType(F32S, [F32S, F32S, F32S])
        multiply_add = declared(self._function.module, "llvm.fmuladd.v16f32", kind)
        rows = [self._spread(b.add(row, b.mul(k, i64(4)))) for row in inputs]
        pairs = [(row, panel) for row in rows for panel in weights]
        return [b.call(multiply_add, [*pair, one]) for pair, one in zip(pairs, sums, strict=True)]

    def _widened(self, at: Any) -> Any:
        """16 weights as float32; a bfloat16 is the upper half of one."""
        b, stored = self._b, self._load(at, self._stored, _BYTES[self._stored])
        if self._stored is F32S:
            return stored
        if self._stored is _I8S:
            return b.sitofp(b.sext(stored, I32S), F32S)
        return b.bitcast(b.shl(b.zext(stored, I32S), _SHIFT), F32S)


objects.provide("tiles", _module, [_name(stored) for stored in _STORED.values()])
