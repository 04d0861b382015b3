"""Row-by-row parts of a layer in one pass over memory each: RMSNorm and the gated product of an MLP. float32.

A row's result depends on that row alone. NaN and infinity are kept.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit, prange

_F32 = np.float32
_PARALLEL_FROM = 16_384
"""Elements from which waking the other threads costs less than it saves."""
_NAN_SAFE = {"reassoc", "contract", "arcp", "afn", "nsz"}
_OPTIONS: dict[str, Any] = {"fastmath": _NAN_SAFE, "error_model": "numpy", "nogil": True, "cache": True}
_INNER = _OPTIONS | {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}

_LOG2_E = _F32(1 / math.log(2))
# Taylor coefficients of 2^f, |f| <= 1/2: ln(2)^k / k!. The first one left out adds less than 1.3e-7.
_E1, _E2, _E3, _E4, _E5, _E6 = (_F32(math.log(2) ** k / math.factorial(k)) for k in range(1, 7))

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


@njit(**_INNER)
def _rms_norm_row(x, added, gain, epsilon, out):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    for i in range(added.shape[0]):
        x[i] += added[i]
    total = _F32(0)
    for i in range(x.shape[0]):
        total += x[i] * x[i]
    factor = _F32(1) / np.sqrt(total / _F32(x.shape[0]) + epsilon)
    for i in range(x.shape[0]):
        out[i] = x[i] * factor * gain[i]


@njit(parallel=True, **_OPTIONS)
def _rms_norm(x, added, gain, epsilon, out):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    some = added.shape[0] > 0
    if x.size < _PARALLEL_FROM:
        for r in range(x.shape[0]):
            _rms_norm_row(x[r], added[r] if some else x[r, :0], gain, epsilon, out[r])
    else:
        for r in prange(x.shape[0]):
            _rms_norm_row(x[r], added[r] if some else x[r, :0], gain, epsilon, out[r])


@njit(**_INNER)
def _silu_multiply_row(gate, up, out):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """silu(g) = g / (1 + e^-g), with e^-g = 2^n * 2^f, n written into the exponent bits.

    Outside of 2^-126..2^126 the power stands still, where silu is g or, in effect, 0. NaN goes through the product.
    """
    power_bits = np.empty(out.shape[0], np.int32)
    powers = power_bits.view(np.float32)
    for i in range(out.shape[0]):
        t = -gate[i] * _LOG2_E
        t = t if t < _F32(126) else _F32(126)
        t = t if t > _F32(-126) else _F32(-126)
        n = np.floor(t + _F32(0.5))
        f = t - n
        power_bits[i] = (np.int32(n) + np.int32(127)) << np.int32(23)
        out[i] = _F32(1) + f * (_E1 + f * (_E2 + f * (_E3 + f * (_E4 + f * (_E5 + f * _E6)))))
    for i in range(out.shape[0]):
        out[i] = gate[i] / (_F32(1) + out[i] * powers[i]) * up[i]


@njit(parallel=True, **_OPTIONS)
def _silu_multiply(gate_up, out):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    width = out.shape[1]
    if out.size < _PARALLEL_FROM:
        for r in range(out.shape[0]):
            _silu_multiply_row(gate_up[r, :width], gate_up[r, width:], out[r])
    else:
        for r in prange(out.shape[0]):
            _silu_multiply_row(gate_up[r, :width], gate_up[r, width:], out[r])
