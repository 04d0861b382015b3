"""Arrays in memory of their own, for weights: what is not used any more goes back to the system at once.

malloc would keep the holes that weights leave behind which were joined with others, in one heap a thread.
"""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt


def empty(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """An array of zeros that takes no memory before it is written; it begins at a page. Raises MemoryError."""
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return np.empty(shape, dtype)
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"there is no memory for {size} bytes of weights") from error
    return np.frombuffer(pages, dtype).reshape(shape)


def concatenate(parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """The parts one after the other along their first dimension; a copy."""
    joined = empty((sum(len(part) for part in parts), *parts[0].shape[1:]), parts[0].dtype)
    np.concatenate(parts, out=joined)
    return joined
