"""Threads that go through the phases of one computation within one parallel region, and what they meet at.

A phase is a number of pieces. Whoever comes takes the next one that nobody has, and goes on once all are done:

    thread 0   take 0 | take 2 | take 3 | none left: wait for piece 1 | next phase: take 0 | ..
    thread 1   take 1 ................. | done                        | take 1 | ..

So it does not matter how many threads there are, nor whether they run at the same time: one that comes late finds
phases done and passes through them, and no thread is waited for that holds no piece. One that waits spins a little,
since a phase takes microseconds, then lets others have its core, among them whoever holds the piece it waits for.
"""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from kernels.cpu.compiled import INNER_IN_ORDER

_I64 = ir.IntType(64)
_LINE = 8
"""int64 of a line of the cache: counters that share one would be fought for."""
_SPINS = 1000
"""Before the core is given away; some 50 us."""
_X86 = platform.machine() in ("x86_64", "AMD64")

_sched_yield = types.ExternalFunction("sched_yield", types.int32())


def counters(phases: int) -> npt.NDArray[np.int64]:
    """[phases, 2, ...] pieces taken, pieces done; all 0 before the first thread begins."""
    return np.zeros((phases, 2, _LINE), np.int64)


@intrinsic  # type: ignore[untyped-decorator]
def fetch_add(context: Any, address: Any, amount: Any) -> Any:
    """For compiled code: adds to the int64 at `address` and returns what it was, at once for all threads.

    What this thread wrote before is seen by whoever then finds the sum.
    """

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(values[0], ir.PointerType(_I64)), values[1], "acq_rel")

    return types.int64(types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _look(context: Any, address: Any) -> Any:
    """The int64 at `address`, and with it all that was written before it was."""

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(values[0], ir.PointerType(_I64)), "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _pause(context: Any) -> Any:
    """Tells the processor that this thread spins, where it can be told."""

    def generate(_context: Any, builder: Any, _signature: Any, _values: Any) -> Any:
        if _X86:
            kind = ir.FunctionType(ir.VoidType(), [])
            name = "llvm.x86.sse2.pause"
            builder.call(builder.module.globals.get(name) or ir.Function(builder.module, kind, name), [])
        return _context.get_dummy_value()

    return types.void(), generate


@njit(**INNER_IN_ORDER)
def take(counters, phase, pieces):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """A piece that no other thread has; -1 where none is left."""
    piece = fetch_add(counters[phase, 0].ctypes.data, 1)
    return piece if piece < pieces else np.int64(-1)


@njit(**INNER_IN_ORDER)
def give(counters, phase):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """Says that a piece which was taken is done."""
    fetch_add(counters[phase, 1].ctypes.data, 1)


@njit(**INNER_IN_ORDER)
def wait(counters, phase, pieces):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """Returns once all pieces are done."""
    spins = 0
    while _look(counters[phase, 1].ctypes.data) < pieces:
        spins += 1
        _pause()
        if spins > _SPINS:
            _sched_yield()
