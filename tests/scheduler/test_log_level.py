"""SetLogLevel of a scheduler: its own level and its executor's; and the line of the log that each admin call leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from triptych.engine.v1 import admin_pb2

from loadtest.stub_executor import StubExecutor
from services.common import audit
from services.scheduler import executor_run
from tests.frontend.harness import fields_at_fault
from tests.scheduler.test_admin import admin_of
from tests.support.attached import bench, until

LOGGER = "services.scheduler.door"


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    logging.getLogger(LOGGER)
    yield
    logging.getLogger(LOGGER).setLevel(logging.NOTSET)


def request(level: str = "error", logger: str = LOGGER, **more: Any) -> admin_pb2.SetLogLevelRequest:
    return admin_pb2.SetLogLevelRequest(level=level, logger=logger, **more)


def told(answer: admin_pb2.SetLogLevelResponse) -> dict[str, str]:
    return {service.name: service.error for service in answer.services}


async def test_scheduler_and_executor_are_set(model: Path) -> None:
    async with bench(model) as b, admin_of(b) as admin:
        answer = await admin.SetLogLevel(request(duration_s=60))
        assert told(answer) == {"scheduler": "", "executor": ""}
        assert logging.getLogger(LOGGER).level == logging.ERROR
        (utility,) = b.stub.utilities
        assert (utility.set_log_level, utility.logger, utility.duration_s) == ("error", LOGGER, 60)
        await admin.SetLogLevel(request(""))
        assert logging.getLogger(LOGGER).level == logging.NOTSET
        assert not b.stub.utilities[1].HasField("duration_s") and b.stub.utilities[1].set_log_level == ""


async def test_a_logger_that_only_the_executor_has_is_set_there(model: Path) -> None:
    async with bench(model) as b, admin_of(b) as admin:
        answer = await admin.SetLogLevel(request(logger="only.there"))
        assert told(answer)["executor"] == "" and "has none of that name" in told(answer)["scheduler"]


async def test_a_logger_that_nobody_has_is_refused(model: Path) -> None:
    async with bench(model) as b, admin_of(b) as admin:
        b.stub.utility_error = "no such logger"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await admin.SetLogLevel(request(logger="no.such"))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert fields_at_fault(caught.value) == ["logger"]
        assert "executor: no such logger" in (caught.value.details() or "")


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (request("loud"), "level"),
        (request("debug", duration_s=0), "duration_s"),
        (request("debug", duration_s=604_801), "duration_s"),
        (request("", duration_s=5), "duration_s"),
    ],
)
async def test_what_cannot_be_is_refused_before_anything_is_set(
    model: Path, asked: admin_pb2.SetLogLevelRequest, field: str
) -> None:
    async with bench(model) as b, admin_of(b) as admin:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await admin.SetLogLevel(asked)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert fields_at_fault(caught.value) == [field]
        assert b.stub.utilities == [] and logging.getLogger(LOGGER).level == logging.NOTSET


async def test_an_executor_of_an_older_version_is_not_asked(model: Path) -> None:
    async with bench(model, stub=StubExecutor(features=("grammar",))) as b, admin_of(b) as admin:
        answer = await admin.SetLogLevel(request())
        assert told(answer) == {"scheduler": "", "executor": "this executor's version does not serve it"}
        assert b.stub.utilities == []


async def test_without_an_executor_the_scheduler_is_set_and_says_so(model: Path) -> None:
    async with bench(model) as b, admin_of(b) as admin:
        await b.stub.stop()
        await until(lambda: not b.server.engine.can_generate)
        assert told(await admin.SetLogLevel(request()))["executor"] == "the scheduler has no executor now; try again"


async def test_an_executor_lost_meanwhile_is_told(model: Path) -> None:
    async with bench(model) as b, admin_of(b) as admin:
        b.stub.utility_error = None
        asked = asyncio.ensure_future(admin.SetLogLevel(request()))
        await until(lambda: b.stub.utilities)
        await b.stub.stop()
        assert told(await asked)["executor"].startswith("it was lost: its stream ended with")


async def test_an_executor_that_does_not_answer_is_not_waited_for(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_run, "UTILITY_MS", 100)
    monkeypatch.setattr(executor_run, "STEP_SLACK_S", 0.1)
    async with bench(model) as b, admin_of(b) as admin:
        b.stub.utility_error = None
        assert told(await admin.SetLogLevel(request()))["executor"] == "it does not answer"
        b.stub.utility_error = ""
        assert told(await admin.SetLogLevel(request()))["executor"] == ""


# -- who asked for what


def audited(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [record.fields for record in caplog.records if record.name == audit.__name__]  # type: ignore[attr-defined]


async def test_each_call_that_changes_something_is_told_with_who_made_it(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    caplog.handler.setLevel(logging.NOTSET)
    async with bench(model) as b, admin_of(b) as admin:
        await admin.FlushPrefixCache(admin_pb2.FlushPrefixCacheRequest())
        await admin.SetLogLevel(request("warning", duration_s=60))
        with pytest.raises(grpc.aio.AioRpcError):
            await admin.SetLogLevel(request("loud\nforged"))
        await admin.GetStats(admin_pb2.GetStatsRequest())
        events = admin.SubscribeKvEvents(admin_pb2.SubscribeKvEventsRequest())
        await events.read()
        events.cancel()
        await until(lambda: len(audited(caplog)) == 4)
    flush, level, refused, subscription = audited(caplog)
    assert flush.pop("peer").startswith("ipv4:127.0.0.1:")
    assert flush == {"method": "FlushPrefixCache", "status": "OK", "flushed_blocks": 0}
    assert (level["level"], level["logger"], level["for_s"], level["status"]) == ("warning", LOGGER, 60, "OK")
    assert (refused["status"], refused["reason"]) == ("INVALID_ARGUMENT", "INVALID_FIELD")
    assert "loud" in refused["error"]
    assert (subscription["method"], subscription["status"]) == ("SubscribeKvEvents", "CANCELLED")
