"""Matrix products over compact weights (compact.py), which are unpacked in registers: AVX-512 alone.

16 weights of one depth are one vector. What compact.py lays into its words is so that few instructions bring it back:

    rotate   a word's bits, until sign and fraction of this depth are where a float32 has them
    shift    the codes, until this depth's are lowest
    permute  the group's 16 exponents, a register, by the lowest 4 bits of each code: what is above them is ignored
    ternary  (rotated & mask) | exponents

A row then adds a multiply-add. So a core unpacks faster than memory delivers, and the float32 that is multiplied is the
bfloat16's, to the bit; sums are chains of fused multiply-adds in the order of depth, as tile.py's.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.cpu import objects, tile
from kernels.cpu.vectors import F32S, I8, I32S, I64, Writer, declared, i64

BLOCK = 8
"""Depths whose codes fill a word."""
GROUP = 64
"""The most depths that share a table of exponents."""
BLOCK_BYTES = 192
"""Of a panel: two vectors of signs and fractions, one of codes."""
KEPT_BITS = 0x807F
"""Sign and fraction of a bfloat16."""
BESIDE = (*tile.PANELS_BESIDE, 0, 3, 0, 0, 0, 2, 0, 0, 0, 1)
"""The most panels of a tile, by its rows; 0: there is no such tile. Higher ones unpack less often for their rows."""
ROWS = len(BESIDE) - 1
"""The most rows of a tile."""
IS_SERVED = objects.LANES == 16
"""Whether the processor has what this is written in."""

_I8S = ir.VectorType(I8, tile.OUTPUTS)
_MULTIPLY, _UNPACK = "triptych_compact_tile", "triptych_compact_unpack"
_MULTIPLY_KIND = ir.FunctionType(ir.VoidType(), [I64] * 10)
_TILE_KIND = ir.FunctionType(ir.VoidType(), [I64] * 8)
_UNPACK_KIND = ir.FunctionType(ir.VoidType(), [I64] * 4)
_LINE = 64


@intrinsic  # type: ignore[untyped-decorator]
def multiply(
    context: Any, rows: Any, panels: Any, x: Any, x_stride: Any, places: Any, depth: Any, y: Any, y_stride: Any,
    resume: Any, ahead: Any,
) -> Any:  # fmt: skip
    """For compiled code: y [rows, panels * 16] float32 = x [rows, depth] float32 @ weights [depth, 16] of each panel,
    plus what y held where `resume` is not 0.

    All are int64, the arrays as addresses. panels is 1 or BESIDE[rows], which is not 0; depth is a multiple of BLOCK.
    places, int64 [2, PANELS]: where each panel's words stand, and its tables, both at the begin of a group. `ahead`
    (bytes): how far before its use memory is asked for a word. Strides are between rows, in elements.
    """
    return types.void(*(types.int64,) * 10), _caller(_MULTIPLY, _MULTIPLY_KIND)


@intrinsic  # type: ignore[untyped-decorator]
def unpack(context: Any, words: Any, tables: Any, depth: Any, out: Any) -> Any:
    """For compiled code: out [depth, 16] float32, of a panel from the begin of a group on. All int64, as above."""
    return types.void(*(types.int64,) * 4), _caller(_UNPACK, _UNPACK_KIND)


def _caller(name: str, kind: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        builder.call(declared(builder.module, name, kind), values)
        return _context.get_dummy_value()

    return generate


def _module() -> str:
    """All functions, as LLVM's text."""
    module = ir.Module("compact_tiles")
    _dispatcher(module)
    _Body(ir.Function(module, _UNPACK_KIND, _UNPACK), 0, 1).write_unpack()
    return str(module)


def _dispatcher(module: Any) -> None:
    """The function that goes to the tile of so many rows and panels."""
    function = ir.Function(module, _MULTIPLY_KIND, _MULTIPLY)
    rows, panels, *arguments = function.args
    b = ir.IRBuilder(function.append_basic_block("entry"))
    end = function.append_basic_block("end")
    switch = b.switch(b.add(b.mul(rows, i64(tile.PANELS + 1)), panels), end)
    for height, beside in enumerate(BESIDE):
        for width in {1, beside} if beside else ():
            case = function.append_basic_block(f"rows_{height}_panels_{width}")
            switch.add_case(i64(height * (tile.PANELS + 1) + width), case)
            b.position_at_end(case)
            one = ir.Function(module, _TILE_KIND, f"{_MULTIPLY}_{height}_{width}")
            one.linkage = "internal"
            one.attributes.add("noinline")
            _Body(one, height, width).write_tile()
            b.call(one, arguments)
            b.branch(end)
    b.position_at_end(end)
    b.ret_void()


class _Body(Writer):
    """Of one function: a loop over groups, in it one over blocks, whose depths are unrolled."""

    def __init__(self, function: Any, rows: int, panels: int) -> None:
        super().__init__(function)
        self._rows = rows
        self._panels = panels

    def write_tile(self) -> None:
        b = self._b
        x, x_stride, places, depth, y, y_stride, resume, ahead = self._function.args
        inputs = [b.add(x, b.mul(x_stride, i64(4 * m))) for m in range(self._rows)]
        outputs = [
            b.add(y, b.add(b.mul(y_stride, i64(4 * m)), i64(4 * tile.OUTPUTS * p)))
            for m in range(self._rows)
            for p in range(self._panels)
        ]
        words, tables = (
            [self._load(b.add(places, i64(8 * (tile.PANELS * line + p))), I64, 8) for p in range(self._panels)]
            for line in (0, 1)
        )
        held = b.icmp_signed("!=", resume, i64(0))
        begin = [b.select(held, self._load(at, F32S, 4), ir.Constant(F32S, [0.0] * tile.OUTPUTS)) for at in outputs]

        def block(k: Any, offset: Any, exponents: list[Any], sums: list[Any]) -> list[Any]:
            for at in words:
                for line in range(BLOCK_BYTES // _LINE):
                    self._prefetch(b.add(b.add(at, offset), b.add(ahead, i64(_LINE * line))))
            for j in range(BLOCK):
                weights = [self._weights(b.add(at, offset), one, j) for at, one in zip(words, exponents, strict=True)]
                depths = b.add(b.mul(k, i64(4)), i64(4 * j))
                spread = [self._spread(b.add(row, depths)) for row in inputs]
                pairs = [(row, panel) for row in spread for panel in weights]
                sums = [self._multiply_add(*pair, one) for pair, one in zip(pairs, sums, strict=True)]
            return sums

        sums = self._loops(tables, depth, begin, block)
        for value, at in zip(sums, outputs, strict=True):
            b.store(value, b.inttoptr(at, ir.PointerType(F32S))).align = 4
        b.ret_void()

    def write_unpack(self) -> None:
        b = self._b
        words, tables, depth, out = self._function.args

        def block(k: Any, offset: Any, exponents: list[Any], _sums: list[Any]) -> list[Any]:
            for j in range(BLOCK):
                at = b.add(out, b.add(b.mul(k, i64(4 * tile.OUTPUTS)), i64(4 * tile.OUTPUTS * j)))
                weights = self._weights(b.add(words, offset), exponents[0], j)
                b.store(weights, b.inttoptr(at, ir.PointerType(F32S))).align = 4
            return []

        self._loops([tables], depth, [], block)
        b.ret_void()

    def _loops(self, tables: list[Any], depth: Any, begin: list[Any], block: Any) -> list[Any]:
        """Calls `block` for each block: its first depth, where its words are, exponents and sums; gives the sums."""
        b, function = self._b, self._function
        entry = b.block
        group, inner, after, end = (function.append_basic_block(name) for name in ("group", "block", "after", "end"))
        b.branch(group)
        b.position_at_end(group)
        first, number = b.phi(I64), b.phi(I64)
        group_sums = [b.phi(F32S) for _ in begin]
        exponents = [self._table(b.add(one, b.mul(number, i64(tile.OUTPUTS)))) for one in tables]
        most = b.add(first, i64(GROUP))
        last = b.select(b.icmp_signed("<", most, depth), most, depth)
        b.branch(inner)
        b.position_at_end(inner)
        k = b.phi(I64)
        sums = [b.phi(F32S) for _ in begin]
        added: list[Any] = block(k, b.mul(k, i64(BLOCK_BYTES // BLOCK)), exponents, sums)
        following = b.add(k, i64(BLOCK))
        for phi, outer, then in zip([k, *sums], [first, *group_sums], [following, *added], strict=True):
            phi.add_incoming(outer, group)
            phi.add_incoming(then, inner)
        b.cbranch(b.icmp_signed("<", following, last), inner, after)
        b.position_at_end(after)
        heads, firsts = [first, number, *group_sums], [i64(0), i64(0), *begin]
        for phi, outer, then in zip(heads, firsts, [following, b.add(number, i64(1)), *added], strict=True):
            phi.add_incoming(outer, entry)
            phi.add_incoming(then, after)
        b.cbranch(b.icmp_signed("<", following, depth), group, end)
        b.position_at_end(end)
        return added

    def _table(self, at: Any) -> Any:
        """A group's exponents, where a float32 has them."""
        b = self._b
        return b.shl(b.zext(self._load(at, _I8S, 1), I32S), _vector(23))

    def _weights(self, at: Any, exponents: Any, j: int) -> Any:
        """16 weights of the j-th depth of a block whose words stand at `at`."""
        b, module = self._b, self._function.module
        place = j % 4
        kept = self._load(b.add(at, i64(_LINE * (j // 4))), I32S, 4)
        if place:
            kind = ir.FunctionType(I32S, [I32S, I32S, I32S])
            kept = b.call(declared(module, "llvm.fshr.v16i32", kind), [kept, kept, _vector(8 * place)])
        codes = self._load(b.add(at, i64(2 * _LINE)), I32S, 4)
        if j:
            codes = b.lshr(codes, _vector(4 * j))
        permute = declared(module, "llvm.x86.avx512.permvar.si.512", ir.FunctionType(I32S, [I32S, I32S]))
        found = b.call(permute, [exponents, codes])
        return b.bitcast(b.or_(b.and_(kept, _vector(KEPT_BITS << 16)), found), F32S)

    def _multiply_add(self, x: Any, weights: Any, total: Any) -> Any:
        kind = ir.FunctionType(F32S, [F32S, F32S, F32S])
        return self._b.call(declared(self._function.module, "llvm.fma.v16f32", kind), [x, weights, total])


def _vector(value: int) -> Any:
    return ir.Constant(I32S, [value] * tile.OUTPUTS)


if IS_SERVED:
    objects.provide("compact_tiles", _module, [_MULTIPLY, _UNPACK])
