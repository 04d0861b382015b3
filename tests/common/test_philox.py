"""Philox against its authors' vectors, and the seeds of choices."""

from __future__ import annotations

import numpy as np
import pytest

from services.common.philox import derived_seed, philox4x32


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_known_answers_of_random123(counter: str, key: str, expected: str) -> None:
    """kat_vectors of Random123, lines "philox4x32 10"."""
    words = [np.array([[int(word, 16) for word in text.split()]], dtype=np.uint32) for text in (counter, key)]
    assert " ".join(f"{word:08x}" for word in philox4x32(*words)[0]) == expected


def test_the_first_choice_has_the_seed_itself() -> None:
    assert [derived_seed(seed, 0) for seed in (0, 7, 2**64 - 1)] == [0, 7, 2**64 - 1]


def test_a_later_choice_has_the_first_words_of_a_block_that_no_draw_uses() -> None:
    block = philox4x32(
        np.array([[3, 0, 0, 1]], dtype=np.uint32), np.array([[0xA4093822, 0x299F31D0]], dtype=np.uint32)
    )[0]
    assert derived_seed(0x299F31D0_A4093822, 3) == int(block[0]) + (int(block[1]) << 32)


def test_S5_choices_of_one_request_have_different_seeds() -> None:
    seeds = [derived_seed(seed, choice) for seed in (0, 1, 2**63) for choice in range(100)]
    assert len(set(seeds)) == len(seeds)
