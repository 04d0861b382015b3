"""Blocks and slots."""

from __future__ import annotations

import pytest

from services.scheduler.core.blocks import BlockPool
from services.scheduler.core.kv_events import Cleared, Removed, Stored
from services.scheduler.core.slots import SlotPool


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(5)
    assert sorted(pool.take(4)) == [1, 2, 3, 4]
    assert pool.num_free == 0


def stored(name: str, parent: str = "") -> Stored:
    return Stored(name.encode(), parent.encode(), b"")


def test_a_freed_block_that_nobody_can_find_is_taken_first() -> None:
    pool = BlockPool(6)
    assert pool.take(3) == [1, 2, 3]
    pool.release([3])
    assert pool.free_list() == [3, 4, 5]


def test_cached_blocks_are_taken_last_and_in_the_order_they_were_given_back() -> None:
    pool = BlockPool(6)
    pool.take(3)
    pool.store(1, stored("a"))
    pool.store(2, stored("b", "a"))
    pool.release([3, 2, 1])  # from the end
    assert pool.free_list() == [3, 4, 5, 2, 1]
    assert pool.take(4) == [3, 4, 5, 2]
    assert pool.match([b"a", b"b"]) == [1]
    assert pool.events == [stored("a"), stored("b", "a"), Removed(b"b")]


def test_a_match_is_the_longest_prefix() -> None:
    pool = BlockPool(6)
    for block, name in zip(pool.take(3), "abd", strict=True):
        pool.store(block, stored(name))
    assert pool.match([b"a", b"b", b"c", b"d"]) == [1, 2]
    assert pool.match([b"x", b"a"]) == []


def test_a_held_match_is_not_taken() -> None:
    pool = BlockPool(4)
    pool.store(pool.take(1)[0], stored("a"))
    pool.release([1])
    (found,) = pool.match([b"a"])
    pool.hold(found)
    assert pool.take(2) == [2, 3]
    assert (pool.num_free, pool.match([b"a"])) == (0, [1])


def test_one_block_a_digest_and_one_digest_a_block() -> None:
    pool = BlockPool(4)
    one, other = pool.take(2)
    pool.store(one, stored("a"))
    pool.store(other, stored("a"))
    pool.store(one, stored("b"))
    assert (pool.match([b"a"]), pool.match([b"b"]), pool.num_cached) == ([one], [], 1)


def test_a_flush_makes_nothing_findable_and_says_so_once() -> None:
    pool = BlockPool(4)
    pool.store(pool.take(1)[0], stored("a"))
    assert (pool.flush(), pool.flush()) == (1, 0)
    assert (pool.match([b"a"]), pool.cached()) == ([], [])
    assert pool.events == [stored("a"), Cleared()]


def test_a_shared_block_is_free_when_its_last_holder_has_left() -> None:
    pool = BlockPool(3)
    (block,) = pool.take(1)
    pool.hold(block)
    pool.release([block])
    assert (pool.holders(block), pool.num_held) == (1, 1)
    pool.release([block])
    assert (pool.holders(block), pool.num_free) == (0, 2)


def test_a_free_block_can_be_held_out_of_the_middle_of_the_list() -> None:
    pool = BlockPool(5)
    pool.hold(2)
    assert pool.free_list() == [1, 3, 4]
    assert pool.num_free == 3


def test_taking_more_than_is_free_changes_nothing() -> None:
    pool = BlockPool(3)
    with pytest.raises(ValueError, match="3 blocks wanted, 2 free"):
        pool.take(3)
    assert pool.free_list() == [1, 2]


def test_a_block_that_nobody_holds_cannot_be_released() -> None:
    pool = BlockPool(3)
    with pytest.raises(ValueError, match="block 2 is released, but nobody holds it"):
        pool.release([2])


def test_a_pool_needs_a_block_beside_the_null_block() -> None:
    with pytest.raises(ValueError, match="2 are needed"):
        BlockPool(1)


@pytest.mark.parametrize("distance", [1, 2, 3])
def test_a_slot_freed_by_step_n_is_usable_from_n_plus_the_reuse_distance(distance: int) -> None:
    slots = SlotPool(1, distance)
    slots.release(slots.take())
    assert slots.has_unannounced
    assert slots.announce(10) == [0]
    assert not slots.has_unannounced
    slots.thaw(10 + distance - 1)
    assert (slots.num_usable, slots.is_cooling) == (0, True)
    slots.thaw(10 + distance)
    assert (slots.num_usable, slots.is_cooling) == (1, False)


def test_a_slot_that_no_plan_has_announced_is_not_usable() -> None:
    slots = SlotPool(2, 1)
    slots.release(slots.take())
    slots.thaw(100)
    assert (slots.num_usable, slots.num_held) == (1, 0)
