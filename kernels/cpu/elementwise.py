"""Row-by-row parts of a layer in one pass over memory each: RMSNorm and the gated product of an MLP. float32.

A row's result depends on that row alone. NaN and infinity are kept.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit, prange

from kernels.cpu.compiled import INNER, LOG2_E, OPTIONS, exp2

_F32 = np.float32
_PARALLEL_FROM = 16_384
"""Elements from which waking the other threads costs less than it saves."""
Float32s = npt.NDArray[np.float32]


_NOTHING = np.zeros((0, 0), np.float32)


def rms_norm(x: Float32s, gain: Float32s, epsilon: float, out: Float32s, added: Float32s | None = None) -> None:
    """out = x / sqrt(mean(x^2) + epsilon) * gain, by rows (Zhang and Sennrich 2019); x and out [rows, width].

    Where something is `added`, as x, it is added to x first, which is changed. `out` may be x otherwise.
    """
    _rms_norm(x, _NOTHING if added is None else added, gain, _F32(epsilon), out)


def silu_multiply(gate_up: Float32s, out: Float32s) -> None:
    """out [rows, width] = silu(gate) * up (Shazeer 2020); gate_up [rows, 2 * width] holds gates, then ups."""
    _silu_multiply(gate_up, out)


@njit(**INNER)
def rms_norm_row(x, added, gain, epsilon, out):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    for i in range(added.shape[0]):
        x[i] += added[i]
    total = _F32(0)
    for i in range(x.shape[0]):
        total += x[i] * x[i]
    factor = _F32(1) / np.sqrt(total / _F32(x.shape[0]) + epsilon)
    for i in range(x.shape[0]):
        out[i] = x[i] * factor * gain[i]


@njit(parallel=True, **OPTIONS)
def _rms_norm(x, added, gain, epsilon, out):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    some = added.shape[0] > 0
    if x.size < _PARALLEL_FROM:
        for r in range(x.shape[0]):
            rms_norm_row(x[r], added[r] if some else x[r, :0], gain, epsilon, out[r])
    else:
        for r in prange(x.shape[0]):
            rms_norm_row(x[r], added[r] if some else x[r, :0], gain, epsilon, out[r])


@njit(**INNER)
def silu_multiply_row(gate, up, out):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """silu(g) = g / (1 + e^-g).

    Outside of 2^-126..2^126 the power stands still, where silu is g or, in effect, 0. NaN goes through the product.
    """
    for i in range(out.shape[0]):
        t = -gate[i] * LOG2_E
        t = t if t < _F32(126) else _F32(126)
        t = t if t > _F32(-126) else _F32(-126)
        out[i] = gate[i] / (_F32(1) + exp2(t)) * up[i]


@njit(parallel=True, **OPTIONS)
def _silu_multiply(gate_up, out):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    width = out.shape[1]
    if out.size < _PARALLEL_FROM:
        for r in range(out.shape[0]):
            silu_multiply_row(gate_up[r, :width], gate_up[r, width:], out[r])
    else:
        for r in prange(out.shape[0]):
            silu_multiply_row(gate_up[r, :width], gate_up[r, width:], out[r])
