"""Masks through the executor's real server: which ids a row may draw, from a producer that is never quite in step."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from triptych.executor.v1 import executor_pb2 as pb
from triptych.inference.v1 import generation_pb2

from services.executor import masks as masks_module
from services.executor.masks import CACHE_SIZE, Mask, MaskBook, allowing
from services.executor.plan import BadPlanError
from tests.executor.hooks import Hooked
from tests.executor.mini_scheduler import RunStream, column, next_epoch, read, serve
from tests.executor.test_run_faults import check_serves, started

BLOCKS = 20
VOCAB = 512


def bitmap(*ids: int) -> bytes:
    bits = np.zeros(VOCAB, np.bool_)
    bits[list(ids)] = True
    return np.packbits(bits, bitorder="little").tobytes()


async def send(run: RunStream, step: int, *masks: pb.Mask) -> None:
    await run.call.write(pb.RunRequest(masks=pb.Masks(step=step, masks=masks)))


def starts(*slots: int, **changes: Any) -> dict[str, Any]:
    """A plan that starts the same request in each slot and prefills it, every row masked."""
    requests = [started(slot, block_ids=[column(1 + slot)], **changes) for slot in slots]
    fields = {"slots": column(*slots), "token_counts": column(*[3] * len(slots)), "masked_slots": column(*slots)}
    return {"started": requests, **fields}


async def test_all_four_kinds_rule_what_their_rows_draw(tiny: Path) -> None:
    async with serve(tiny, num_blocks=BLOCKS) as rig:
        assert (await rig.load()).mask_cache_size == CACHE_SIZE >= 1
        run = await RunStream.open(rig)
        unmasked = started(7, block_ids=[column(9)])
        free = read((await run.step(started=[unmasked], slots=column(7), token_counts=column(3))).token_ids)
        await send(
            run,
            2,
            pb.Mask(slot=0, allowed_ids=column(301, 17)),
            pb.Mask(slot=1, banned_ids=column(*free), cache_as=0),
            pb.Mask(slot=2, bitmap=bitmap(44, 511), cache_as=CACHE_SIZE - 1),
            pb.Mask(slot=3, banned_ids=b""),
            pb.Mask(slot=4, cached_id=0),
            pb.Mask(slot=5, cached_id=CACHE_SIZE - 1),
        )
        await run.send(**starts(0, 1, 2, 3, 4, 5))
        ids = read((await run.result()).token_ids)
        assert ids[0] in (301, 17) and ids[2] in (44, 511) and ids[5] == ids[2]
        assert ids[3] == free[0] and ids[1] != free[0] and ids[4] == ids[1]
        # The masked rows' ids are what a reference says: the likeliest of those allowed.
        reference = (await logprobs(run, 3))[0]
        for drawn, allowed in ((ids[0], [301, 17]), (ids[2], [44, 511]), (ids[1], set(range(VOCAB)) - set(free))):
            assert drawn == max(allowed, key=lambda i: reference[i])
        await run.close()


async def logprobs(run: RunStream, step: int) -> list[dict[int, float]]:
    """Of every id after PROMPT."""
    result = await run.step(
        started=[started(6, block_ids=[column(10)], logprobs=VOCAB)], slots=column(6), token_counts=column(3), step=step
    )
    next(run.steps)
    columns = result.logprobs
    ids, values = read(columns.top_ids), np.frombuffer(columns.top_logprobs, "<f4").tolist()
    return [dict(zip(ids, values, strict=True))]


@pytest.mark.parametrize("first", ["masks", "plan", "between"])
async def test_masks_may_come_before_their_plan_or_after_it_in_any_number_of_messages(tiny: Path, first: str) -> None:
    async with serve(tiny, num_blocks=BLOCKS) as rig:
        run = await RunStream.open(rig)
        one, two = pb.Mask(slot=0, allowed_ids=column(21)), pb.Mask(slot=1, allowed_ids=column(22))
        if first == "masks":
            await send(run, 1, one)
            await send(run, 1)
            await send(run, 1, two)
            await run.send(**starts(0, 1))
        elif first == "plan":
            await run.send(**starts(0, 1))
            await send(run, 1, one, two)
        else:
            await send(run, 1, two)
            await run.send(**starts(0, 1))
            await send(run, 1, one)
        assert read((await run.result()).token_ids) == [21, 22]
        await run.close()


async def test_the_forward_pass_runs_before_the_masks_are_there_and_only_sampling_waits(tiny: Path) -> None:
    hooked, computed = Hooked(), threading.Event()
    async with serve(tiny, num_blocks=BLOCKS, make=hooked) as rig:
        run = await RunStream.open(rig)
        hooked.before = computed.set
        await run.send(**starts(0))
        assert await asyncio.to_thread(computed.wait, 30)
        answer = asyncio.ensure_future(run.result())
        await asyncio.sleep(0.2)
        assert not answer.done()
        await send(run, 1, pb.Mask(slot=0, allowed_ids=column(33)))
        assert read((await answer).token_ids) == [33]
        await run.close()


async def test_two_steps_in_flight_each_wait_for_their_own_masks(tiny: Path) -> None:
    """The mask of step 2 depends on the id of step 1, which its producer learns while step 2 computes."""
    async with serve(tiny, num_blocks=BLOCKS) as rig:
        run = await RunStream.open(rig)
        await run.send(**starts(0))
        await run.send(slots=column(0), masked_slots=column(0), computed_tokens=3)
        ids = []
        for step in range(1, 9):
            allowed = [10 * step, 10 * step + (ids[-1] if ids else 1) % 7]
            await send(run, step, pb.Mask(slot=0, allowed_ids=column(*sorted(set(allowed)))))
            ids += read((await run.result()).token_ids)
            assert ids[-1] in allowed
            if step < 7:
                await run.send(slots=column(0), masked_slots=column(0), computed_tokens=3 + step)
        assert len(ids) == 8
        await run.close()


async def test_masked_and_unmasked_rows_stand_side_by_side_and_seeds_hold(tiny: Path) -> None:
    sampling = generation_pb2.Sampling(temperature=1.5, top_p=0.9)
    async with serve(tiny, num_blocks=BLOCKS) as rig:
        drawn = []
        for masked in ((), (1,), (0, 1)):
            run = await RunStream.open(rig)
            await send(run, 1, *(pb.Mask(slot=slot, banned_ids=b"") for slot in masked))
            plan = starts(0, 1, sampling=sampling, seed=5) | {"masked_slots": column(*masked)}
            drawn.append(read((await run.step(**plan)).token_ids))
            await run.close()
        assert drawn[0] == drawn[1] == drawn[2] and drawn[0][0] == drawn[0][1]


async def test_a_mask_that_allows_nothing_more_fails_its_row_alone(tiny: Path) -> None:
    async with serve(tiny, num_blocks=BLOCKS) as rig:
        run = await RunStream.open(rig)
        bans = generation_pb2.Sampling(temperature=0, banned_token_ids=[40])
        await send(run, 1, *(pb.Mask(slot=slot, bitmap=bitmap(40)) for slot in (0, 1)))
        plan = starts(0, 1)
        plan["started"] = [started(0, block_ids=[column(1)], sampling=bans), started(1, block_ids=[column(2)])]
        result = await run.step(**plan)
        assert [(row.slot, row.kind) for row in result.failed] == [(0, pb.FAULT_KIND_NO_ID_LEFT)]
        assert read(result.token_ids) == [40]
        # The failed row's masks still come, and nobody minds; its neighbour goes on.
        await run.send(slots=column(0, 1), masked_slots=column(0, 1), computed_tokens=6)
        await send(run, 2, pb.Mask(slot=1, allowed_ids=column(50)), pb.Mask(slot=0, allowed_ids=column(51)))
        result = await run.result()
        assert [row.slot for row in result.failed] == [0] and read(result.token_ids) == [50]
        await run.send(slots=column(0), masked_slots=column(0), computed_tokens=4)
        await send(run, 3, pb.Mask(slot=0, allowed_ids=column(51)))
        assert [row.slot for row in (await run.result()).failed] == [0]
        await run.close()


async def test_kept_masks_are_replaced_by_id_and_forgotten_with_their_epoch(tiny: Path) -> None:
    async with serve(tiny, num_blocks=BLOCKS) as rig:
        run = await RunStream.open(rig)
        await send(run, 1, pb.Mask(slot=0, allowed_ids=column(60), cache_as=3))
        await run.step(**starts(0))
        # A slot reads what is kept when its mask arrives: 60, and after it was replaced 61.
        await send(
            run, 2, pb.Mask(slot=0, cached_id=3), pb.Mask(slot=1, allowed_ids=column(61), cache_as=3),
            pb.Mask(slot=2, cached_id=3, cache_as=4),
        )  # fmt: skip
        plan = starts(1, 2)
        plan |= {"slots": column(0, 1, 2), "masked_slots": column(0, 1, 2), "token_counts": column(3, 3)}
        assert read((await run.step(**plan)).token_ids) == [60, 61, 61]
        await send(run, 3, pb.Mask(slot=0, cached_id=4))
        assert read((await run.step(slots=column(0), masked_slots=column(0))).token_ids) == [61]
        await run.close()
        run = await RunStream.open(rig)
        await send(run, 1, pb.Mask(slot=0, cached_id=3))
        event = await run.event()
        assert event.fault.kind == pb.FAULT_KIND_BAD_PLAN and read(event.fault.slots) == [0]
        assert "nothing is kept under id 3" in event.fault.message
        await check_serves(rig, tiny)


BAD_MASKS: dict[str, tuple[pb.Mask, str]] = {
    "an empty one": (pb.Mask(slot=2), "masks: slot 2: holds no mask"),
    "an id past the vocabulary": (pb.Mask(slot=2, allowed_ids=column(1, 512)), "allowed_ids holds id 512, the voc"),
    "a banned one past it": (pb.Mask(slot=2, banned_ids=column(2**32 - 1)), "banned_ids holds id 4294967295"),
    "half an id": (pb.Mask(slot=2, allowed_ids=b"123"), "allowed_ids has 3 bytes, no multiple of 4"),
    "a narrow bitmap": (pb.Mask(slot=2, bitmap=b"\0" * 60), "bitmap has 60 bytes, a vocabulary of 512 has 64"),
    "a wide bitmap": (pb.Mask(slot=2, bitmap=b"\0" * 68), "bitmap has 68 bytes"),
    "an id to keep it under past the cache": (
        pb.Mask(slot=2, allowed_ids=column(1), cache_as=CACHE_SIZE),
        f"cache_as is {CACHE_SIZE}, ids of kept masks lie below {CACHE_SIZE}",
    ),
    "one that was never kept": (pb.Mask(slot=2, cached_id=0), "nothing is kept under id 0"),
    "one for a draft": (pb.Mask(slot=2, draft_position=1, allowed_ids=column(1)), "slot 2.draft_position"),
    "one for no slot": (pb.Mask(slot=8, allowed_ids=column(1)), "slot 8 is past the 8 slots"),
}


@pytest.mark.parametrize("what", BAD_MASKS)
async def test_a_malformed_mask_is_a_fault_that_names_its_slot(tiny: Path, what: str) -> None:
    mask, says = BAD_MASKS[what]
    async with serve(tiny, num_blocks=BLOCKS) as rig:
        run = await RunStream.open(rig)
        await run.send(**starts(2))
        await send(run, 1, mask)
        event = await run.event()
        assert event.fault.kind == pb.FAULT_KIND_BAD_PLAN and event.fault.step == 1 and not event.fault.fatal
        assert read(event.fault.slots) == [mask.slot] and says in event.fault.message, event.fault.message
        assert await run.event() is grpc.aio.EOF
        await check_serves(rig, tiny)


async def test_a_step_whose_mask_never_comes_ends_with_a_fault_well_before_its_deadline(tiny: Path) -> None:
    async with serve(tiny, num_blocks=BLOCKS) as rig:
        run = await RunStream.open(rig)
        await run.step(**(starts(0) | {"masked_slots": b""}))
        begun = time.monotonic()
        await run.send(slots=column(0), masked_slots=column(0), deadline_ms=2000)
        event = await run.event()
        assert 1.5 < time.monotonic() - begun < 20
        assert event.fault.kind == pb.FAULT_KIND_BAD_PLAN and read(event.fault.slots) == [0]
        assert "has run for 1.6 s, the mask of slot 0 is missing" in event.fault.message
        assert rig.health.is_serving("liveness")
        await check_serves(rig, tiny)


async def test_without_a_deadline_the_wait_is_bounded_too(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks_module, "WAIT_S", 0.2)
    async with serve(tiny, num_blocks=BLOCKS) as rig:
        run = await RunStream.open(rig)
        fault = await run.fault(**starts(0, 1))
        assert fault.kind == pb.FAULT_KIND_BAD_PLAN and read(fault.slots) == [0, 1]


@pytest.mark.parametrize("how", ["newer epoch", "cancel", "half-close", "drain"])
async def test_the_end_of_an_epoch_ends_the_wait_for_masks(tiny: Path, how: str) -> None:
    async with serve(tiny, num_blocks=BLOCKS) as rig:
        run = await RunStream.open(rig)
        await run.send(**starts(0), deadline_ms=60_000)
        await run.send_ping()
        begun = time.monotonic()
        if how == "newer epoch":
            other = await RunStream.open(rig, next_epoch())
            await other.close()
            assert await run.call.code() == grpc.StatusCode.ABORTED
        elif how == "cancel":
            run.call.cancel()
        elif how == "half-close":
            await run.call.done_writing()
            event = await run.event()
            assert read(event.fault.slots) == [0] and "was sent no more, the mask of slot 0" in event.fault.message
        else:
            draining = asyncio.ensure_future(rig.servicer.drain())
            await asyncio.sleep(0.1)
            assert not draining.done()
            await send(run, 1, pb.Mask(slot=0, allowed_ids=column(9)))  # what is in flight still gets its masks
            assert read((await run.result()).token_ids) == [9]
            await draining
        if how != "drain":
            await check_serves(rig, tiny)
        assert time.monotonic() - begun < 20


# -- the book


def one(slot: int, *ids: int) -> Mask:
    return Mask(slot, allowing(np.array(ids), 64))


def test_words_hold_a_bit_an_id() -> None:
    assert allowing(np.array([0, 33]), 40).tolist() == [1, 2]
    assert allowing(np.array([], np.int64), 40).tolist() == [0, 0]
    words = allowing(np.array([1]), 40, but=True)
    assert words[0] == 2**32 - 3 and words[1] & 0xFF == 0xFF and words.dtype == np.uint32


@pytest.mark.parametrize(
    ("step", "last_taken", "says"),
    [(7, 7, "step 7 does not wait for any"), (3, 7, "step 3 does not"), (10, 7, "step 10 is more than 2 after step 7")],
)
def test_masks_of_steps_that_are_done_or_far_ahead_are_refused(step: int, last_taken: int, says: str) -> None:
    book = MaskBook(4)
    assert book.take(last_taken, [], None) is None
    with pytest.raises(BadPlanError, match=says) as caught:
        book.put(step, [one(2, 5)], last_taken)
    assert caught.value.slots == (2,)


def test_a_slot_that_is_not_masked_or_was_sent_one_already_is_refused_whoever_comes_first() -> None:
    book = MaskBook(4)
    book.put(1, [one(2, 5)], None)
    with pytest.raises(BadPlanError, match="second mask for slot 2"):
        book.put(1, [one(2, 6)], None)
    with pytest.raises(BadPlanError, match="slot 2 is not among the masked_slots of step 1") as caught:
        book.take(1, [0, 1], None)
    assert caught.value.slots == (2,)
    book = MaskBook(4)
    book.take(1, [0], None)
    with pytest.raises(BadPlanError, match="slot 3 is not among"):
        book.put(1, [one(3, 5)], 1)


def test_masks_of_steps_that_are_never_planned_do_not_pile_up() -> None:
    book = MaskBook(4)
    for step in range(4):
        book.put(step, [one(0, 1)], None)
    with pytest.raises(BadPlanError, match="4 other steps than 4 wait"):
        book.put(4, [one(0, 1)], None)
    with pytest.raises(BadPlanError, match="step 0 was never planned, this is step 1"):
        book.take(1, [0], None)


def test_what_the_forward_pass_took_counts_towards_the_deadline() -> None:
    entry = MaskBook(4).take(1, [0], 10.0)
    assert entry is not None
    begun = time.monotonic()
    with pytest.raises(BadPlanError, match="has run for 8 s, the mask of slot 0 is missing"):
        entry.wait(spent_s=7.9)
    assert time.monotonic() - begun < 5


def test_a_step_that_is_done_forgets_its_masks() -> None:
    book = MaskBook(4)
    entry = book.take(1, [0], None)
    assert entry is not None
    book.put(1, [one(0, 5)], 1)
    assert list(entry.wait()) == [0]
    book.done(1)
    with pytest.raises(BadPlanError, match="does not wait for any"):
        book.put(1, [one(0, 5)], 1)
