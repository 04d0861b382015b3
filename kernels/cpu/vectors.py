"""LLVM instructions on vectors of 16, as tile.py and compact_tile.py write them."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

LANES = 16
_F32, I64, _I32, I8 = ir.FloatType(), ir.IntType(64), ir.IntType(32), ir.IntType(8)
F32S, I32S = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)


class Writer:
    """Writes the instructions of one function; addresses are int64."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self._b = ir.IRBuilder(function.append_basic_block("entry"))

    def _load(self, at: Any, kind: Any, align: int) -> Any:
        value = self._b.load(self._b.inttoptr(at, ir.PointerType(kind)))
        value.align = align
        return value

    def _spread(self, at: Any) -> Any:
        """A vector of the float32 at an address 16 times."""
        undefined = ir.Constant(F32S, ir.Undefined)
        first = self._b.insert_element(undefined, self._load(at, _F32, 4), ir.Constant(_I32, 0))
        return self._b.shuffle_vector(first, undefined, ir.Constant(I32S, [0] * LANES))

    def _prefetch(self, at: Any) -> None:
        """Asks the first level for a line that will be read."""
        pointer = ir.PointerType(I8)
        kind = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
        read, keep, data = (ir.Constant(_I32, value) for value in (0, 3, 1))
        prefetch = declared(self._function.module, "llvm.prefetch.p0", kind)
        self._b.call(prefetch, [self._b.inttoptr(at, pointer), read, keep, data])


def declared(module: Any, name: str, kind: Any) -> Any:
    """A function of the module, declared once."""
    return module.globals.get(name) or ir.Function(module, kind, name)


def i64(value: int) -> Any:
    """A constant."""
    return ir.Constant(I64, value)
