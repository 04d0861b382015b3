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

_F32, _I64, _I32, _I8 = ir.FloatType(), ir.IntType(64), ir.IntType(32), ir.IntType(8)
_F32S, _I32S, _I8S = (ir.VectorType(one, tile.OUTPUTS) for one in (_F32, _I32, _I8))
_MULTIPLY, _UNPACK = "triptych_compact_tile", "triptych_compact_unpack"
_MULTIPLY_KIND = ir.FunctionType(ir.VoidType(), [_I64] * 10)
_TILE_KIND = ir.FunctionType(ir.VoidType(), [_I64] * 8)
_UNPACK_KIND = ir.FunctionType(ir.VoidType(), [_I64] * 4)
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
        builder.call(_declared(builder.module, name, kind), values)
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
    switch = b.switch(b.add(b.mul(rows, _i64(tile.PANELS + 1)), panels), end)
    for height, beside in enumerate(BESIDE):
        for width in {1, beside} if beside else ():
            case = function.append_basic_block(f"rows_{height}_panels_{width}")
            switch.add_case(_i64(height * (tile.PANELS + 1) + width), case)
            b.position_at_end(case)
            one = ir.Function(module, _TILE_KIND, f"{_MULTIPLY}_{height}_{width}")
            one.linkage = "internal"
            one.attributes.add("noinline")
            _Body(one, height, width).write_tile()
            b.call(one, arguments)
            b.branch(end)
    b.position_at_end(end)
    b.ret_void()


class _Body:
    """Writes the instructions of one function: a loop over groups, in it one over blocks, whose depths are unrolled."""

    def __init__(self, function: Any, rows: int, panels: int) -> None:
        self._function = function
        self._rows = rows
        self._panels = panels
        self._b = ir.IRBuilder(function.append_basic_block("entry"))

    def write_tile(self) -> None:
        b = self._b
        x, x_stride, places, depth, y, y_stride, resume, ahead = self._function.args
        inputs = [b.add(x, b.mul(x_stride, _i64(4 * m))) for m in range(self._rows)]
        outputs = [
            b.add(y, b.add(b.mul(y_stride, _i64(4 * m)), _i64(4 * tile.OUTPUTS * p)))
            for m in range(self._rows)
            for p in range(self._panels)
        ]
        words, tables = (
            [self._load(b.add(places, _i64(8 * (tile.PANELS * line + p))), _I64, 8) for p in range(self._panels)]
            for line in (0, 1)
        )
        held = b.icmp_signed("!=", resume, _i64(0))
        begin = [b.select(held, self._load(at, _F32S, 4), ir.Constant(_F32S, [0.0] * tile.OUTPUTS)) for at in outputs]

        def block(k: Any, offset: Any, exponents: list[Any], sums: list[Any]) -> list[Any]:
            for at in words:
                for line in range(BLOCK_BYTES // _LINE):
                    self._prefetch(b.add(b.add(at, offset), b.add(ahead, _i64(_LINE * line))))
            for j in range(BLOCK):
                weights = [self._weights(b.add(at, offset), one, j) for at, one in zip(words, exponents, strict=True)]
                depths = b.add(b.mul(k, _i64(4)), _i64(4 * j))
                spread = [self._spread(self._load(b.add(row, depths), _F32, 4)) for row in inputs]
                pairs = [(row, panel) for row in spread for panel in weights]
                sums = [self._multiply_add(*pair, one) for pair, one in zip(pairs, sums, strict=True)]
            return sums

        sums = self._loops(tables, depth, begin, block)
        for value, at in zip(sums, outputs, strict=True):
            b.store(value, b.inttoptr(at, ir.PointerType(_F32S))).align = 4
        b.ret_void()

    def write_unpack(self) -> None:
        b = self._b
        words, tables, depth, out = self._function.args

        def block(k: Any, offset: Any, exponents: list[Any], _sums: list[Any]) -> list[Any]:
            for j in range(BLOCK):
                at = b.add(out, b.add(b.mul(k, _i64(4 * tile.OUTPUTS)), _i64(4 * tile.OUTPUTS * j)))
                weights = self._weights(b.add(words, offset), exponents[0], j)
                b.store(weights, b.inttoptr(at, ir.PointerType(_F32S))).align = 4
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
        first, number = b.phi(_I64), b.phi(_I64)
        group_sums = [b.phi(_F32S) for _ in begin]
        exponents = [self._table(b.add(one, b.mul(number, _i64(tile.OUTPUTS)))) for one in tables]
        most = b.add(first, _i64(GROUP))
        last = b.select(b.icmp_signed("<", most, depth), most, depth)
        b.branch(inner)
        b.position_at_end(inner)
        k = b.phi(_I64)
        sums = [b.phi(_F32S) for _ in begin]
        added: list[Any] = block(k, b.mul(k, _i64(BLOCK_BYTES // BLOCK)), exponents, sums)
        following = b.add(k, _i64(BLOCK))
        for phi, outer, then in zip([k, *sums], [first, *group_sums], [following, *added], strict=True):
            phi.add_incoming(outer, group)
            phi.add_incoming(then, inner)
        b.cbranch(b.icmp_signed("<", following, last), inner, after)
        b.position_at_end(after)
        heads, firsts = [first, number, *group_sums], [_i64(0), _i64(0), *begin]
        for phi, outer, then in zip(heads, firsts, [following, b.add(number, _i64(1)), *added], strict=True):
            phi.add_incoming(outer, entry)
            phi.add_incoming(then, after)
        b.cbranch(b.icmp_signed("<", following, depth), group, end)
        b.position_at_end(end)
        return added

    def _table(self, at: Any) -> Any:
        """A group's exponents, where a float32 has them."""
        b = self._b
        return b.shl(b.zext(self._load(at, _I8S, 1), _I32S), _vector(23))

    def _weights(self, at: Any, exponents: Any, j: int) -> Any:
        """16 weights of the j-th depth of a block whose words stand at `at`."""
        b, module = self._b, self._function.module
        place = j % 4
        kept = self._load(b.add(at, _i64(_LINE * (j // 4))), _I32S, 4)
        if place:
            kind = ir.FunctionType(_I32S, [_I32S, _I32S, _I32S])
            kept = b.call(_declared(module, "llvm.fshr.v16i32", kind), [kept, kept, _vector(8 * place)])
        codes = self._load(b.add(at, _i64(2 * _LINE)), _I32S, 4)
        if j:
            codes = b.lshr(codes, _vector(4 * j))
        permute = _declared(module, "llvm.x86.avx512.permvar.si.512", ir.FunctionType(_I32S, [_I32S, _I32S]))
        found = b.call(permute, [exponents, codes])
        return b.bitcast(b.or_(b.and_(kept, _vector(KEPT_BITS << 16)), found), _F32S)

    def _multiply_add(self, x: Any, weights: Any, total: Any) -> Any:
        kind = ir.FunctionType(_F32S, [_F32S, _F32S, _F32S])
        return self._b.call(_declared(self._function.module, "llvm.fma.v16f32", kind), [x, weights, total])

    def _spread(self, scalar: Any) -> Any:
        undefined = ir.Constant(_F32S, ir.Undefined)
        first = self._b.insert_element(undefined, scalar, ir.Constant(_I32, 0))
        return self._b.shuffle_vector(first, undefined, ir.Constant(_I32S, [0] * tile.OUTPUTS))

    def _prefetch(self, at: Any) -> None:
        pointer = ir.PointerType(_I8)
        kind = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
        read, keep, data = (ir.Constant(_I32, value) for value in (0, 3, 1))
        prefetch = _declared(self._function.module, "llvm.prefetch.p0", kind)
        self._b.call(prefetch, [self._b.inttoptr(at, pointer), read, keep, data])

    def _load(self, at: Any, kind: Any, align: int) -> Any:
        value = self._b.load(self._b.inttoptr(at, ir.PointerType(kind)))
        value.align = align
        return value


def _declared(module: Any, name: str, kind: Any) -> Any:
    return module.globals.get(name) or ir.Function(module, kind, name)


def _i64(value: int) -> Any:
    return ir.Constant(_I64, value)


def _vector(value: int) -> Any:
    return ir.Constant(_I32S, [value] * tile.OUTPUTS)


if IS_SERVED:
    objects.provide("compact_tiles", _module, [_MULTIPLY, _UNPACK])
