"""The innermost loop of a matrix product, written as LLVM vector instructions so that it is fast without a compiler.

numba does not vectorize a loop that keeps a tile of sums in registers, so the loop is emitted here, instruction by
instruction, as functions that compiled code calls. Vectors are 16 float32 wide; LLVM cuts them into what the CPU has
(two of AVX2's, one of AVX-512's, four of NEON's or SSE's). A tile of 6 rows by 16 outputs keeps 12 sums, 2 weights and
1 broadcast input in AVX2's 16 registers (the shape of Van Zee and van de Geijn 2015, "BLIS", on Haswell).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

OUTPUTS = 16
"""Outputs of a tile: the width of a panel of weights."""
ROWS = 6
"""The most rows of a tile."""

_F32, _I64, _I32, _I16, _I8 = ir.FloatType(), ir.IntType(64), ir.IntType(32), ir.IntType(16), ir.IntType(8)
_F32S, _I32S, _I16S, _I8S = (ir.VectorType(one, OUTPUTS) for one in (_F32, _I32, _I16, _I8))
_SHIFT = ir.Constant(_I32S, [16] * OUTPUTS)
_STORED = {types.float32: _F32S, types.uint16: _I16S, types.int8: _I8S}
"""How 16 weights of an array lie in memory; uint16 are the bits of bfloat16."""
_ARGUMENTS = 11


@intrinsic  # type: ignore[untyped-decorator]
def multiply(
    context: Any,
    stored: Any,
    rows: Any,
    x: Any,
    x_stride: Any,
    w: Any,
    w_stride: Any,
    depth: Any,
    y: Any,
    y_stride: Any,
    resume: Any,
    ahead: Any,
    ahead_step: Any,
) -> Any:
    """For compiled code: y [rows, 16] float32 = x [rows, depth] float32 @ w [depth, 16], plus what y held where
    `resume` is not 0.

    `stored` is any array of the weights' type: float32, bfloat16 as uint16, or int8. All others are int64, the arrays
    as addresses. rows is 1 to ROWS, depth 1 or more. Strides are between rows, in elements. Meanwhile the cache is
    asked for ahead, ahead + ahead_step, ... (bytes), a line for each element of depth: what will be read next.

    Each output is one chain of fused multiply-adds in the order of depth: its bits depend neither on the tile's shape
    nor on where `depth` is cut, so a row's result is the same whatever rows share the product.
    """
    vector = _STORED[stored.dtype]

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        builder.call(_dispatcher(builder.module, vector), values[1:])
        return _context.get_dummy_value()

    return types.void(stored, *(types.int64,) * _ARGUMENTS), generate


def _dispatcher(module: Any, stored: Any) -> Any:
    """The function that goes to the tile of so many rows."""
    name = f"triptych_tile_{stored.element}"
    if (found := module.globals.get(name)) is not None:
        return found
    function = _function(module, name, _ARGUMENTS)
    rows, *arguments = function.args
    b = ir.IRBuilder(function.append_basic_block("entry"))
    end = function.append_basic_block("end")
    switch = b.switch(rows, end)
    for count in range(1, ROWS + 1):
        case = function.append_basic_block(f"rows_{count}")
        switch.add_case(_i64(count), case)
        b.position_at_end(case)
        b.call(_tile_function(module, count, stored), arguments)
        b.branch(end)
    b.position_at_end(end)
    b.ret_void()
    return function


def _function(module: Any, name: str, arguments: int) -> Any:
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_I64] * arguments), name)
    function.linkage = "linkonce_odr"
    function.attributes.add("noinline")  # once in the machine code, and compiled once
    return function


def _tile_function(module: Any, rows: int, stored: Any) -> Any:
    function = _function(module, f"triptych_tile_{stored.element}_{rows}", _ARGUMENTS - 1)
    _Body(function, rows, stored).write()
    return function


class _Body:
    """Writes the instructions of one tile function."""

    def __init__(self, function: Any, rows: int, stored: Any) -> None:
        self._function = function
        self._rows = rows
        self._stored = stored
        self._weight_bytes = {_F32S: 4, _I16S: 2, _I8S: 1}[stored]
        self._b = ir.IRBuilder(function.append_basic_block("entry"))

    def write(self) -> None:
        b, function = self._b, self._function
        x, x_stride, w, w_stride, depth, y, y_stride, resume, ahead, ahead_step = function.args
        inputs = [b.add(x, b.mul(x_stride, _i64(4 * m))) for m in range(self._rows)]
        outputs = [b.add(y, b.mul(y_stride, _i64(4 * m))) for m in range(self._rows)]
        zero = ir.Constant(_F32S, [0.0] * OUTPUTS)
        held = b.icmp_signed("!=", resume, _i64(0))
        begin = [b.select(held, self._load(at, _F32S), zero) for at in outputs]
        w_step = b.mul(w_stride, _i64(self._weight_bytes))
        entry, loop, end = b.block, function.append_basic_block("loop"), function.append_basic_block("end")
        b.branch(loop)
        b.position_at_end(loop)
        k = b.phi(_I64)
        sums = [b.phi(_F32S) for _ in begin]
        self._prefetch(b.add(ahead, b.mul(k, ahead_step)))
        added = self._step(inputs, b.add(w, b.mul(k, w_step)), k, sums)
        following = b.add(k, _i64(1))
        for phi, first, then in zip([k, *sums], [_i64(0), *begin], [following, *added], strict=True):
            phi.add_incoming(first, entry)
            phi.add_incoming(then, loop)
        b.cbranch(b.icmp_signed("<", following, depth), loop, end)
        b.position_at_end(end)
        for value, at in zip(added, outputs, strict=True):
            b.store(value, b.inttoptr(at, ir.PointerType(_F32S))).align = 4
        b.ret_void()

    def _step(self, inputs: list[Any], at: Any, k: Any, sums: list[Any]) -> list[Any]:
        """The sums after the k-th element of depth, whose weights stand at `at`."""
        b = self._b
        weights = self._widened(at)
        kind = ir.FunctionType(_F32S, [_F32S, _F32S, _F32S])
        multiply_add = _declared(self._function.module, "llvm.fmuladd.v16f32", kind)
        rows = [self._spread(self._load(b.add(row, b.mul(k, _i64(4))), _F32)) for row in inputs]
        return [b.call(multiply_add, [row, weights, one]) for row, one in zip(rows, sums, strict=True)]

    def _widened(self, at: Any) -> Any:
        """16 weights as float32; a bfloat16 is the upper half of one."""
        b, stored = self._b, self._load(at, self._stored)
        if self._stored is _F32S:
            return stored
        if self._stored is _I8S:
            return b.sitofp(b.sext(stored, _I32S), _F32S)
        return b.bitcast(b.shl(b.zext(stored, _I32S), _SHIFT), _F32S)

    def _spread(self, scalar: Any) -> Any:
        """A vector of the same number 16 times."""
        undefined = ir.Constant(_F32S, ir.Undefined)
        first = self._b.insert_element(undefined, scalar, ir.Constant(_I32, 0))
        return self._b.shuffle_vector(first, undefined, ir.Constant(_I32S, [0] * OUTPUTS))

    def _prefetch(self, at: Any) -> None:
        pointer = ir.PointerType(ir.IntType(8))
        kind = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
        read, keep, data = (ir.Constant(_I32, value) for value in (0, 3, 1))
        prefetch = _declared(self._function.module, "llvm.prefetch.p0", kind)
        self._b.call(prefetch, [self._b.inttoptr(at, pointer), read, keep, data])

    def _load(self, at: Any, kind: Any) -> Any:
        value = self._b.load(self._b.inttoptr(at, ir.PointerType(kind)))
        value.align = self._weight_bytes if kind is self._stored else 4
        return value


def _declared(module: Any, name: str, kind: Any) -> Any:
    return module.globals.get(name) or ir.Function(module, kind, name)


def _i64(value: int) -> Any:
    return ir.Constant(_I64, value)
