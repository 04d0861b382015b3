"""Philox4x32-10, the counter-based generator behind all noise (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as
easy as 1, 2, 3", SC 2011), and the seeds of a request's choices, which are made with it."""

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


def derived_seed(seed: int, choice: int) -> int:
    """Seed of a choice: `seed` itself for choice 0, else the first two words of the block at counter (choice, 0, 0, 1).

    Draws have counters that end in 0, so no choice's seed is a number that was drawn. Both are uint64. A request of n
    choices gives the ids of n requests with these seeds.
    """
    if choice == 0:
        return seed
    counter = np.array([[choice, 0, 0, 1]], dtype=np.uint32)
    key = np.array([[seed & 0xFFFFFFFF, seed >> 32]], dtype=np.uint32)
    low, high = philox4x32(counter, key)[0, :2].tolist()
    return int(low) | int(high) << 32
