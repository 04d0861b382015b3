"""The sampler's noise: a function of a seed and a position alone, so that neither neighbours nor preemption change it.

Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011). The key is the
request's 64-bit seed, low word first; the counter is (position's low word, position's high word, 0, 0), where position
counts output ids from 0. One position gives one uniform number, its first two words.

With several choices a request, the seed of a choice will be derive(seed, choice): seed itself for choice 0, else the
first two words of the block at counter (choice, 0, 0, 1). The last counter word keeps these apart from every draw.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 10
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def philox4x32(counter: NDArray[np.uint32], key: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Blocks of 4 random words, [n, 4] uint32, for counters [n, 4] and keys [n, 2], words in the paper's order."""
    c0, c1, c2, c3 = counter.T.astype(np.uint64)
    k0, k1 = key.T.astype(np.uint64)
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (product1 >> _32) ^ c1 ^ k0, product1 & _LOW, (product0 >> _32) ^ c3 ^ k1, product0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def uniform(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits for each (seed, position), [n] float64."""
    key = np.stack([seeds & _LOW, seeds >> _32], axis=1).astype(np.uint32)
    counter = np.zeros((len(positions), 4), dtype=np.uint32)
    counter[:, 0], counter[:, 1] = positions & _LOW, positions >> _32
    words = philox4x32(counter, key).astype(np.uint64)
    bits = ((words[:, 0] >> np.uint64(5)) << np.uint64(26)) | (words[:, 1] >> np.uint64(6))
    return bits.astype(np.float64) * 2.0**-53
