"""The one stream to the engine: attached, lost, refused, attached again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from triptych.engine.v1 import engine_pb2

from loadtest.stub_engine import Faults, StubEngine
from services.common.errors import RequestError
from services.frontend.engine import Outputs, Submission
from services.frontend.engine_client import HEARTBEAT_LIMIT_S, EngineClient
from services.frontend.mailbox import Mailbox
from services.frontend.request import Sampling

TIMEOUT_S = 20


def submission(*prompt: int, max_tokens: int = 4, num_choices: int = 1) -> Submission:
    return Submission(
        prompt_ids=prompt or (1, 2, 3),
        sampling=Sampling(),
        seed=1,
        max_tokens=max_tokens,
        min_tokens=0,
        stop_ids=(),
        logprobs=None,
        arrived_unix_ns=1,
        timeout_ms=None,
        num_choices=num_choices,
    )


@asynccontextmanager
async def client_of(engine: StubEngine, **arguments: object) -> AsyncIterator[EngineClient]:
    client = EngineClient(engine.address, "t" * 64, **arguments)  # type: ignore[arg-type]
    await client.start()
    try:
        yield client
    finally:
        await client.close()


async def until(client: EngineClient, condition: Callable[[], bool]) -> None:
    """Returns when `condition` holds; looked at whenever the engine's state may have changed."""
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            client.changed.clear()
            await client.changed.wait()


async def until_refused(client: EngineClient, words: str) -> None:
    """Returns when requests are refused with a reason that holds `words`."""

    def refused() -> bool:
        try:
            client.require()
        except RequestError as error:
            return words in error.message
        return False

    await until(client, refused)


def refusal(client: EngineClient) -> RequestError:
    with pytest.raises(RequestError) as caught:
        client.require()
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    assert caught.value.retry_after_s
    return caught.value


async def test_outputs_reach_their_request_and_a_finished_one_is_not_aborted() -> None:
    async with StubEngine(script=[7, 8], ids_per_step=2) as engine, client_of(engine) as client:
        await until(client, client.can_generate)
        request = client.submit(submission(max_tokens=3))
        taken = Outputs()
        while taken.finish is None:
            ((choice, outputs),) = await request.take()
            assert choice == 0
            taken = taken.then(outputs)
        assert taken.token_ids == (7, 8, 7)
        request.close()
        other = client.submit(submission(max_tokens=1))
        await other.take()
        assert engine.aborts == [] and other.request_id != request.request_id


async def test_choices_have_ids_in_a_row_and_no_id_is_used_twice() -> None:
    async with StubEngine(script=[7], step_s=0.01) as engine, client_of(engine) as client:
        await until(client, client.can_generate)
        first = client.submit(submission(max_tokens=2, num_choices=3))
        second = client.submit(submission(max_tokens=1000, num_choices=2))
        third = client.submit(submission(max_tokens=1000))
        assert (first.request_id, second.request_id, third.request_id) == (1, 4, 6)
        outputs = {choice: Outputs() for choice in range(3)}
        while any(one.finish is None for one in outputs.values()):
            outputs.update({choice: outputs[choice].then(new) for choice, new in await first.take()})
        assert [outputs[choice].token_ids for choice in range(3)] == [(7, 7), (8, 8), (9, 9)]
        await second.take()
        second.close_choice(1)
        second.close_choice(1)
        await engine.wait_until(lambda e: e.aborts == [5])
        first.close()
        second.close()
        client.fail_all(RequestError(grpc.StatusCode.UNAVAILABLE, "GONE", "gone"))
        await engine.wait_until(lambda e: e.aborts == [5, 4, 6] and e.num_running == 0)


@pytest.mark.parametrize(("failed_id", "aborted"), [(1, []), (2, [1, 3])])
async def test_a_failure_ends_all_choices_and_aborts_those_it_does_not_name(failed_id: int, aborted: list[int]) -> None:
    async with StubEngine(faults=Faults(silent=True)) as engine, client_of(engine) as client:
        await until(client, client.can_generate)
        request = client.submit(submission(num_choices=3))
        failed = engine_pb2.Failed(request_id=failed_id, code=13, reason="NAN", message="not a number")
        client._receive(engine_pb2.AttachResponse(outputs=engine_pb2.StepOutputs(failed=[failed])))
        with pytest.raises(RequestError, match="not a number"):
            await request.take()
        request.close()
        last = client.submit(submission())
        last.close()  # whatever was sent before it has arrived when its abort has
        await engine.wait_until(lambda e: e.aborts == [*aborted, last.request_id])


async def test_closing_a_request_aborts_it_once() -> None:
    async with StubEngine(step_s=0.01) as engine, client_of(engine) as client:
        await until(client, client.can_generate)
        request = client.submit(submission(max_tokens=1000))
        await request.take()
        request.close()
        request.close()
        await engine.wait_until(lambda e: e.aborts == [request.request_id])
        assert engine.num_running == 0


async def test_an_engine_that_dies_fails_its_requests_and_is_attached_again() -> None:
    async with StubEngine(step_s=0.01) as engine, client_of(engine) as client:
        await until(client, client.can_generate)
        request = client.submit(submission(max_tokens=1000))
        await request.take()
        await engine.stop()
        with pytest.raises(RequestError) as caught:
            while True:
                await request.take()
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE and caught.value.reason == "ENGINE_LOST"
        assert not client.can_generate() and client.facts is not None
        refusal(client)
        await engine.start()
        await until(client, client.can_generate)
        assert len(engine.hellos) == 2
        assert engine.hellos[0].frontend_id == engine.hellos[1].frontend_id


async def test_a_tokenizer_that_does_not_fit_is_told_and_tried_again_slowly(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with StubEngine(tokenizer_hash="other") as engine, client_of(engine) as client:
        await until_refused(client, "tokenizer tttt")
        await asyncio.sleep(0.5)
        assert len(engine.hellos) == 1, "tried again at once"
        assert [record.levelname for record in caplog.records] == ["WARNING"]


async def test_an_engine_of_another_version_is_left(caplog: pytest.LogCaptureFixture) -> None:
    async with StubEngine(faults=Faults(hello_version=9)) as engine, client_of(engine) as client:
        await until_refused(client, "version 9")
        assert "version 9" in caplog.text


async def test_an_absent_engine_is_logged_once_not_at_every_try(caplog: pytest.LogCaptureFixture) -> None:
    engine = StubEngine()
    await engine.start()
    await engine.stop()
    async with client_of(engine) as client:
        await until_refused(client, "UNAVAILABLE")
        await asyncio.sleep(1)
        assert len([record for record in caplog.records if "no engine" in record.message]) == 1
        assert engine.address in caplog.text


async def test_a_client_is_not_told_where_the_engine_is_in_any_phase() -> None:
    engine = StubEngine(faults=Faults(no_hello=grpc.StatusCode.INTERNAL))
    async with client_of(engine) as client:  # nothing listens yet: port 0
        await until_refused(client, "UNAVAILABLE")
    await engine.start()
    async with client_of(engine) as client:
        told = [refusal(client).message]
        await until_refused(client, "INTERNAL")
        told.append(refusal(client).message)
        engine.faults = Faults()
        await until(client, client.can_generate)
        await engine.stop()
        await until_refused(client, "UNAVAILABLE")
        told.append(refusal(client).message)
    assert len(set(told)) == 3
    for message in told:
        assert str(engine.port) not in message and "127.0.0.1" not in message and "ipv4" not in message


async def test_the_engines_state_decides_what_is_taken() -> None:
    async with StubEngine() as engine, client_of(engine) as client:
        await until(client, client.can_generate)
        engine.set_state(engine_pb2.ENGINE_STATE_RECOVERING)
        await until(client, lambda: not client.can_generate())
        client.require()  # requests wait there
        engine.set_state(engine_pb2.ENGINE_STATE_DRAINING)
        await until_refused(client, "draining")
        engine.set_state(engine_pb2.ENGINE_STATE_SERVING)
        await until(client, client.can_generate)


async def test_an_engine_that_is_silent_for_three_seconds_does_not_count() -> None:
    now = [0.0]
    async with (
        StubEngine(faults=Faults(no_heartbeats=True)) as engine,
        client_of(engine, clock=lambda: now[0]) as client,
    ):
        await until(client, client.can_generate)
        now[0] = HEARTBEAT_LIMIT_S - 0.1
        assert client.can_generate()
        now[0] = HEARTBEAT_LIMIT_S
        assert not client.can_generate()
        assert "3.0 s ago" in refusal(client).message
        engine.set_state(engine_pb2.ENGINE_STATE_SERVING)  # a heartbeat
        await until(client, client.can_generate)
        request = client.submit(submission(max_tokens=1))
        now[0] = 2 * HEARTBEAT_LIMIT_S
        assert not client.can_generate()
        await request.take()  # outputs are a sign of life too
        assert client.can_generate()


async def test_a_mailbox_gives_up_at_its_time_and_leaves_no_timer_when_it_is_left() -> None:
    loop = asyncio.get_running_loop()
    mailbox = Mailbox()
    assert await mailbox.take(loop.time() + 0.01) == []
    timers: list[asyncio.TimerHandle] = []
    call_at = loop.call_at

    def kept(*arguments: Any, **more: Any) -> asyncio.TimerHandle:
        timers.append(call_at(*arguments, **more))
        return timers[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "call_at", kept)
        left = asyncio.create_task(mailbox.take(loop.time() + 1000))
        served = asyncio.create_task(Mailbox().take(None))
        await asyncio.sleep(0)
        left.cancel()
        served.cancel()
        await asyncio.wait([left, served])
        reading = asyncio.create_task(mailbox.take(loop.time() + 1000))
        await asyncio.sleep(0)
        mailbox.put(0, Outputs((1,)))
        assert await reading == [(0, Outputs((1,)))]
    assert len(timers) == 2 and all(timer.cancelled() for timer in timers)


async def test_outputs_of_a_slow_reader_are_joined_and_come_before_its_error() -> None:
    mailbox = Mailbox()
    mailbox.put(0, Outputs((1, 2), cached_tokens=3))
    mailbox.put(1, Outputs((9,)))
    mailbox.put(0, Outputs((4,)))
    mailbox.fail(RequestError(grpc.StatusCode.INTERNAL, "FIRST", "first"))
    mailbox.fail(RequestError(grpc.StatusCode.INTERNAL, "SECOND", "second"))
    assert await mailbox.take() == [(0, Outputs((1, 2, 4), cached_tokens=3)), (1, Outputs((9,)))]
    for _ in range(2):
        with pytest.raises(RequestError, match="first"):
            await mailbox.take()
