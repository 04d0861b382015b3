"""Blocks and slots."""

from __future__ import annotations

import pytest

from services.scheduler.core.blocks import BlockPool
from services.scheduler.core.slots import SlotPool


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(5)
    assert sorted(pool.take(4)) == [1, 2, 3, 4]
    assert pool.num_free == 0


def test_freed_blocks_are_taken_last_in_the_order_they_were_given_back() -> None:
    pool = BlockPool(6)
    taken = pool.take(3)
    assert taken == [1, 2, 3]
    pool.release([3, 1])
    assert pool.free_list() == [4, 5, 3, 1]
    assert pool.take(3) == [4, 5, 3]


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
