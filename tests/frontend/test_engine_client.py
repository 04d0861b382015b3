"""The one stream to the engine: attached, lost, refused, attached again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import pytest
from triptych.engine.v1 import engine_pb2

from loadtest.stub_engine import Faults, StubEngine
from services.common.errors import RequestError
from services.frontend.engine import Outputs, Submission
from services.frontend.engine_client import HEARTBEAT_LIMIT_S, EngineClient
from services.frontend.engine_request import EngineRequest
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


class Box:
    """Keeps what a request is given; `enough` are the choices that need no more."""

    def __init__(self) -> None:
        self.outputs: dict[int, Outputs] = {}
        self.error: RequestError | None = None
        self.enough: set[int] = set()
        self._news = asyncio.Event()

    def put(self, index: int, outputs: Outputs) -> bool:
        self.outputs[index] = self.outputs.get(index, Outputs()).then(outputs)
        self._news.set()
        return index in self.enough

    def fail(self, error: RequestError) -> None:
        self.error = self.error or error
        self._news.set()

    async def until(self, condition: Callable[[Box], bool]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not condition(self):
                self._news.clear()
                await self._news.wait()

    async def until_ids(self) -> None:
        await self.until(lambda box: any(outputs.token_ids for outputs in box.outputs.values()))

    async def until_error(self) -> RequestError:
        await self.until(lambda box: box.error is not None)
        assert self.error is not None
        return self.error


def ask(client: EngineClient, **wanted: int) -> tuple[EngineRequest, Box]:
    box = Box()
    return client.submit(submission(**wanted), box), box


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
        request, box = ask(client, max_tokens=3)
        await box.until(lambda box: 0 in box.outputs and box.outputs[0].finish is not None)
        assert list(box.outputs) == [0] and box.outputs[0].token_ids == (7, 8, 7)
        request.close()
        other, box = ask(client, max_tokens=1)
        await box.until_ids()
        assert engine.aborts == [] and other.request_id != request.request_id


async def test_choices_have_ids_in_a_row_and_no_id_is_used_twice() -> None:
    async with StubEngine(script=[7], step_s=0.01) as engine, client_of(engine) as client:
        await until(client, client.can_generate)
        first, box = ask(client, max_tokens=2, num_choices=3)
        second, other = ask(client, max_tokens=1000, num_choices=2)
        third, _ = ask(client, max_tokens=1000)
        assert (first.request_id, second.request_id, third.request_id) == (1, 4, 6)
        await box.until(lambda box: len([1 for outputs in box.outputs.values() if outputs.finish is not None]) == 3)
        assert {choice: outputs.token_ids for choice, outputs in box.outputs.items()} == {
            0: (7, 7),
            1: (8, 8),
            2: (9, 9),
        }
        other.enough.add(1)
        await engine.wait_until(lambda e: e.aborts == [5])
        first.close()
        second.close()
        client.fail_all(RequestError(grpc.StatusCode.UNAVAILABLE, "GONE", "gone"))
        await engine.wait_until(lambda e: e.aborts == [5, 4, 6] and e.num_running == 0)


@pytest.mark.parametrize(("failed_id", "aborted"), [(1, [2, 3]), (2, [1, 3])])
async def test_a_failure_ends_all_choices_and_aborts_those_it_does_not_name(failed_id: int, aborted: list[int]) -> None:
    async with StubEngine(faults=Faults(silent=True)) as engine, client_of(engine) as client:
        await until(client, client.can_generate)
        request, box = ask(client, num_choices=3)
        failed = engine_pb2.Failed(request_id=failed_id, code=13, reason="NAN", message="not a number")
        client._receive(engine_pb2.AttachResponse(outputs=engine_pb2.StepOutputs(failed=[failed])))
        assert box.error is not None and box.error.message == "not a number"
        request.close()
        last, _ = ask(client)
        last.close()  # whatever was sent before it has arrived when its abort has
        await engine.wait_until(lambda e: e.aborts == [*aborted, last.request_id])


async def test_closing_a_request_aborts_it_once() -> None:
    async with StubEngine(step_s=0.01) as engine, client_of(engine) as client:
        await until(client, client.can_generate)
        request, box = ask(client, max_tokens=1000)
        await box.until_ids()
        request.close()
        request.close()
        await engine.wait_until(lambda e: e.aborts == [request.request_id])
        assert engine.num_running == 0


async def test_an_engine_that_dies_fails_its_requests_and_is_attached_again() -> None:
    async with StubEngine(step_s=0.01) as engine, client_of(engine) as client:
        await until(client, client.can_generate)
        _, box = ask(client, max_tokens=1000)
        await box.until_ids()
        await engine.stop()
        error = await box.until_error()
        assert error.code is grpc.StatusCode.UNAVAILABLE and error.reason == "ENGINE_LOST"
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
        _, box = ask(client, max_tokens=1)
        now[0] = 2 * HEARTBEAT_LIMIT_S
        assert not client.can_generate()
        await box.until_ids()  # outputs are a sign of life too
        assert client.can_generate()
