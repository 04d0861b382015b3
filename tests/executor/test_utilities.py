"""Utilities of a Run stream: log levels, set between two steps."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from triptych.executor.v1 import executor_pb2 as pb

from services.common import logs
from tests.executor.mini_scheduler import RunStream, serve
from tests.executor.ranks import ranks

LOGGER = "services.executor.epoch"


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    logging.getLogger(LOGGER).setLevel(logging.NOTSET)


async def ask(run: RunStream, **utility: Any) -> pb.UtilityDone:
    await run.call.write(pb.RunRequest(utility=pb.Utility(**{"id": 7, "budget_ms": 10_000} | utility)))
    event = await run.event()
    assert event.WhichOneof("event") == "utility" and event.utility.id == 7, event
    return event.utility


async def test_a_level_is_set_and_taken_back(tiny: Path) -> None:
    async with serve(tiny, num_blocks=8) as rig:
        run = await RunStream.open(rig)
        assert (await ask(run, set_log_level="error", logger=LOGGER)).error == ""
        assert logging.getLogger(LOGGER).level == logging.ERROR
        assert (await ask(run, set_log_level="", logger=LOGGER)).error == ""
        assert logging.getLogger(LOGGER).level == logging.NOTSET
        await run.close()


async def test_what_cannot_be_set_is_said_and_the_epoch_goes_on(tiny: Path) -> None:
    async with serve(tiny, num_blocks=8) as rig:
        run = await RunStream.open(rig)
        assert "level is 'loud'" in (await ask(run, set_log_level="loud")).error
        assert "logger is 'no.such'" in (await ask(run, set_log_level="debug", logger="no.such")).error
        assert "duration_s is 0" in (await ask(run, set_log_level="debug", duration_s=0)).error
        await run.send_ping()
        await run.close()


async def test_a_step_that_outlasts_the_budget_is_not_waited_for(tiny: Path) -> None:
    async with serve(tiny, num_blocks=8) as rig:
        run = await RunStream.open(rig)
        held = threading.Event()
        rig.servicer._steps.submit(held.wait)
        told = await ask(run, set_log_level="error", logger=LOGGER, budget_ms=50)
        assert told.error == "a step has run for longer than its budget, 50 ms; try again"
        held.set()
        await ask(run, set_log_level="warning", logger=LOGGER)  # behind the first, had it stayed there
        assert logging.getLogger(LOGGER).level == logging.WARNING
        await run.close()


async def test_a_stream_that_is_closed_behind_it_is_answered_all_the_same(tiny: Path) -> None:
    async with serve(tiny, num_blocks=8) as rig:
        run = await RunStream.open(rig)
        held = threading.Event()
        rig.servicer._steps.submit(held.wait)
        await run.call.write(pb.RunRequest(utility=pb.Utility(id=1, budget_ms=10_000, set_log_level="")))
        await run.call.done_writing()
        await asyncio.sleep(0.05)
        held.set()
        assert (await run.event()).utility == pb.UtilityDone(id=1)
        assert await run.event() is grpc.aio.EOF


async def test_a_utility_that_calls_nothing_is_refused(tiny: Path) -> None:
    async with serve(tiny, num_blocks=8) as rig:
        run = await RunStream.open(rig)
        await run.call.write(pb.RunRequest(utility=pb.Utility(id=1, budget_ms=1)))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await run.event()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "utility.call: is empty" in (caught.value.details() or "")


async def test_all_ranks_are_set(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Levels:
        def __init__(self) -> None:
            self.calls: list[tuple[str, tuple[Any, ...]]] = []

        def set(self, level: str, logger: str, duration_s: float | None) -> None:
            self.calls.append((threading.current_thread().name, (level, logger, duration_s)))

    levels = Levels()
    monkeypatch.setattr(logs, "levels", lambda: levels)
    async with serve(tiny, num_blocks=8, make=ranks(2)) as rig:
        run = await RunStream.open(rig)
        await ask(run, set_log_level="error", logger=LOGGER, duration_s=60)
        await run.close()
    assert sorted(levels.calls) == [("peer-1", ("error", LOGGER, 60)), ("steps", ("error", LOGGER, 60))]
