"""Arrays larger than the machine's memory, of which little is touched."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

_NO_RESERVE = 0x4000
"""Linux's MAP_NORESERVE, which Python's mmap does not name."""


def untouched(count: int, dtype: Any) -> np.ndarray:
    """[count] zeros; a page takes memory when it is first written."""
    size = count * np.dtype(dtype).itemsize
    return np.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE), dtype)
