"""Log levels of a frontend of several processes: set in all of them, and in those that are started later."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from triptych.engine.v1 import admin_pb2, admin_pb2_grpc

from services.common.errors import StartError
from services.frontend.main import main
from tests.frontend.harness import scripted
from tests.frontend.test_process import RUN
from tests.support.calls import by_ids, generate, greedy
from tests.support.checkpoints import EOS_ID
from tests.support.cluster import free_port


class Frontend:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []

    async def read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.lines.append(json.loads(line))

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                assert self.process.returncode is None, self.lines[-5:]
                await asyncio.sleep(0.02)

    def told_requests(self) -> int:
        return sum(line["message"] == "request ended" for line in self.lines)

    def attached(self) -> set[int]:
        return {line["pid"] for line in self.lines if line["message"].startswith("attached")}


@asynccontextmanager
async def workers(*flags: str) -> AsyncIterator[Frontend]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", RUN, "--workers", "2", "--log-format", "json", *flags, stderr=asyncio.subprocess.PIPE
    )
    frontend = Frontend(process)
    reading = asyncio.create_task(frontend.read())
    try:
        await frontend.until(lambda: len(frontend.attached()) == 2)
        yield frontend
    finally:
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(process.wait(), 20)
        await reading


async def ask_new(port: int) -> None:
    """Over a connection of its own, which the kernel gives to any of the processes."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        await generate(channel, by_ids([10], greedy()))


async def test_every_process_is_set_also_one_that_is_started_later(text_model: Path) -> None:
    port, admin_port = free_port(), free_port()
    flags = ("--port", str(port), "--admin-port", str(admin_port), "--model", str(text_model), "--drain-s", "1")
    async with (
        scripted([50, EOS_ID]) as engine,
        workers("--engine", engine.address, *flags) as frontend,
        grpc.aio.insecure_channel(f"127.0.0.1:{admin_port}") as channel,
    ):
        for _ in range(8):
            await ask_new(port)
        await frontend.until(lambda: frontend.told_requests() == 8)
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        quiet = admin_pb2.SetLogLevelRequest(level="warning", logger="services.frontend.request_log")
        answer = await admin.SetLogLevel(quiet)
        assert [(service.name, service.error) for service in answer.services] == [("frontend", ""), ("workers", "")]
        before = frontend.attached()
        os.kill(min(before), signal.SIGKILL)
        await frontend.until(lambda: len(frontend.attached()) == 3)
        for _ in range(16):
            await ask_new(port)
        await admin.SetLogLevel(admin_pb2.SetLogLevelRequest(logger="services.frontend.request_log"))
        await ask_new(port)
        await frontend.until(lambda: frontend.told_requests() > 8)
        assert frontend.told_requests() == 9
        children = psutil.Process(frontend.process.pid).children()
        frontend.process.terminate()
        assert await asyncio.wait_for(frontend.process.wait(), 20) == 0
        assert not any(child.is_running() for child in children)


def test_an_admin_port_that_is_taken_is_one_error(text_model: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        flags = ["--model", str(text_model), "--port", "0", "--workers", "2", "--admin-port", str(port)]
        with pytest.raises(StartError, match=f"cannot listen on 127.0.0.1:{port}"):
            main(flags)
