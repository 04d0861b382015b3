"""Rows G1 and G5 at the frontend: every stream has one end, and no handler hangs."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from triptych.engine.v1 import engine_pb2
from triptych.inference.v1 import inference_pb2

from loadtest.stub_engine import Faults
from tests.frontend.harness import Served, attached, reason, retry_after_s, scripted, serving, text_checkpoint
from tests.support.calls import Answer, by_ids, generate, greedy
from tests.support.checkpoints import EOS_ID

AT_ONCE_S = 1.0
"""Three times what "at once" is given: these ends take milliseconds."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_checkpoint(tmp_path_factory.mktemp("streams") / "tiny-text")


@pytest.fixture(params=["untraced", "traced"])
def settings(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """A frontend's, with tracing off, and on with a collector that takes connections and never says a word."""
    if request.param == "untraced":
        yield {}
        return
    with socket.socket() as collector:
        collector.bind(("127.0.0.1", 0))
        collector.listen()
        yield {"otlp_endpoint": f"http://127.0.0.1:{collector.getsockname()[1]}"}


async def collect(served: Served, options: inference_pb2.Options, **call: Any) -> tuple[Answer, grpc.StatusCode]:
    """What came, and the status."""
    answer = Answer()
    stream = served.stub.Generate(by_ids([10], options), **call)
    try:
        async for message in stream:
            answer.messages.append(message)
    except grpc.aio.AioRpcError as error:
        return answer, error.code()
    return answer, await stream.code()


@pytest.mark.parametrize(
    ("script", "options", "ended"),
    [
        ([50, EOS_ID], greedy(), "STOP"),
        ([50], greedy(max_tokens=3), "LENGTH"),
        ([50, 60], greedy(stop_token_ids=[60]), "STOP"),
        ([50], greedy(max_tokens=0), "LENGTH"),
    ],
)
async def test_G1_a_stream_that_ends_well_has_one_finish_and_then_one_usage(
    model: Path, script: list[int], options: inference_pb2.Options, ended: str
) -> None:
    async with serving(model, scripted(script)) as served:
        answer, status = await collect(served, options)
        assert status is grpc.StatusCode.OK and answer.reason == ended
        kinds = ["prompt" if m.HasField("prompt") else "usage" if m.HasField("usage") else "c" for m in answer.messages]
        assert kinds[0] == "prompt" and kinds[-1] == "usage" and set(kinds[1:-1]) == {"c"}
        assert answer.messages[-2].choices[0].HasField("finish")
        assert not any(m.choices for m in (answer.messages[0], answer.messages[-1]))
        assert answer.usage.completion_tokens == len(answer.ids)


async def test_G1_a_stop_string_ends_the_stream_once(model: Path) -> None:
    async with serving(model, scripted([50, 51, 52])) as served:
        answer, status = await collect(served, greedy(stop=[served.decode([51])]))
        assert status is grpc.StatusCode.OK and answer.reason == "STOP" and answer.ids == [50, 51]
        await served.engine.wait_until(lambda engine: len(engine.aborts) == 1)


async def test_G1_an_engine_that_dies_ends_the_stream_unavailable(model: Path) -> None:
    async with serving(model, scripted([50], faults=Faults(cut_at=3), step_s=0.01)) as served:
        stream = served.stub.Generate(by_ids([10], greedy()))
        seen = []
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for message in stream:
                seen.append(message)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE and reason(caught.value) == "ENGINE_LOST"
        assert retry_after_s(caught.value) > 0
        ids = [i for m in seen for choice in m.choices for i in choice.token_ids]
        assert ids == [50] * 3 and not any(choice.HasField("finish") for m in seen for choice in m.choices)


async def test_G1_an_engine_that_dies_before_the_first_token_never_leaves_an_empty_ok(model: Path) -> None:
    async with serving(model, scripted([50], faults=Faults(silent=True))) as served:
        call = asyncio.create_task(collect(served, greedy()))
        await served.engine.wait_until(lambda engine: len(engine.submits) == 1)
        await served.engine.stop()
        answer, status = await asyncio.wait_for(call, AT_ONCE_S * 3)
        assert status is grpc.StatusCode.UNAVAILABLE and not answer.finishes
        _, status = await collect(served, greedy())
        assert status is grpc.StatusCode.UNAVAILABLE  # no engine now
        await served.engine.start()
        await asyncio.wait_for(attached(served.frontend), 10)


@pytest.mark.parametrize(
    ("failed", "status"),
    [
        (engine_pb2.Failed(code=8, reason="QUEUE_FULL", message="queue full"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (engine_pb2.Failed(code=14, reason="EXECUTOR_LOST", message="gone"), grpc.StatusCode.UNAVAILABLE),
        (engine_pb2.Failed(code=13, reason="NAN", message="NaN logits"), grpc.StatusCode.INTERNAL),
        (engine_pb2.Failed(code=4, reason="DEADLINE", message="too late"), grpc.StatusCode.DEADLINE_EXCEEDED),
        (engine_pb2.Failed(code=12, reason="FIELD", message="no"), grpc.StatusCode.UNIMPLEMENTED),
    ],
)
@pytest.mark.parametrize("failed_at", [0, 2])
async def test_G1_a_request_the_engine_fails_has_the_engines_status(
    model: Path, failed: engine_pb2.Failed, status: grpc.StatusCode, failed_at: int
) -> None:
    faults = Faults(failed=failed, failed_at=failed_at)
    async with serving(model, scripted([50], faults=faults)) as served:
        answer, ended = await collect(served, greedy())
        assert ended is status and not answer.finishes and answer.ids == [50] * failed_at


async def test_G1_a_cancelled_stream_ends_cancelled_and_frees_the_engine(model: Path) -> None:
    async with serving(model, scripted([50], step_s=0.01)) as served:
        stream = served.stub.Generate(by_ids([10], greedy()))
        async for message in stream:
            if message.choices:
                break
        stream.cancel()
        assert await stream.code() is grpc.StatusCode.CANCELLED
        await served.engine.wait_until(lambda engine: len(engine.aborts) == 1 and engine.num_running == 0)


async def test_G1_a_deadline_travels_and_ends_the_stream(model: Path) -> None:
    async with serving(model, scripted([50], faults=Faults(silent=True))) as served:
        _, status = await collect(served, greedy(), timeout=0.5)
        assert status is grpc.StatusCode.DEADLINE_EXCEEDED
        (submit,) = served.engine.submits
        assert 0 < submit.timeout_ms <= 500
        await served.engine.wait_until(lambda engine: len(engine.aborts) == 1)
        task = asyncio.create_task(collect(served, greedy()))
        await served.engine.wait_until(lambda engine: len(engine.submits) == 2)
        assert not served.engine.submits[1].HasField("timeout_ms")
        task.cancel()


async def test_G5_a_handler_that_waits_is_ended_by_a_shutdown(model: Path, settings: dict[str, Any]) -> None:
    async with serving(model, scripted([50], faults=Faults(silent=True)), **settings) as served:
        call = asyncio.create_task(collect(served, greedy()))
        await served.engine.wait_until(lambda engine: len(engine.submits) == 1)
        drain = asyncio.create_task(served.frontend.drain())
        await asyncio.sleep(0.1)
        assert not call.done(), "a running stream is given its time"
        drain.cancel()  # the time is over
        started = time.monotonic()
        _, status = await asyncio.wait_for(call, AT_ONCE_S)
        assert status is grpc.StatusCode.UNAVAILABLE
        assert time.monotonic() - started < AT_ONCE_S
        await served.engine.wait_until(lambda engine: len(engine.aborts) == 1)


async def test_G5_a_server_that_stops_ends_what_is_open(model: Path, settings: dict[str, Any]) -> None:
    async with serving(model, scripted([50], faults=Faults(silent=True)), **settings) as served:
        calls = [asyncio.create_task(collect(served, greedy())) for _ in range(3)]
        await served.engine.wait_until(lambda engine: len(engine.submits) == 3)
        await served.frontend.close()
        for call in calls:
            _, status = await asyncio.wait_for(call, AT_ONCE_S * 2)
            assert status in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)


async def test_G5_a_drain_lets_streams_finish_and_refuses_new_ones(model: Path, settings: dict[str, Any]) -> None:
    async with serving(model, scripted([50], step_s=0.02), **settings) as served:
        call = asyncio.create_task(generate(served.channel, by_ids([10], greedy(max_tokens=20))))
        await served.engine.wait_until(lambda engine: len(engine.submits) == 1)
        drain = asyncio.create_task(served.frontend.drain())
        await asyncio.sleep(0.05)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(served.channel, by_ids([11], greedy()))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE and reason(caught.value) == "DRAINING"
        assert retry_after_s(caught.value) > 0
        assert len((await call).ids) == 20
        await asyncio.wait_for(drain, AT_ONCE_S)


async def test_G5_every_ended_call_is_counted_out(model: Path, settings: dict[str, Any]) -> None:
    async with serving(model, scripted([50], step_s=0.005), **settings) as served:
        streams = [served.stub.Generate(by_ids([10 + n], greedy())) for n in range(8)]
        for n, stream in enumerate(streams):
            if n % 2:
                await anext(aiter(stream))
            stream.cancel()
        await asyncio.wait_for(served.frontend.drain(), 10)
        await served.engine.wait_until(lambda engine: engine.num_running == 0)
