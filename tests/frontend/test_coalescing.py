"""Deltas held back: when they are sent, and what becomes of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.frontend.coalescing import MOST_IDS, Coalescer, fits_a_message
from services.frontend.request import Delta, Hold, Logprob, Stopped

STOP = Stopped("stop")


def delta(*ids: int, stopped: Stopped | None = None) -> Delta:
    return Delta("".join(chr(97 + i) for i in ids), ids, tuple(Logprob(-float(i), 1) for i in ids), stopped)


def sent(hold: Hold, steps: list[tuple[float, Delta]]) -> list[tuple[float, tuple[int, ...]]]:
    """(time, ids) of what is sent of choice 0, looked at with each step and whenever the coalescer asks for it."""
    coalescer = Coalescer(hold, 1)
    out: list[tuple[float, tuple[int, ...]]] = []
    for at_s, new in steps:
        while (next_s := coalescer.next_s()) is not None and next_s < at_s:
            out += [(next_s, one.token_ids) for _, one in coalescer.due(next_s)]
        coalescer.add(0, new, at_s)
        out += [(at_s, one.token_ids) for _, one in coalescer.due(at_s)]
    return out


@pytest.mark.parametrize(
    ("hold", "expected"),
    [
        (Hold(), [(0, (1,)), (1, (2,)), (2, (3,)), (9, (4,)), (10, (5,))]),
        (Hold(tokens=1), [(0, (1,)), (1, (2,)), (2, (3,)), (9, (4,)), (10, (5,))]),
        (Hold(tokens=2), [(1, (1, 2)), (9, (3, 4)), (10, (5,))]),
        (Hold(tokens=100), [(10, (1, 2, 3, 4, 5))]),
        # The first at once; then 5 s after the last one, though nothing comes; what comes later than that at once.
        (Hold(interval_s=5), [(0, (1,)), (5, (2, 3)), (10, (4, 5))]),
        (Hold(interval_s=1.5), [(0, (1,)), (1.5, (2,)), (3, (3,)), (9, (4,)), (10, (5,))]),
        # Either is enough.
        (Hold(tokens=2, interval_s=5), [(0, (1,)), (2, (2, 3)), (9, (4,)), (10, (5,))]),
        (Hold(tokens=9, interval_s=5), [(0, (1,)), (5, (2, 3)), (10, (4, 5))]),
    ],
)
def test_a_delta_is_sent_with_so_many_ids_or_so_long_after_the_last(
    hold: Hold, expected: list[tuple[float, tuple[int, ...]]]
) -> None:
    steps = [(0.0, delta(1)), (1.0, delta(2)), (2.0, delta(3)), (9.0, delta(4)), (10.0, delta(5, stopped=STOP))]
    assert sent(hold, steps) == expected


def test_choices_are_held_back_each_for_itself() -> None:
    coalescer = Coalescer(Hold(tokens=2), 3)
    for choice, new in ((0, delta(1)), (1, delta(2)), (2, delta(3, 4)), (1, delta(5, stopped=STOP))):
        coalescer.add(choice, new, 0)
    assert not coalescer.empty
    assert [(choice, one.token_ids) for choice, one in coalescer.due(0)] == [(1, (2, 5)), (2, (3, 4))]
    assert coalescer.due(0) == [] and coalescer.next_s() is None
    assert [(choice, one.token_ids) for choice, one in coalescer.rest(0)] == [(0, (1,))]


def test_what_a_client_did_not_read_for_long_comes_in_messages_of_bounded_size() -> None:
    coalescer = Coalescer(Hold(), 1)
    for start in range(0, 9000, 3000):
        coalescer.add(0, Delta(token_ids=tuple(range(start, start + 3000))), 0)
    coalescer.add(0, Delta(token_ids=(9000,), stopped=STOP), 0)
    sizes, ids = [], []
    while not coalescer.empty:
        ((_, one),) = coalescer.due(0)
        sizes.append(len(one.token_ids))
        ids += one.token_ids
    assert sizes == [3000, 3000, 3001] and ids == list(range(9001)) and max(sizes) <= MOST_IDS


@given(
    st.builds(Hold, st.integers(0, 5), st.sampled_from([0.0, 0.5, 2.0])),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.floats(0, 3)), max_size=30),
)
def test_however_deltas_are_held_back_their_sum_is_the_same(hold: Hold, steps: list[tuple[int, int, float]]) -> None:
    coalescer = Coalescer(hold, 3)
    given_: dict[int, list[Delta]] = {}
    got: dict[int, list[Delta]] = {}
    now_s, place = 0.0, 0
    for choice, num_ids, wait_s in steps:
        now_s += wait_s
        new = delta(*range(place, place + num_ids))
        place += num_ids
        given_.setdefault(choice, []).append(new)
        is_due = coalescer.add(choice, new, now_s)
        due = coalescer.due(now_s)
        assert is_due == (choice in dict(due))
        keep(due, got)
        assert (next_s := coalescer.next_s()) is None or next_s > now_s
    for choice in given_:
        given_[choice].append(delta(99, stopped=STOP))
        assert coalescer.add(choice, given_[choice][-1], now_s)
    keep(coalescer.due(now_s), got)
    assert coalescer.empty and coalescer.rest(now_s) == []
    for field in ("text", "token_ids", "logprobs"):
        assert {c: joined(parts, field) for c, parts in got.items()} == {
            c: joined(parts, field) for c, parts in given_.items()
        }
    assert all([part.stopped for part in parts] == [None] * (len(parts) - 1) + [STOP] for parts in got.values())


def keep(due: list[tuple[int, Delta]], got: dict[int, list[Delta]]) -> None:
    assert len({choice for choice, _ in due}) == len(due)
    for choice, one in due:
        got.setdefault(choice, []).append(one)


def joined(parts: list[Delta], field: str) -> list[Any]:
    return [item for part in parts for item in getattr(part, field)]


@pytest.mark.parametrize("alternatives", [0, 1, 20])
def test_a_message_counts_alternatives_and_no_delta_is_larger_than_one(alternatives: int) -> None:
    """What an engine gave at once to a frontend that was slow to read it."""
    count = 3 * MOST_IDS
    entry = Logprob(-1.0, 1, tuple((i, -1.0) for i in range(alternatives)))
    whole = Delta("text", tuple(range(count)), (entry,) * count, Stopped("length"), -5.0)
    coalescer = Coalescer(Hold(), 1)
    assert coalescer.add(0, whole, 0.0)
    told: list[Delta] = []
    while not coalescer.empty:
        told += [delta for _, delta in coalescer.due(0.0)]
    assert max(len(delta.token_ids) * (1 + alternatives) for delta in told) <= MOST_IDS
    assert [i for delta in told for i in delta.token_ids] == list(range(count))
    assert all(len(delta.logprobs) == len(delta.token_ids) for delta in told)
    # Text may lag behind ids; what ends the choice comes last.
    assert [delta.text for delta in told[:-1]] == [""] * (len(told) - 1) and told[-1].text == "text"
    assert [delta.stopped is None for delta in told] == [True] * (len(told) - 1) + [False]
    assert told[-1].cumulative_logprob == -5.0
    assert fits_a_message(Delta("", (1,), (entry,))) and not fits_a_message(whole)
