"""The sampler's noise: a function of a seed and a position alone, so that neither neighbours nor preemption change it.

Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011). The key is the
request's 64-bit seed, low word first; the counter is (position's low word, position's high word, 0, 0), where position
counts output ids from 0. One position gives one uniform number, its first two words.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from services.common.philox import philox4x32

_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def uniform(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits for each (seed, position), [n] float64."""
    key = np.stack([seeds & _LOW, seeds >> _32], axis=1).astype(np.uint32)
    counter = np.zeros((len(positions), 4), dtype=np.uint32)
    counter[:, 0], counter[:, 1] = positions & _LOW, positions >> _32
    words = philox4x32(counter, key).astype(np.uint64)
    bits = ((words[:, 0] >> np.uint64(5)) << np.uint64(26)) | (words[:, 1] >> np.uint64(6))
    return bits.astype(np.float64) * 2.0**-53
