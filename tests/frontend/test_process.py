"""A frontend as a process: start, health, SIGTERM."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from triptych.engine.v1 import engine_pb2
from triptych.inference.v1 import inference_pb2_grpc

from loadtest.stub_engine import StubEngine
from services.common.errors import StartError
from services.frontend.config import FrontendConfig
from services.frontend.main import main
from services.frontend.server import Frontend
from tests.frontend.harness import scripted, serving
from tests.support.calls import by_ids, greedy

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
START_S = 60
RUN = "import sys; from services.frontend.main import main; sys.exit(main(sys.argv[1:]))"


@asynccontextmanager
async def process(*flags: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """(process, address) of a frontend that has logged that it serves."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", RUN, "--port", "0", *flags, stderr=asyncio.subprocess.PIPE
    )
    try:
        assert child.stderr is not None
        async with asyncio.timeout(START_S):
            while "serving frontend on " not in (line := (await child.stderr.readline()).decode()):
                assert line, "the process ended before it served"
        yield child, line.rsplit(" ", 1)[1].strip()
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


async def check(channel: grpc.aio.Channel, name: str) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=name), wait_for_ready=True)).status


async def watched(channel: grpc.aio.Channel, name: str, status: int, timeout_s: float) -> None:
    """Returns when a Watch of `name` tells `status`."""
    stub = health_pb2_grpc.HealthStub(channel)
    async with asyncio.timeout(timeout_s):
        async for answer in stub.Watch(health_pb2.HealthCheckRequest(service=name)):
            if answer.status == status:
                return


async def test_sigterm_refuses_new_calls_and_lets_the_running_stream_finish(text_model: Path) -> None:
    async with (
        scripted([50], step_s=0.02) as engine,
        process("--engine", engine.address, "--model", str(text_model)) as (child, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        await watched(channel, "generate", SERVING, 10)
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        stream = stub.Generate(by_ids([10], greedy(max_tokens=60)))
        assert (await stream.read()).HasField("prompt")
        child.send_signal(signal.SIGTERM)
        await watched(channel, "readiness", NOT_SERVING, 1)
        assert await check(channel, "liveness") == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(by_ids([11], greedy())).read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        ids = []
        while (message := await stream.read()) is not grpc.aio.EOF:
            ids += [i for choice in message.choices for i in choice.token_ids]
        assert len(ids) == 60
        assert await asyncio.wait_for(child.wait(), 10) == 0


async def test_sigterm_cuts_a_stream_that_outlasts_the_drain(text_model: Path) -> None:
    async with (
        scripted([50], context_tokens=2**30, step_s=0.05) as engine,
        process("--engine", engine.address, "--model", str(text_model), "--drain-s", "0.5") as (child, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        await watched(channel, "generate", SERVING, 10)
        stream = inference_pb2_grpc.InferenceServiceStub(channel).Generate(by_ids([10], greedy()))
        await stream.read()
        child.send_signal(signal.SIGTERM)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await stream.read() is not grpc.aio.EOF:
                pass
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await asyncio.wait_for(child.wait(), 10) == 0


async def test_generate_follows_the_engine_and_readiness_does_not(text_model: Path) -> None:
    async with serving(text_model, scripted([50])) as served:
        channel = served.channel
        for name in ("liveness", "readiness", "generate", ""):
            assert await check(channel, name) == SERVING
        served.engine.set_state(engine_pb2.ENGINE_STATE_RECOVERING)
        await watched(channel, "generate", NOT_SERVING, 1)
        assert await check(channel, "") == NOT_SERVING
        served.engine.set_state(engine_pb2.ENGINE_STATE_SERVING)
        await watched(channel, "generate", SERVING, 1)
        await served.engine.stop()
        await watched(channel, "generate", NOT_SERVING, 1)
        assert await check(channel, "readiness") == await check(channel, "liveness") == SERVING
        await served.engine.start()
        await watched(channel, "generate", SERVING, 6)


async def test_a_silent_engine_turns_generate_off_within_seconds_and_back_on(text_model: Path) -> None:
    async with serving(text_model, scripted([50], heartbeat_s=0.2)) as served:
        served.engine.pause()
        await watched(served.channel, "generate", NOT_SERVING, 3.0 * 3)
        served.engine.resume()
        await watched(served.channel, "generate", SERVING, 3)


async def test_a_frontend_is_ready_before_its_engine(text_model: Path) -> None:
    engine = StubEngine()
    await engine.start()
    await engine.stop()
    frontend = Frontend(FrontendConfig(port=0, engine=engine.address, model=str(text_model)))
    await frontend.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{frontend.server.port}") as channel:
            assert await check(channel, "readiness") == SERVING
            assert await check(channel, "generate") == NOT_SERVING
    finally:
        await frontend.close()


def test_a_model_that_is_not_there_is_a_start_error() -> None:
    with pytest.raises(StartError, match="no model at 'nowhere'"):
        main(["--model", "nowhere"])


def test_the_frontend_imports_no_torch_and_no_other_service() -> None:
    foreign = "{'torch', 'transformers', 'numba', 'services.scheduler', 'services.executor'}"
    code = f"import sys, services.frontend.main; print(sorted({foreign} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--max-prompt-bytes", str(4 * 1024 * 1024)], "must be below max_message_bytes, 4194304"),
        (["--served-model-alias", ""], "served_model_alias"),
        (["--max-choices", "0"], "max_choices"),
    ],
)
def test_a_limit_that_could_never_hold_is_a_start_error(flags: list[str], says: str) -> None:
    with pytest.raises(StartError, match=says):
        main(flags)
