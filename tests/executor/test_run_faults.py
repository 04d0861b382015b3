"""What goes wrong in a Run stream ends that stream or one row, never the process, and the next stream is whole."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from triptych.executor.v1 import executor_pb2 as pb

from tests.executor.hooks import Hooked
from tests.executor.mini_scheduler import GREEDY, MiniScheduler, Request, Rig, RunStream, column, read, serve
from tests.support.checkpoints import reference_ids, tiny_llama

BLOCKS = 20
PROMPT = [5, 6, 7]


def started(slot: int = 1, **changes: Any) -> pb.NewRequest:
    """A request with PROMPT in block 3."""
    fields = {
        "slot": slot,
        "token_ids": column(*PROMPT),
        "prompt_tokens": 3,
        "block_ids": [column(3)],
        "sampling": GREEDY,
    }
    return pb.NewRequest(**(fields | changes))


def first(slot: int = 1, **changes: Any) -> dict[str, Any]:
    """A plan that starts a request and prefills it."""
    return {"started": [started(slot, **changes)], "slots": column(slot), "token_counts": column(3)}


async def check_serves(rig: Rig, path: Path, prompt: list[int] = PROMPT) -> None:
    """A new stream gives the reference's ids."""
    run = await RunStream.open(rig)
    request = Request(prompt, 4)
    await MiniScheduler(run, rig.config, BLOCKS).finish([request])
    await run.close()
    assert [request.output] == reference_ids(path, [prompt], 4, ignore_eos=True)


BAD_PLANS: dict[str, dict[str, Any]] = {
    "contradicts the batch": {"slots": column(2)},
    "is malformed": {"slots": b"123"},
    "skips a step": {"step": 3, "slots": column(1)},
    "repeats a step": {"step": 1, "slots": column(1)},
}


@pytest.mark.parametrize("what", BAD_PLANS)
async def test_a_bad_plan_is_a_fault_and_the_next_stream_is_whole(tiny: Path, what: str) -> None:
    async with serve(tiny, num_blocks=BLOCKS) as rig:
        run = await RunStream.open(rig)
        await run.step(**first())
        fault = await run.fault(**BAD_PLANS[what])
        assert fault.kind == pb.FAULT_KIND_BAD_PLAN and not fault.fatal
        assert fault.message
        await check_serves(rig, tiny)


async def test_a_fault_names_the_slot_where_it_can(tiny: Path) -> None:
    async with serve(tiny, num_blocks=BLOCKS) as rig:
        run = await RunStream.open(rig)
        fault = await run.fault(**first(4, token_ids=column(5, 512, 7)))
        assert read(fault.slots) == [4] and fault.step == 1


async def test_a_third_plan_before_the_first_result_is_a_fault(tiny: Path) -> None:
    hooked, release = Hooked(), threading.Event()
    async with serve(tiny, num_blocks=BLOCKS, make=hooked) as rig:
        run = await RunStream.open(rig)
        hooked.before = lambda: release.wait(30)
        await run.send(**first())
        await run.send(slots=column(1))
        await run.send(slots=column(1))
        event = await run.event()
        assert event.fault.kind == pb.FAULT_KIND_BAD_PLAN and "2 are without a result" in event.fault.message
        release.set()
        await check_serves(rig, tiny)


async def test_a_step_that_waits_starts_by_itself_and_says_how_long_it_waited(tiny: Path) -> None:
    hooked, entered, release = Hooked(), threading.Event(), threading.Event()
    async with serve(tiny, num_blocks=BLOCKS, make=hooked) as rig:
        run = await RunStream.open(rig)
        hooked.before = lambda: (entered.set(), release.wait(30))
        await run.send(**first())
        await asyncio.to_thread(entered.wait, 30)
        await run.send(slots=column(1), computed_tokens=3)  # its id is not known yet
        await asyncio.sleep(0.2)
        release.set()
        results = [await run.result(), await run.result()]
        (expected,) = reference_ids(tiny, [PROMPT], 2, ignore_eos=True)
        assert [read(result.token_ids) for result in results] == [[expected[0]], [expected[1]]]
        assert results[0].execute_us >= 190_000 and results[1].wait_us >= 190_000
        await run.close()


async def test_a_fault_loses_both_steps_in_flight(tiny: Path) -> None:
    hooked, entered, release, calls = Hooked(), threading.Event(), threading.Event(), []

    def fail() -> None:
        calls.append(1)
        entered.set()
        release.wait(30)
        raise RuntimeError("broken")

    async with serve(tiny, num_blocks=BLOCKS, make=hooked) as rig:
        run = await RunStream.open(rig)
        await run.step(**first())
        hooked.before = fail
        await run.send(slots=column(1))
        await asyncio.to_thread(entered.wait, 30)
        await run.send(slots=column(1))
        await run.send_ping()  # the plan before it has been taken once this is answered
        release.set()
        event = await run.event()
        assert event.fault.kind == pb.FAULT_KIND_INTERNAL and event.fault.step == 2
        assert await run.event() is grpc.aio.EOF
        hooked.before = None
        await check_serves(rig, tiny)
        assert calls == [1], "the step behind the faulty one was begun"


async def test_a_plan_that_contradicts_what_the_step_before_it_did_is_a_fault_of_its_own(tiny: Path) -> None:
    hooked, entered, release = Hooked(), threading.Event(), threading.Event()
    async with serve(tiny, num_blocks=BLOCKS, make=hooked) as rig:
        run = await RunStream.open(rig)
        hooked.before = lambda: (entered.set(), release.wait(30))
        await run.send(**first())
        await asyncio.to_thread(entered.wait, 30)
        await run.send(slots=column(1), token_counts=column(2))  # one id more than step 1 samples
        release.set()
        assert (await run.result()).token_ids
        event = await run.event()
        assert event.fault.kind == pb.FAULT_KIND_BAD_PLAN and event.fault.step == 2
        hooked.before = None
        await check_serves(rig, tiny)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("shapes do not match"), pb.FAULT_KIND_INTERNAL),
        (MemoryError(), pb.FAULT_KIND_OUT_OF_MEMORY),
        (torch.OutOfMemoryError("out of memory"), pb.FAULT_KIND_OUT_OF_MEMORY),
        (SystemExit(3), pb.FAULT_KIND_INTERNAL),
    ],
)
async def test_X2_an_error_in_a_forward_pass_is_a_fault_of_its_step(
    tiny: Path, error: BaseException, kind: pb.FaultKind.ValueType
) -> None:
    hooked = Hooked()
    async with serve(tiny, num_blocks=BLOCKS, make=hooked) as rig:
        run = await RunStream.open(rig)
        await run.step(**first())
        hooked.fail_once(error)
        fault = await run.fault(slots=column(1))
        assert fault.kind == kind and fault.step == 2 and not fault.fatal
        assert rig.health.is_serving("liveness")
        await check_serves(rig, tiny)


async def test_X2_memory_that_torch_cannot_get_is_out_of_memory(tiny: Path) -> None:
    hooked = Hooked()
    async with serve(tiny, num_blocks=BLOCKS, make=hooked) as rig:
        run = await RunStream.open(rig)
        hooked.before = lambda: torch.empty(1 << 60, dtype=torch.uint8)
        assert (await run.fault(**first())).kind == pb.FAULT_KIND_OUT_OF_MEMORY
        hooked.before = None
        await check_serves(rig, tiny)


@pytest.fixture(scope="module")
def good_and_broken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same model twice; in the second one id 300 makes NaN."""
    from safetensors.torch import load_file

    folder = tmp_path_factory.mktemp("broken")
    good = tiny_llama(folder / "good")
    embedding = load_file(good / "model.safetensors")["model.embed_tokens.weight"]
    embedding[300] = torch.nan
    return good, tiny_llama(folder / "broken", extra={"model.embed_tokens.weight": embedding})


async def test_nan_logits_fail_one_row_and_the_others_go_on(good_and_broken: tuple[Path, Path]) -> None:
    good, broken = good_and_broken
    async with serve(broken, num_blocks=BLOCKS) as rig:
        run = await RunStream.open(rig)
        result = await run.step(
            started=[
                started(0, block_ids=[column(1)]),
                started(1, block_ids=[column(2)], token_ids=column(5, 300, 7)),
                started(2, block_ids=[column(3)]),
            ],
            slots=column(0, 1, 2),
            token_counts=column(3, 3, 3),
        )
        (expected,) = reference_ids(good, [PROMPT], 2, ignore_eos=True)
        assert [(row.slot, row.kind) for row in result.failed] == [(1, pb.FAULT_KIND_BAD_LOGITS)]
        assert read(result.token_counts) == [0, 1]
        assert read(result.token_ids) == [expected[0]] * 2
        # The failed request is freed; its block, full of NaN, goes to another at once.
        result = await run.step(
            freed_slots=column(1),
            started=[started(3, block_ids=[column(2)])],
            slots=column(0, 2, 3),
            token_counts=column(3),
        )
        assert read(result.token_ids) == [expected[1], expected[1], expected[0]]
        assert not result.failed
        await run.close()


async def test_the_row_planned_behind_a_failed_one_fails_too_and_nothing_else(
    good_and_broken: tuple[Path, Path],
) -> None:
    good, broken = good_and_broken
    (expected,) = reference_ids(good, [PROMPT], 3, ignore_eos=True)
    async with serve(broken, num_blocks=BLOCKS) as rig:
        run = await RunStream.open(rig)
        await run.send(
            started=[started(0, block_ids=[column(1)], token_ids=column(5, 300, 7)), started(1, block_ids=[column(2)])],
            slots=column(0, 1),
            token_counts=column(3, 3),
        )
        await run.send(slots=column(0, 1), computed_tokens=6)  # before the failure can be known
        results = [await run.result(), await run.result()]
        for result, token_id in zip(results, expected, strict=False):
            assert [(row.slot, row.kind) for row in result.failed] == [(0, pb.FAULT_KIND_BAD_LOGITS)]
            assert read(result.token_counts) == [0, 1]
            assert read(result.token_ids) == [token_id]
        assert read((await run.step(freed_slots=column(0), slots=column(1))).token_ids) == [expected[2]]
        await run.close()


async def test_a_step_of_failed_rows_alone_computes_nothing(good_and_broken: tuple[Path, Path]) -> None:
    async with serve(good_and_broken[1], num_blocks=BLOCKS) as rig:
        run = await RunStream.open(rig)
        await run.step(**first(token_ids=column(5, 300, 7)))
        result = await run.step(slots=column(1))
        assert [row.slot for row in result.failed] == [1]
        assert read(result.token_counts) == [0] and not result.token_ids
        await run.close()
