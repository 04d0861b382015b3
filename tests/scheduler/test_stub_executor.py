"""The stub executor finds fault with plans that break the contract: tests above rely on it."""

from __future__ import annotations

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


def start(slot: int, ids: list[int], blocks: list[int], computed: int = 0) -> executor_pb2.NewRequest:
    return executor_pb2.NewRequest(
        slot=slot,
        token_ids=ids_column(ids),
        prompt_tokens=len(ids),
        block_ids=[ids_column(blocks)],
        computed_tokens=computed,
        seed=3,
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
    copies: list[int] | None = None,
    forced: list[int] | None = None,
    masked: list[int] | None = None,
) -> executor_pb2.StepPlan:
    groups = [executor_pb2.GroupUpdate(new_blocks=ids_column(new_blocks or []), copies=ids_column(copies or []))]
    return executor_pb2.StepPlan(
        step=step,
        freed_slots=ids_column(freed or []),
        started=started or [],
        groups=groups,
        slots=ids_column(slots or []),
        token_counts=ids_column(counts or []),
        computed_tokens=computed,
        forced_ids=ids_column(forced or []),
        masked_slots=ids_column(masked or []),
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
        (plan(3, started=[start(2, [1, 2, 3, 4, 5], [4, 5], computed=5)]), "5 of 5 tokens are computed already"),
        (plan(3, started=[start(2, [1, 2, 3, 4, 5, 6], [4], computed=5)]), "5 computed tokens in 1 blocks"),
        (plan(3, started=[start(2, [1, 2, 3, 4, 5], [1, 2], computed=4)]), "block 2 for slot 2 is slot 0's"),
        (plan(3, started=[start(2, [9, 9], [3], computed=1)]), "block 3 for slot 2 is slot 1's"),
        (plan(3, copies=[1, 4]), "block 1 is copied to 4, a block of no slot"),
        (plan(3, copies=[1, 1]), "or itself"),
        (plan(3, copies=[0, 1]), "block 0 is outside"),
        (plan(3, copies=[1, 3, 2, 3]), r"copies from \[1, 2\] to \[3, 3\]"),
        (plan(3, forced=[9, 1]), "slot 9 is not in use"),
        (plan(3, forced=[1, 999]), "slot 1: forced id 999 at"),
        (plan(3, masked=[1]), r"slots \[1\] are masked, \[\] sample"),
    ],
)
def test_a_plan_that_breaks_the_contract_is_found(bad: executor_pb2.StepPlan, complaint: str) -> None:
    with pytest.raises(PlanError, match=complaint):
        batch().take(bad)


IDS = [1, 2, 3, 4, 5]  # of slot 0 in `batch`


def ids_of(made: Batch, *plans: executor_pb2.StepPlan) -> dict[int, list[int]]:
    """What each slot samples in these steps."""
    sampled: dict[int, list[int]] = {}
    for each in plans:
        for row in made.take(each):
            if row.samples:
                token_id = made.next_id(row.slot)
                row.slot.append(token_id)
                sampled.setdefault(row.number, []).append(token_id)
    return sampled


def test_a_block_that_was_written_over_makes_wrong_ids_from_then_on() -> None:
    expected = expected_ids(IDS, 3, 4, 50)[1:]
    assert ids_of(batch(), plan(3, slots=[0]), plan(4, slots=[0]), plan(5, slots=[0]))[0] == expected
    made = batch()
    made._kv[1, 2] = 7
    got = ids_of(made, plan(3, slots=[0]), plan(4, slots=[0]), plan(5, slots=[0]))[0]
    assert got != expected and len(made.misreads) == 3
    assert made.misreads[0] == "step 3: slot 0 finds other KV than its own at 2"


def test_whole_blocks_that_are_computed_are_shared_and_read() -> None:
    made = batch()
    got = ids_of(made, plan(3, started=[start(2, [*IDS[:4], 8], [1, 4], computed=4)], slots=[0, 2]))
    assert got == {0: [expected_ids(IDS, 3, 2, 50)[1]], 2: expected_ids([*IDS[:4], 8], 3, 1, 50)}
    assert made.misreads == [] and made.num_blocks_held == 4
    made.take(plan(4, freed=[0]))
    assert made.num_blocks_held == 3  # block 1 is still slot 2's
    made.take(plan(5, freed=[1, 2]))
    assert made.num_blocks_held == 0


@pytest.mark.parametrize(
    ("ids", "blocks", "computed"),
    [
        ([1, 2, 3, 9, 8], [1, 4], 4),  # another id in the shared block
        ([9, 1, 2, 3, 4, 8], [4, 5], 5),  # a block never computed
        ([1, 2, 3, 4, 1, 2, 3, 4, 8], [1, 1, 4], 8),  # the right ids, at other places
    ],
)
def test_kv_of_something_else_makes_wrong_ids(ids: list[int], blocks: list[int], computed: int) -> None:
    made = batch()
    if blocks.count(1) == 2:  # its own block twice is against the rules; a copy of it is not
        made._kv[6] = made._kv[1]
        blocks = [1, 6, 4]
    got = ids_of(made, plan(3, started=[start(2, ids, blocks, computed=computed)], slots=[2]))
    assert got[2] != expected_ids(ids, 3, 1, 50) and len(made.misreads) == 1


def test_a_block_computed_in_the_same_step_is_not_there_yet() -> None:
    made = batch()
    made.take(plan(3, started=[start(2, [7, 7, 7, 7], [4])], slots=[2], counts=[3]))
    made.take(plan(4, freed=[1]))
    with pytest.raises(PlanError, match=r"slot 2 writes into block 4, which slots \[2, 1\] hold"):
        made.take(plan(5, started=[start(1, [7, 7, 7, 7, 1], [4, 5], computed=4)], slots=[2, 1]))


def test_copies_carry_what_earlier_steps_wrote() -> None:
    ids = [1, 2, 3, 4, 5, 6]
    right = plan(3, started=[start(2, ids, [1, 4], computed=5)], copies=[2, 4], slots=[2])
    assert ids_of(batch(), right)[2] == expected_ids(ids, 3, 1, 50)
    wrong = plan(3, started=[start(2, ids, [1, 4], computed=5)], copies=[3, 4], slots=[2])
    assert ids_of(batch(), wrong)[2] != expected_ids(ids, 3, 1, 50)


def test_writing_into_a_block_that_two_hold_is_found() -> None:
    made = batch()
    made._holders[2].append(1)
    with pytest.raises(PlanError, match=r"slot 0 writes into block 2, which slots \[0, 1\] hold"):
        made.take(plan(3, slots=[0]))


def test_ids_are_a_function_of_all_ids_and_the_seed() -> None:
    assert expected_ids([1, 2], 5, 6, 50)[2:] == expected_ids([1, 2, *expected_ids([1, 2], 5, 2, 50)], 5, 4, 50)
    assert len({tuple(expected_ids([1, 2], seed, 6, 50)) for seed in range(20)}) == 20
    assert len({tuple(expected_ids([n], 5, 6, 50)) for n in range(20)}) == 20
