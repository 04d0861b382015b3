"""Several frontend processes on one port: they share the calls, are replaced when they die, and end together."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import psutil
import pytest
from triptych.inference.v1 import inference_pb2, inference_pb2_grpc

from loadtest.stub_engine import StubEngine
from services.common.errors import StartError
from services.frontend.main import main
from tests.frontend.harness import scripted
from tests.frontend.test_process import RUN, START_S
from tests.support.calls import by_ids, greedy

OWN = [("grpc.use_local_subchannel_pool", 1)]


@asynccontextmanager
async def workers(count: int, engine: StubEngine, model: Path, *flags: str) -> AsyncIterator[tuple[int, str]]:
    """(pid, address) of a command whose processes have all attached to the engine."""
    command = [sys.executable, "-c", RUN, "--port", "0", "--workers", str(count), "--engine", engine.address]
    child = await asyncio.create_subprocess_exec(
        *command, "--model", str(model), *flags, stderr=asyncio.subprocess.PIPE
    )
    assert child.stderr is not None
    try:
        async with asyncio.timeout(START_S):
            addresses = set()
            for _ in range(count):
                while "serving frontend on " not in (line := (await child.stderr.readline()).decode()):
                    assert line, "the command ended before it served"
                addresses.add(line.rsplit(" ", 1)[1].strip())
            (address,) = addresses
            await engine.wait_until(lambda engine: len(engine.hellos) == count, START_S)
        drain = asyncio.create_task(child.stderr.read())
        yield child.pid, address
        if child.returncode is None:
            child.terminate()
        assert await asyncio.wait_for(child.wait(), 15) == 0
        await drain
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


def processes(pid: int) -> list[int]:
    """Those that serve for a command, proc(5)."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def runs(pid: int) -> bool:
    """Whether a process is there, and not only its exit status."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


async def answered(address: str) -> int:
    """How many ids a call of a connection of its own got."""
    async with grpc.aio.insecure_channel(address, options=OWN) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        answer = await stub.GenerateUnary(
            inference_pb2.GenerateUnaryRequest(request=by_ids([10], greedy(max_tokens=3))), wait_for_ready=True
        )
        return len(answer.response.choices[0].token_ids)


async def test_connections_are_spread_and_a_process_that_dies_is_replaced(text_model: Path) -> None:
    async with scripted([50]) as engine, workers(2, engine, text_model) as (pid, address):
        served = processes(pid)
        assert len(served) == 2
        assert await asyncio.gather(*(answered(address) for _ in range(24))) == [3] * 24
        assert len(set(engine.frontends_that_submitted)) == 2  # 2**-23: all to one of them
        os.kill(served[0], signal.SIGKILL)
        await engine.wait_until(lambda engine: len(engine.hellos) == 3, START_S)
        assert len(set(processes(pid)) - set(served)) == 1
        assert await asyncio.gather(*(answered(address) for _ in range(8))) == [3] * 8


async def test_a_sigterm_lets_the_streams_of_every_process_finish(text_model: Path) -> None:
    async with (
        scripted([50], step_s=0.02) as engine,
        workers(2, engine, text_model) as (pid, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        stream = inference_pb2_grpc.InferenceServiceStub(channel).Generate(by_ids([10], greedy(max_tokens=40)))
        await stream.read()
        os.kill(pid, signal.SIGTERM)
        ids = 0
        while (message := await stream.read()) is not grpc.aio.EOF:
            ids += sum(len(choice.token_ids) for choice in message.choices)
        assert ids == 40


async def test_none_outlives_the_command(text_model: Path) -> None:
    async with scripted([50]) as engine:
        with pytest.raises(AssertionError):  # it does not end well
            async with workers(2, engine, text_model) as (pid, _):
                served = processes(pid)
                os.kill(pid, signal.SIGKILL)
                await asyncio.sleep(0.5)
        assert not any(map(runs, served))


def test_a_port_in_use_is_one_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(StartError, match=rf"cannot listen on 127.0.0.1:{port}: .*in use; choose another"):
            main(["--workers", "2", "--port", port])


def test_a_model_that_is_not_there_ends_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--workers", "2", "--port", "0", "--model", "nowhere"]) == 1
    assert "no model at 'nowhere'" in capfd.readouterr().err
