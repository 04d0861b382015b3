"""The uniform numbers that draws are made with."""

from __future__ import annotations

import numpy as np

from services.common.philox import philox4x32
from services.executor import noise


def uniform(*pairs: tuple[int, int]) -> list[float]:
    seeds, positions = zip(*pairs, strict=True)
    return noise.uniform(np.array(seeds, dtype=np.uint64), np.array(positions, dtype=np.uint64)).tolist()


def test_a_number_is_the_first_two_words_of_its_block_as_53_bits() -> None:
    # Seed 0, position 0 is the first of its known answers: words 6627e8d5 e169c58d.
    assert uniform((0, 0)) == [((0x6627E8D5 >> 5) * 2**26 + (0xE169C58D >> 6)) / 2**53]
    # Key words are the seed's low and high half, counter words the position's.
    seed, position = 0x299F31D0_A4093822, 0x85A308D3_243F6A88
    block = philox4x32(
        np.array([[0x243F6A88, 0x85A308D3, 0, 0]], dtype=np.uint32),
        np.array([[0xA4093822, 0x299F31D0]], dtype=np.uint32),
    )[0]
    assert uniform((seed, position)) == [((int(block[0]) >> 5) * 2**26 + (int(block[1]) >> 6)) / 2**53]


def test_a_number_does_not_depend_on_its_neighbours() -> None:
    pairs = [(seed, position) for seed in (0, 1, 2**63, 2**64 - 1) for position in (0, 1, 2**32, 2**40)]
    together = uniform(*pairs)
    assert together == [uniform(pair)[0] for pair in pairs]
    assert len(set(together)) == len(pairs)


def test_numbers_are_uniform_over_positions_and_over_neighbouring_seeds() -> None:
    n, bins = 100_000, 100
    index = np.arange(n, dtype=np.uint64)
    for values in (noise.uniform(np.full(n, 7, np.uint64), index), noise.uniform(index, np.zeros(n, np.uint64))):
        assert values.min() >= 0 and values.max() < 1
        counts = np.histogram(values, bins, (0, 1))[0]
        chi_square = ((counts - n / bins) ** 2 / (n / bins)).sum()
        # 99 degrees of freedom: 148.2 is passed once in 1,000 times; the numbers are fixed, so this is no lottery.
        assert chi_square < 148.2
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 4 / np.sqrt(n)


def test_no_numbers_for_no_rows() -> None:
    assert noise.uniform(np.zeros(0, np.uint64), np.zeros(0, np.uint64)).shape == (0,)
