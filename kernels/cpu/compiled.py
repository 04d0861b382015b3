"""How the kernels are compiled, and what they all compute with."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

IN_ORDER: dict[str, Any] = {"error_model": "numpy", "nogil": True, "cache": True}
"""Nothing is reordered: a result is the same, to the bit, wherever it is computed."""
OPTIONS: dict[str, Any] = IN_ORDER | {"fastmath": {"reassoc", "contract", "arcp", "afn", "nsz"}}
"""Sums may be reordered, but NaN and infinity are kept (no nnan, ninf): a row that holds them is seen to fail."""
_ALONE = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
INNER_IN_ORDER = IN_ORDER | _ALONE
INNER = OPTIONS | _ALONE
"""Of functions that compiled code alone calls."""
PART = INNER | {"inline": "always"}
"""Of functions with one caller, which they become a part of. numba turns any other one into machine code by itself too,
with all that it calls."""

_F32 = np.float32
LOG2_E = _F32(1 / math.log(2))
# Taylor coefficients of 2^f, |f| <= 1/2: ln(2)^k / k!. The first one left out adds less than 1.3e-7.
_E1, _E2, _E3, _E4, _E5, _E6 = (_F32(math.log(2) ** k / math.factorial(k)) for k in range(1, 7))


@intrinsic  # type: ignore[untyped-decorator]
def _float_of(context: Any, bits: Any) -> Any:
    """The float32 of 32 bits."""

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return builder.bitcast(values[0], ir.FloatType())

    return types.float32(types.int32), generate


@njit(**INNER)
def exp2(x):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """2^x for x from -126 to 126: 2^n * 2^f with n = round(x), written into the exponent bits. NaN stays NaN."""
    n = np.floor(x + _F32(0.5))
    f = x - n
    power = _float_of(np.int32((np.int32(n if n > _F32(-126) else _F32(-126)) + np.int32(127)) << np.int32(23)))
    return (_F32(1) + f * (_E1 + f * (_E2 + f * (_E3 + f * (_E4 + f * (_E5 + f * _E6)))))) * power
