"""The clocks of two machines, compared by messages there and back."""

from __future__ import annotations

import numpy as np

from services.common.telemetry.clock import ClockOffset

MS = 1_000_000


def test_clocks_that_agree_within_the_way_there_and_back_have_no_offset() -> None:
    offset = ClockOffset()
    assert offset.ns == 0
    for way_there, way_back in ((1, 9), (5, 5), (0, 3)):
        offset.add(100 * MS, (100 + way_there) * MS, (100 + way_there + way_back) * MS)
        assert offset.ns == 0


def test_the_offset_is_wrong_by_no_more_than_half_of_the_shortest_way_there_and_back() -> None:
    noise = np.random.default_rng(0)
    for ahead_ns in (70 * MS, -3600 * 1000 * MS):
        offset = ClockOffset()
        ways = noise.exponential(5 * MS, size=(8, 2)).astype(int) + 100_000
        for i, (there_ns, back_ns) in enumerate(ways.tolist()):
            sent_ns = i * 10_000 * MS
            offset.add(sent_ns, sent_ns + there_ns + ahead_ns, sent_ns + there_ns + back_ns)
        assert abs(offset.ns - ahead_ns) <= ways.sum(axis=1).min() // 2 + 1


def test_an_offset_that_changes_is_followed_within_a_few_pings() -> None:
    offset = ClockOffset()
    for i in range(8):
        offset.add(i, i + 50 * MS, i + 2)
    for i in range(8):
        offset.add(i, i + 20 * MS, i + 10)
    assert abs(offset.ns - 20 * MS) < 20


def test_a_clock_set_back_between_two_looks_counts_not() -> None:
    offset = ClockOffset()
    offset.add(100 * MS, 0, 50 * MS)
    assert offset.ns == 0
