"""The stub executor finds fault with plans that break the contract: tests above rely on it."""

from __future__ import annotations

import numpy as np
import pytest
from triptych.executor.v1 import executor_pb2

from loadtest.stub_batch import Batch, PlanError, expected_ids
from tests.support.attached import ids_column


def batch() -> Batch:
    """Slot 0 has 5 ids in blocks 1 and 2, computed; slot 1 has 1 id in block 3."""
    made = Batch(
        vocab_size=50, num_blocks=8, block_tokens=4, max_slots=3, max_step_tokens=6, context_tokens=16, max_in_flight=1
    )
    rows = made.take(plan(1, started=[start(0, [1, 2, 3, 4, 5], [1, 2])], slots=[0], counts=[5]))
    assert rows[0].samples
    rows[0].slot.append(made.next_id(rows[0].slot))
    made.take(plan(2, started=[start(1, [9], [3])], slots=[1]))
    return made


def start(slot: int, ids: list[int], blocks: list[int]) -> executor_pb2.NewRequest:
    return executor_pb2.NewRequest(
        slot=slot, token_ids=ids_column(ids), prompt_tokens=len(ids), block_ids=[ids_column(blocks)], seed=3
    )


def plan(
    step: int,
    *,
    freed: list[int] | None = None,
    started: list[executor_pb2.NewRequest] | None = None,
    new_blocks: list[int] | None = None,
    slots: list[int] | None = None,
    counts: list[int] | None = None,
    computed: int | None = None,
) -> executor_pb2.StepPlan:
    groups = [executor_pb2.GroupUpdate(new_blocks=ids_column(new_blocks))] if new_blocks else []
    return executor_pb2.StepPlan(
        step=step,
        freed_slots=ids_column(freed or []),
        started=started or [],
        groups=groups,
        slots=ids_column(slots or []),
        token_counts=ids_column(counts or []),
        computed_tokens=computed,
    )


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (plan(4), "step 4 follows 2"),
        (plan(3, freed=[2]), "slot 2 is not in use"),
        (plan(3, started=[start(1, [1], [4])]), "slot 1 is in use"),
        (plan(3, started=[start(3, [1], [4])]), "slot 3 is outside"),
        (plan(3, freed=[1], started=[start(1, [1], [4])]), "slot 1 is reusable from step 4, not 3"),
        (plan(3, started=[start(2, [1], [3])]), "block 3 for slot 2 is slot 1's"),
        (plan(3, started=[start(2, [1], [0])]), "block 0 is outside"),
        (plan(3, started=[start(2, [1], [8])]), "block 8 is outside"),
        (plan(3, started=[start(2, [50], [4])]), "id 50 is outside the vocabulary"),
        (plan(3, new_blocks=[1, 2]), "block 2 for slot 1 is slot 0's"),
        (plan(3, slots=[2]), "slot 2 is not in use"),
        (plan(3, slots=[0, 0]), "2 rows of 1 slots"),
        (plan(3, slots=[0], counts=[1, 1]), "1 rows of 1 slots, 2 counts"),
        (plan(3, slots=[0], counts=[2]), "2 tokens after 5 of 6"),
        (plan(3, slots=[0], computed=4), "computed_tokens is 4, the rows have 5"),
        (plan(3, started=[start(2, [1] * 5, [4])], slots=[2], counts=[5]), "5 tokens in 1 blocks of 4"),
        (plan(3, started=[start(2, [1] * 7, [4, 5])], slots=[2], counts=[7]), "7 tokens in a step, the limit is 6"),
        (plan(3, started=[start(2, [1] * 3, [4])], slots=[2, 0], counts=[3, 1]), "do not come first"),
        (executor_pb2.StepPlan(step=3, forced_ids=b"12345678"), "forced_ids"),
        (executor_pb2.StepPlan(step=3, masked_slots=b"1234"), "masked_slots"),
    ],
)
def test_a_plan_that_breaks_the_contract_is_found(bad: executor_pb2.StepPlan, complaint: str) -> None:
    with pytest.raises(PlanError, match=complaint):
        batch().take(bad)


def test_a_block_that_was_written_over_is_found() -> None:
    made = batch()
    made._kv[np.arange(4, 8)] = 7  # block 1
    with pytest.raises(PlanError, match="do not hold its ids any more"):
        made.take(plan(3, slots=[0]))


def test_ids_are_a_function_of_all_ids_and_the_seed() -> None:
    assert expected_ids([1, 2], 5, 6, 50)[2:] == expected_ids([1, 2, *expected_ids([1, 2], 5, 2, 50)], 5, 4, 50)
    assert len({tuple(expected_ids([1, 2], seed, 6, 50)) for seed in range(20)}) == 20
    assert len({tuple(expected_ids([n], 5, 6, 50)) for n in range(20)}) == 20
