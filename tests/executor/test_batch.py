"""Every plan that contradicts the batch, or holds what is not served, is refused before anything has changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from triptych.executor.v1 import executor_pb2 as pb
from triptych.inference.v1 import generation_pb2

from services.executor import wire
from services.executor.batch import PersistentBatch, StepInputs
from services.executor.plan import BadPlanError, Settings
from tests.executor.mini_scheduler import GREEDY, column

BLOCKS = 20
SETTINGS = Settings(context_tokens=128, block_tokens=16, max_slots=8, max_step_tokens=64)


def started(slot: int, **changes: Any) -> pb.NewRequest:
    """A request of three ids with block 3."""
    fields = {
        "slot": slot,
        "token_ids": column(5, 6, 7),
        "prompt_tokens": 3,
        "block_ids": [column(3)],
        "sampling": GREEDY,
    }
    return pb.NewRequest(**(fields | changes))


def begin(batch: PersistentBatch, **plan: Any) -> StepInputs:
    """Takes a plan as it comes from the wire."""
    return batch.begin(wire.plan(pb.StepPlan(**plan)))


def make() -> PersistentBatch:
    """A batch whose slot 1 has computed the three ids of its prompt and sampled one."""
    batch = PersistentBatch(SETTINGS, BLOCKS, 512)
    begin(batch, step=1, started=[started(1)], slots=column(1), token_counts=column(3))
    batch.append(np.array([1]), np.array([8]))
    return batch


SAMPLING_OF_ABSENT_ID = generation_pb2.Sampling(temperature=0, logit_bias={512: 1.0})
BAD_PLANS = {
    "frees a slot that is not in use": ({"freed_slots": column(2)}, "slot 2"),
    "frees a slot past the slots": ({"freed_slots": column(8)}, "slot 8"),
    "frees a slot twice": ({"freed_slots": column(1, 1)}, "twice"),
    "starts in a slot in use": ({"started": [started(1)]}, "slot 1 is in use"),
    "starts in a slot that the same step frees": (
        {"freed_slots": column(1), "started": [started(1)]},
        "freed by step 2 and is reusable from step 4",
    ),
    "starts past the slots": ({"started": [started(8)]}, "slot 8"),
    "starts a slot twice": ({"started": [started(2), started(2)]}, "slot 2 is in use"),
    "starts without ids": ({"started": [started(2, token_ids=b"", prompt_tokens=0)]}, "0 ids"),
    "starts without a prompt": ({"started": [started(2, prompt_tokens=0)]}, "0 of them prompt"),
    "starts with more prompt than ids": ({"started": [started(2, prompt_tokens=4)]}, "4 of them prompt"),
    "starts with more ids than the context": (
        {"started": [started(2, token_ids=column(*[5] * 129), prompt_tokens=1)]},
        "129 ids",
    ),
    "starts with everything computed": ({"started": [started(2, computed_tokens=3)]}, "computed 3 of 3"),
    "starts with more computed than its blocks hold": (
        {"started": [started(2, token_ids=column(*[5] * 20), computed_tokens=17)]},
        "computed 17 tokens, its 1 blocks hold 16",
    ),
    "starts with an id past the vocabulary": ({"started": [started(2, token_ids=column(5, 512, 7))]}, "id 512"),
    "starts with half an id": ({"started": [started(2, token_ids=b"\0" * 13)]}, "13 bytes"),
    "starts with the null block": ({"started": [started(2, block_ids=[column(0)])]}, "block 0"),
    "starts with a block past the pool": ({"started": [started(2, block_ids=[column(BLOCKS)])]}, f"block {BLOCKS}"),
    "starts with more blocks than the context": (
        {"started": [started(2, block_ids=[column(*range(1, 10))])]},
        "more blocks",
    ),
    "starts with two KV groups": ({"started": [started(2, block_ids=[column(4), column(5)])]}, "2 KV groups"),
    "starts without blocks of any group": ({"started": [started(2, block_ids=[])]}, "0 KV groups"),
    "biases an id past the vocabulary": ({"started": [started(2, sampling=SAMPLING_OF_ABSENT_ID)]}, "512"),
    "allows an id past the vocabulary": (
        {"started": [started(2, sampling=generation_pb2.Sampling(allowed_token_ids=[5, 512]))]},
        "started: slot 2: allowed_token_ids[1] is 512; ids lie below the vocabulary size, 512",
    ),
    "bans an id twice": (
        {"started": [started(2, sampling=generation_pb2.Sampling(banned_token_ids=[5, 6, 5]))]},
        "started: slot 2: banned_token_ids[2] is 5 once more",
    ),
    "allows what it bans": (
        {"started": [started(2, sampling=generation_pb2.Sampling(allowed_token_ids=[5], banned_token_ids=[5]))]},
        "started: slot 2: allowed_token_ids leaves no id to draw",
    ),
    "stops at an id past the vocabulary": ({"started": [started(2, stop_ids=column(512))]}, "512"),
    "gives blocks to a slot not in use": ({"groups": [pb.GroupUpdate(new_blocks=column(2, 4))]}, "slot 2"),
    "gives blocks to a slot past the slots": ({"groups": [pb.GroupUpdate(new_blocks=column(9, 4))]}, "slot 9"),
    "gives a block past the pool": ({"groups": [pb.GroupUpdate(new_blocks=column(1, BLOCKS))]}, f"block {BLOCKS}"),
    "gives the null block": ({"groups": [pb.GroupUpdate(new_blocks=column(1, 0))]}, "block 0"),
    "forces half a pair": ({"forced_ids": column(1)}, "forced_ids is not made of (slot, token id) pairs"),
    "forces ids of a slot not in use": ({"forced_ids": column(2, 5)}, "forced_ids names slot 2"),
    "forces ids of a slot past the slots": ({"forced_ids": column(9, 5)}, "slot 9 is past the 8 slots"),
    "forces an id past the vocabulary": ({"forced_ids": column(1, 512)}, "forced_ids holds id 512"),
    "forces more ids than the context": (
        {"forced_ids": column(*[1, 5] * 125)},
        "forced_ids: slot 1 goes past the 128 tokens of context",
    ),
    "gives half a pair": ({"groups": [pb.GroupUpdate(new_blocks=column(1))]}, "pairs"),
    "gives more blocks than the context": (
        {"groups": [pb.GroupUpdate(new_blocks=column(*[1, 4] * 8))]},
        "more blocks",
    ),
    "gives blocks of two KV groups": ({"groups": [pb.GroupUpdate(), pb.GroupUpdate()]}, "2 entries"),
    "copies half a pair": ({"groups": [pb.GroupUpdate(copies=column(3))]}, "copies is not made of (source, dest"),
    "copies the null block": ({"groups": [pb.GroupUpdate(copies=column(0, 3))]}, "copies: source: block 0"),
    "copies onto the null block": ({"groups": [pb.GroupUpdate(copies=column(3, 0))]}, "copies: destination: block 0"),
    "copies a block past the pool": ({"groups": [pb.GroupUpdate(copies=column(BLOCKS, 3))]}, f"block {BLOCKS}"),
    "copies onto a block of no slot": ({"groups": [pb.GroupUpdate(copies=column(3, 4))]}, "4 is a block of no slot"),
    "copies onto a block that it frees": (
        {"freed_slots": column(1), "groups": [pb.GroupUpdate(copies=column(4, 3))]},
        "3 is a block of no slot",
    ),
    "copies a block onto itself": ({"groups": [pb.GroupUpdate(copies=column(3, 3))]}, "block 3 is to be copied onto"),
    "copies two blocks onto one": ({"groups": [pb.GroupUpdate(copies=column(4, 3, 5, 3))]}, "destination twice"),
    "computes a slot not in use": ({"slots": column(2)}, "slot 2"),
    "computes a slot past the slots": ({"slots": column(8)}, "slot 8"),
    "computes a slot twice": ({"slots": column(1, 1)}, "twice"),
    "computes a slot that it frees": ({"freed_slots": column(1), "slots": column(1)}, "slot 1"),
    "computes nothing of a slot": ({"slots": column(1), "token_counts": column(0)}, "0 tokens"),
    "computes more than the ids": ({"slots": column(1), "token_counts": column(2)}, "2 tokens"),
    "computes more than its blocks hold": (
        {"started": [started(2, token_ids=column(*[5] * 17))], "slots": column(2), "token_counts": column(17)},
        "too few",
    ),
    "computes more than was agreed for a step": (
        {
            "started": [started(2, token_ids=column(*[5] * 65), block_ids=[column(4, 5, 6, 7, 8)])],
            "slots": column(2),
            "token_counts": column(65),
        },
        "65 tokens",
    ),
    "counts more rows than it has": ({"slots": column(1), "token_counts": column(1, 1)}, "2 entries for 1 rows"),
    "sums computed tokens differently": ({"slots": column(1), "computed_tokens": 4}, "computed_tokens is 4"),
    "masks a slot twice": ({"slots": column(1), "masked_slots": column(1, 1)}, "masked_slots names a slot twice"),
    "masks a slot that is none": ({"slots": column(1), "masked_slots": column(8)}, "masked_slots: slot 8 is past the"),
    "masks a slot without a row": ({"slots": column(), "masked_slots": column(1)}, "slot 1, which has no row in"),
    "masks a row that does not sample": (
        {
            "started": [started(2)],
            "slots": column(1, 2),
            "token_counts": column(2),
            "masked_slots": column(1, 2),
        },
        "masked_slots names slot 2, which does not sample: it has computed 2 of 3 ids",
    ),
}


@pytest.mark.parametrize("what", BAD_PLANS)
def test_a_plan_that_is_refused_changes_nothing(what: str) -> None:
    plan, said = BAD_PLANS[what]
    batch = make()
    tables = batch.tables.copy()
    with pytest.raises(BadPlanError) as error:
        begin(batch, step=2, **plan)
    assert said in str(error.value)
    np.testing.assert_array_equal(batch.tables, tables)
    assert batch.in_use() == 1
    inputs = begin(batch, step=2, slots=column(1), computed_tokens=3)
    assert inputs.token_ids.tolist() == [8] and inputs.positions.tolist() == [3]


def test_the_good_part_of_a_bad_plan_is_not_done_either() -> None:
    batch = make()
    with pytest.raises(BadPlanError, match="computed_tokens is 99"):
        begin(
            batch,
            step=2,
            freed_slots=column(1),
            started=[started(2)],
            groups=[pb.GroupUpdate(new_blocks=column(2, 4))],
            slots=column(2),
            token_counts=column(3),
            computed_tokens=99,
        )
    assert batch.tables[1, 0] == 3 and batch.tables[2, 0] == -1
    assert begin(batch, step=2, slots=column(1)).contexts.tolist() == [4]


def test_rows_are_gathered_into_one_flat_batch() -> None:
    """Slot 1 decodes at position 3; slot 5 prefills 17 of 20 ids, 2 of which were computed before."""
    batch = make()
    ids = list(range(100, 120))
    inputs = begin(
        batch,
        step=2,
        started=[started(5, token_ids=column(*ids), prompt_tokens=20, computed_tokens=2, block_ids=[column(7)])],
        groups=[pb.GroupUpdate(new_blocks=column(5, 9))],
        slots=column(1, 5),
        token_counts=column(17),
        computed_tokens=5,
    )
    assert inputs.token_ids.tolist() == [8, *ids[2:19]]
    assert inputs.positions.tolist() == [3, *range(2, 19)]
    assert inputs.query_starts.tolist() == [0, 1, 18]
    assert inputs.contexts.tolist() == [4, 19]
    assert inputs.sampling_rows.tolist() == [0]
    assert batch.tables[5, :3].tolist() == [7, 9, -1]


def test_what_the_sampler_sees_is_split_at_the_prompt() -> None:
    batch = make()
    ids = column(1, 2, 3, 4, 5)
    repetition, frequency = (
        generation_pb2.Sampling(repetition_penalty=2),
        generation_pb2.Sampling(frequency_penalty=1, logit_bias={9: 1.5, 2: -1}, banned_token_ids=[7]),
    )
    inputs = begin(
        batch,
        step=2,
        started=[
            started(0, token_ids=ids, prompt_tokens=2, sampling=repetition, seed=2**64 - 1, logprobs=3),
            started(2, token_ids=ids, prompt_tokens=4, sampling=frequency, min_tokens=2, stop_ids=column(3, 4)),
            started(3, token_ids=ids, prompt_tokens=3, sampling=frequency, min_tokens=2, stop_ids=column(3, 4)),
        ],
        slots=column(1, 0, 2, 3),
        token_counts=column(5, 5, 5),
    )
    rows = batch.sample_rows(inputs)
    assert rows.positions.tolist() == [1, 3, 1, 2]
    assert rows.columns["seed"].tolist() == [0, 2**64 - 1, 0, 0]
    assert rows.columns["logprobs"].tolist() == [-1, 3, -1, -1]
    # Repetition looks at prompt and output, frequency at the output alone; greedy slot 1 penalizes nothing.
    history = rows.history
    assert history.rows.tolist() == [1, 1, 1, 1, 1, 2, 3, 3] and history.ids.tolist() == [1, 2, 3, 4, 5, 5, 4, 5]
    assert history.in_output.tolist() == [False, False, True, True, True, True, True, True]
    # Slot 2 is before min_tokens, slot 3 there.
    assert sorted(zip(rows.banned.rows.tolist(), rows.banned.ids.tolist(), strict=True)) == [
        (2, 3),
        (2, 4),
        (2, 7),
        (3, 7),
    ]
    assert rows.biased.values.tolist() == [-1, 1.5, -1, 1.5] and rows.biased.ids.tolist() == [2, 9, 2, 9]


def test_what_a_slot_was_told_is_forgotten_with_its_request() -> None:
    batch = make()
    told = generation_pb2.Sampling(logit_bias={9: 1.5}, banned_token_ids=[7], allowed_token_ids=[1, 2, 9])
    begin(
        batch,
        step=2,
        started=[started(2, sampling=told, min_tokens=5, stop_ids=column(3))],
        slots=column(2),
        token_counts=column(3),
    )
    batch.append(np.array([2]), np.array([9]))
    begin(batch, step=3, freed_slots=column(2))
    inputs = begin(batch, step=5, started=[started(2)], slots=column(1, 2), token_counts=column(3))
    rows = batch.sample_rows(inputs)
    assert not any(len(entries.rows) for entries in (rows.allowed, rows.banned, rows.biased))
    inputs = begin(batch, step=6, started=[started(3, sampling=told)], slots=column(3), token_counts=column(3))
    batch.reset()
    inputs = begin(batch, step=1, started=[started(3)], slots=column(3), token_counts=column(3))
    rows = batch.sample_rows(inputs)
    assert not any(len(entries.rows) for entries in (rows.allowed, rows.banned, rows.biased))


def test_the_last_id_of_the_context_is_sampled_and_nothing_after_it() -> None:
    """A prompt of context - 1 ids is followed by two: one in the last place, one sampled at the context's end."""
    batch = PersistentBatch(SETTINGS, BLOCKS, 512)
    request = started(0, token_ids=column(*[5] * 127), prompt_tokens=127, block_ids=[column(*range(1, 9))])
    begin(batch, step=1, started=[request], slots=column(0), token_counts=column(64))
    begin(batch, step=2, slots=column(0), token_counts=column(63))
    batch.append(np.array([0]), np.array([6]))
    assert begin(batch, step=3, slots=column(0)).contexts.tolist() == [128]
    batch.append(np.array([0]), np.array([7]))
    with pytest.raises(BadPlanError, match="past the 128 tokens of context"):
        begin(batch, step=4, slots=column(0))


def test_a_freed_slot_is_taken_two_steps_later_and_its_blocks_at_once() -> None:
    """A plan made before step 2 was done may be the one of step 3: the slot is reusable from 2 + 2 in flight."""
    batch = make()
    begin(batch, step=2, freed_slots=column(1), started=[started(2)], slots=column(2), token_counts=column(3))
    with pytest.raises(BadPlanError, match="freed by step 2 and is reusable from step 4 on, this is step 3"):
        begin(batch, step=3, started=[started(1)])
    begin(batch, step=3)
    inputs = begin(batch, step=4, started=[started(1, block_ids=[column(4)])], slots=column(1), token_counts=column(2))
    assert batch.tables[1, :2].tolist() == [4, -1]
    assert inputs.positions.tolist() == [0, 1] and inputs.sampling_rows.size == 0


def test_rows_of_a_failed_slot_are_left_out_until_it_is_freed() -> None:
    """The plan of step 3 was made before the failure in step 2 was known: it counts an id that is not there."""
    batch = make()
    begin(batch, step=2, started=[started(4, block_ids=[column(5)])], slots=column(1, 4), token_counts=column(3))
    batch.append(np.array([1]), np.array([9]))
    batch.fail(np.array([4]))
    inputs = begin(batch, step=3, slots=column(4, 1), computed_tokens=7)
    assert inputs.failed_slots.tolist() == [4]
    assert (inputs.slots.tolist(), inputs.places.tolist(), inputs.token_ids.tolist()) == ([1], [1], [9])
    batch.fail(inputs.failed_slots)
    assert begin(batch, step=4, slots=column(4), computed_tokens=4).slots.size == 0
    begin(batch, step=5, freed_slots=column(4))
    begin(batch, step=6)
    again = begin(batch, step=7, started=[started(4)], slots=column(4), token_counts=column(3))
    assert again.slots.tolist() == [4] and again.failed_slots.size == 0


def test_a_failed_row_keeps_a_placeholder_just_where_it_would_have_sampled() -> None:
    """A scored prompt may fail in the middle: what is planned behind it samples, and waits for a mask, at its end."""
    batch = PersistentBatch(SETTINGS, BLOCKS, 512)
    request = started(0, token_ids=column(*[5] * 40), prompt_tokens=40, block_ids=[column(1, 2, 3)], prompt_logprobs=0)
    begin(batch, step=1, started=[request], slots=column(0), token_counts=column(20))
    batch.fail(np.array([0]))
    inputs = begin(batch, step=2, slots=column(0), token_counts=column(20), masked_slots=column(0))
    assert inputs.failed_slots.tolist() == [0]
    batch.fail(inputs.failed_slots)
    batch.fail(inputs.failed_slots)  # told twice, counted once
    batch.fail(begin(batch, step=3, slots=column(0), masked_slots=column(0), computed_tokens=40).failed_slots)
    with pytest.raises(BadPlanError, match="cannot compute 2 tokens: it has computed 41 of its 42 ids"):
        begin(batch, step=4, slots=column(0), token_counts=column(2))


def test_forced_ids_come_before_the_row_computes() -> None:
    batch = make()
    request = started(2, block_ids=[column(4)])
    inputs = begin(
        batch,
        step=2,
        started=[request],
        forced_ids=column(1, 20, 2, 30, 1, 21),
        slots=column(1, 2),
        token_counts=column(3, 4),
        masked_slots=column(1),
    )
    assert inputs.token_ids.tolist() == [8, 20, 21, 5, 6, 7, 30]
    assert inputs.positions.tolist() == [3, 4, 5, 0, 1, 2, 3] and inputs.sampling_rows.tolist() == [0, 1]
    rows = batch.sample_rows(inputs)
    assert rows.positions.tolist() == [3, 1]  # the output positions that are drawn: 8, 20, 21 and 30 stand before them
    batch.append(np.array([1, 2]), np.array([9, 10]))
    assert begin(batch, step=3, slots=column(1, 2), computed_tokens=10).token_ids.tolist() == [9, 10]


def test_a_prompt_that_fills_the_context_fails_alone_in_every_step_under_way() -> None:
    """One that is scored may fail before its end; what is under way then fails too, and has no room for more ids."""
    batch = PersistentBatch(SETTINGS, BLOCKS, 512)
    request = started(
        0, token_ids=column(*[5] * 128), prompt_tokens=128, block_ids=[column(*range(1, 9))], prompt_logprobs=0
    )
    begin(batch, step=1, started=[request], slots=column(0), token_counts=column(60))
    batch.fail(np.array([0]))
    for step in (2, 3):
        inputs = begin(batch, step=step, slots=column(0), token_counts=column(30))
        assert inputs.failed_slots.tolist() == [0]
        batch.fail(inputs.failed_slots)


def test_a_destination_may_be_a_block_that_the_plan_gives_out() -> None:
    batch = make()
    copies = column(3, 4, 3, 6)
    begin(
        batch,
        step=2,
        started=[started(2, block_ids=[column(4)], computed_tokens=2)],
        groups=[pb.GroupUpdate(new_blocks=column(2, 6), copies=copies)],
    )
    assert batch.tables[2, :3].tolist() == [4, 6, -1]


def test_a_plan_without_rows_frees_and_starts() -> None:
    batch = make()
    assert begin(batch, step=2, freed_slots=column(1), started=[started(2)]).token_ids.size == 0
    assert batch.in_use() == 1
    batch.reset()
    assert batch.in_use() == 0 and (batch.tables == -1).all()
