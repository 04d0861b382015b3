"""A Run stream is an epoch: when it begins, what ends it, what it forgets, and what it says meanwhile."""

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

from services.executor.epoch import HEARTBEAT_S
from tests.executor.hooks import Hooked
from tests.executor.mini_scheduler import GREEDY, Request, Rig, RunStream, column, next_epoch, read, serve
from tests.executor.mini_scheduler import MiniScheduler as Scheduler
from tests.support.checkpoints import reference_ids

BLOCKS = 20
PROMPT = [5, 6, 7]


def first(slot: int = 1, **changes: Any) -> dict[str, Any]:
    """A plan that starts a request of PROMPT and prefills it."""
    fields = {"token_ids": column(*PROMPT), "prompt_tokens": 3, "block_ids": [column(3)], "sampling": GREEDY}
    request = pb.NewRequest(slot=slot, **(fields | changes))
    return {"started": [request], "slots": column(slot), "token_counts": column(len(request.token_ids) // 4)}


async def refused(rig: Rig, *requests: pb.RunRequest) -> tuple[grpc.StatusCode, str]:
    """The status that a Run stream of `requests` ends with."""
    call = rig.stub.Run()
    for request in requests:
        await call.write(request)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        while await call.read() is not grpc.aio.EOF:
            pass
        raise AssertionError("the stream ended well")
    return error.value.code(), error.value.details()


def opening(epoch: int, version: int = 1) -> pb.RunRequest:
    return pb.RunRequest(open=pb.Open(epoch=epoch, version=version))


async def test_a_higher_epoch_ends_the_running_stream_with_aborted_and_forgets_its_slots(tiny: Path) -> None:
    async with serve(tiny, num_blocks=BLOCKS) as rig:
        old = await RunStream.open(rig)
        await old.step(**first())
        new = await RunStream.open(rig)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await old.event()
        assert error.value.code() == grpc.StatusCode.ABORTED
        assert (await new.step(**first())).token_ids  # slot 1 is free again
        await new.close()


async def test_an_epoch_that_is_not_higher_is_refused_and_leaves_the_running_one_alone(tiny: Path) -> None:
    async with serve(tiny, num_blocks=BLOCKS) as rig:
        epoch = next_epoch()
        run = await RunStream.open(rig, epoch)
        for late in (epoch, epoch - 1, 0):
            code, details = await refused(rig, opening(late))
            assert code == grpc.StatusCode.FAILED_PRECONDITION and str(epoch) in details
        assert (await run.step(**first())).token_ids
        await run.close()
        assert (await refused(rig, opening(epoch)))[0] == grpc.StatusCode.FAILED_PRECONDITION
        assert (await rig.load()).last_epoch == epoch, "who comes next, with whatever clock, is told"


async def test_a_new_stream_has_no_slot_of_the_old_one(tiny: Path) -> None:
    async with serve(tiny, num_blocks=BLOCKS) as rig:
        run = await RunStream.open(rig)
        await run.step(**first())
        await run.close()
        run = await RunStream.open(rig)
        assert (await run.fault(slots=column(1))).kind == pb.FAULT_KIND_BAD_PLAN


async def test_a_caller_that_vanishes_in_a_step_leaves_a_whole_executor(tiny: Path) -> None:
    hooked, entered, release = Hooked(), threading.Event(), threading.Event()
    async with serve(tiny, num_blocks=BLOCKS, make=hooked) as rig:
        run = await RunStream.open(rig)
        hooked.before = lambda: (entered.set(), release.wait(30))
        await run.send(**first())
        await asyncio.to_thread(entered.wait, 30)
        run.call.cancel()
        opened = asyncio.create_task(RunStream.open(rig))
        hooked.before = None
        release.set()
        run = await opened
        request = Request(PROMPT, 4)
        await Scheduler(run, rig.config, BLOCKS).finish([request])
        assert [request.output] == reference_ids(tiny, [PROMPT], 4, ignore_eos=True)
        await run.close()


async def test_a_stream_that_does_not_begin_with_open_is_refused(tiny: Path) -> None:
    async with serve(tiny, num_blocks=BLOCKS) as rig:
        for request in (pb.RunRequest(plan=pb.StepPlan(step=1)), pb.RunRequest(ping=pb.Ping()), pb.RunRequest()):
            code, details = await refused(rig, request)
            assert code == grpc.StatusCode.INVALID_ARGUMENT and details.startswith("open:")
        code, details = await refused(rig, opening(next_epoch()), opening(next_epoch()))
        assert code == grpc.StatusCode.INVALID_ARGUMENT and details.startswith("open:")
        code, details = await refused(rig, opening(next_epoch(), version=2))
        assert code == grpc.StatusCode.FAILED_PRECONDITION and "version 2" in details


async def test_a_utility_without_a_call_is_refused_by_name(tiny: Path) -> None:
    async with serve(tiny, num_blocks=BLOCKS) as rig:
        code, details = await refused(rig, opening(next_epoch()), pb.RunRequest(utility=pb.Utility(id=1)))
        assert code == grpc.StatusCode.INVALID_ARGUMENT and details.startswith("utility.call")


async def test_run_before_allocate_is_refused(tiny: Path) -> None:
    async with serve(tiny) as rig:
        assert (await refused(rig, opening(next_epoch())))[0] == grpc.StatusCode.FAILED_PRECONDITION
        await rig.load()
        assert (await refused(rig, opening(next_epoch())))[0] == grpc.StatusCode.FAILED_PRECONDITION


async def test_heartbeats_and_pings_are_answered_while_a_step_runs(tiny: Path) -> None:
    hooked, release = Hooked(), threading.Event()
    async with serve(tiny, num_blocks=BLOCKS, make=hooked) as rig:
        epoch = next_epoch()
        run = await RunStream.open(rig, epoch)
        await run.step(**first())
        hooked.before = lambda: release.wait(60)
        await run.send(slots=column(1))
        await run.call.write(pb.RunRequest(ping=pb.Ping(sent_unix_ns=42)))
        begun = time.monotonic()
        answer = (await run.call.read()).heartbeat
        assert (answer.epoch, answer.ping_unix_ns, answer.step) == (epoch, 42, 1)
        beats = [(await run.call.read()).heartbeat for _ in range(2)]
        assert time.monotonic() - begun < 3 * (2 * HEARTBEAT_S)
        assert beats[0].running_ms < beats[1].running_ms
        assert beats[1].running_ms >= 500 * HEARTBEAT_S
        assert not beats[0].HasField("ping_unix_ns")
        release.set()
        assert (await run.event()).result.step == 2
        await run.close()


async def test_a_drain_answers_the_step_in_flight_then_ends_the_stream_and_refuses_the_next(tiny: Path) -> None:
    hooked, entered, release = Hooked(), threading.Event(), threading.Event()
    async with serve(tiny, num_blocks=BLOCKS, make=hooked) as rig:
        run = await RunStream.open(rig)
        hooked.before = lambda: (entered.set(), release.wait(30))
        await run.send(**first())
        await asyncio.to_thread(entered.wait, 30)
        draining = asyncio.create_task(rig.servicer.drain())
        await asyncio.sleep(0.05)
        release.set()
        assert (await run.event()).result.token_ids
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await run.event()
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        await draining
        assert (await refused(rig, opening(next_epoch())))[0] == grpc.StatusCode.UNAVAILABLE


async def test_a_step_that_never_ends_does_not_hold_up_the_end_of_the_process(tiny: Path) -> None:
    hooked, entered, release = Hooked(), threading.Event(), threading.Event()
    async with serve(tiny, num_blocks=BLOCKS, make=hooked) as rig:
        run = await RunStream.open(rig)
        hooked.before = lambda: (entered.set(), release.wait(60))
        await run.send(**first())
        await asyncio.to_thread(entered.wait, 30)
        begun = time.monotonic()
        await rig.servicer.close()
        assert time.monotonic() - begun < 3 * 2.0  # the 2 s that close gives it
        release.set()


async def test_generate_is_serving_while_a_stream_is_open_and_well(tiny: Path) -> None:
    async def becomes(name: str, serving: bool) -> None:
        for _ in range(500):
            if rig.health.is_serving(name) == serving:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"{name} is not {serving}")

    async with serve(tiny) as rig:
        await rig.load()
        await rig.allocate(BLOCKS)
        assert rig.health.is_serving("liveness") and not rig.health.is_serving("generate")
        run = await RunStream.open(rig)
        await becomes("generate", True)
        await run.fault(slots=column(1))
        await becomes("generate", False)
        run = await RunStream.open(rig)
        await becomes("", True)
        await run.close()
        await becomes("", False)


async def test_liveness_ends_with_the_step_thread(tiny: Path) -> None:
    async with serve(tiny, num_blocks=BLOCKS) as rig:
        await asyncio.to_thread(rig.servicer._steps.close)
        for _ in range(500):
            if not rig.health.is_serving("liveness"):
                break
            await asyncio.sleep(0.01)
        assert not any(rig.health.is_serving(name) for name in ("liveness", "readiness", "generate"))


async def test_logprobs_come_for_the_rows_that_asked_and_agree_with_the_logits(tiny: Path) -> None:
    from transformers import AutoModelForCausalLM

    async with serve(tiny, num_blocks=BLOCKS) as rig:
        run = await RunStream.open(rig)
        plans = [first(0), first(1, block_ids=[column(4)], logprobs=0), first(2, block_ids=[column(5)])]
        result = await run.step(
            started=[p["started"][0] for p in plans], slots=column(0, 1, 2), token_counts=column(3, 3, 3)
        )
        assert read(result.logprobs.places) == [1] and read(result.logprobs.ranks) == [1]
        model = AutoModelForCausalLM.from_pretrained(tiny)
        import torch

        expected = model(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1).max().item()
        np.testing.assert_allclose(np.frombuffer(result.logprobs.logprobs, "<f4"), [expected], rtol=1e-4)
        result = await run.step(freed_slots=column(0, 2), slots=column(1))
        assert result.logprobs.places == b"" and len(read(result.logprobs.ranks)) == 1  # all of them
        await run.close()


async def test_the_draws_of_a_request_go_on_where_they_were_after_a_preemption(tiny: Path) -> None:
    """Noise is a function of seed and output position, so the executor must tell prompt from output when it resumes."""
    sampling = generation_pb2.Sampling(temperature=1.0, repetition_penalty=1.3, frequency_penalty=0.5)
    outputs = []
    for preempt_every in (0, 3):
        async with serve(tiny, num_blocks=BLOCKS) as rig:
            run = await RunStream.open(rig)
            asked = [Request(PROMPT, 12, sampling=sampling, seed=1 << 63 | seed) for seed in range(3)]
            await Scheduler(run, rig.config, BLOCKS).finish(asked, preempt_every=preempt_every)
            await run.close()
            outputs.append([request.output for request in asked])
    assert outputs[0] == outputs[1]
    assert len({tuple(output) for output in outputs[0]}) == 3
