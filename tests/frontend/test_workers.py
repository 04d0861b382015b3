"""Several frontend processes on one port: they share the calls, are replaced when they die, and end together."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import grpc
import psutil
import pytest
from triptych.inference.v1 import inference_pb2, inference_pb2_grpc

from loadtest.stub_engine import StubEngine
from services.common.errors import StartError
from services.common.telemetry import names
from services.frontend.main import main
from services.frontend.workers import Crashes
from tests.frontend.harness import scripted, user
from tests.frontend.test_process import RUN, START_S
from tests.support.calls import by_ids, greedy
from tests.support.cluster import free_port
from tests.support.metered import scrape

CRASH_ONCE = """
import pathlib, sys
crashed = pathlib.Path(__file__).with_name("crashed")
if "services.frontend.worker" in sys.orig_argv and not crashed.exists():
    from services.common import collector
    def hold():
        crashed.touch()
        raise RuntimeError("it crashes")
    collector.hold = hold
"""
"""A module sitecustomize, which Python imports as it starts: the first processes of a frontend end by an exception."""

CRASH_ALWAYS = """
import sys
if "services.frontend.worker" in sys.orig_argv:
    from services.common import collector
    def hold():
        raise RuntimeError("it crashes")
    collector.hold = hold
elif "-c" in sys.orig_argv:
    from services.frontend import workers
    workers.FIRST_AGAIN_S = workers.LAST_AGAIN_S = 0.01
"""
"""As above, each time; the command itself waits less between them."""

Answer = TypeVar("Answer")
OWN = [("grpc.use_local_subchannel_pool", 1)]


@asynccontextmanager
async def workers(
    count: int, engine: StubEngine, model: Path, *flags: str, **environment: str
) -> AsyncIterator[tuple[int, str]]:
    """(pid, address) of a command, in a process group of its own, whose processes have all attached to the engine."""
    command = [sys.executable, "-P", "-c", RUN, "--port", "0", "--workers", str(count), "--engine", engine.address]
    child = await asyncio.create_subprocess_exec(
        *command,
        *("--model", str(model), *flags),
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | environment,
        start_new_session=True,
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


async def once_attached(call: Callable[[], Awaitable[Answer]]) -> Answer:
    """An answer; the engine has a process's hello a moment before the process has the engine's."""
    async with asyncio.timeout(START_S):
        while True:
            try:
                return await call()
            except grpc.aio.AioRpcError as error:
                if "no engine is attached" not in (error.details() or ""):
                    raise
                await asyncio.sleep(0.05)


async def answered(address: str) -> int:
    """How many ids a call of a connection of its own got."""
    request = inference_pb2.GenerateUnaryRequest(request=by_ids([10], greedy(max_tokens=3)))
    async with grpc.aio.insecure_channel(address, options=OWN) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        answer = await once_attached(lambda: stub.GenerateUnary(request, wait_for_ready=True))
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


async def test_a_tenants_limit_is_that_of_all_processes_together(text_model: Path) -> None:
    flags = ("--tenant-requests-per-s", "0.001", "--tenant-burst-requests", "6")
    request = inference_pb2.GenerateUnaryRequest(request=by_ids([10], greedy(max_tokens=1)))

    async def reason(address: str) -> str:
        async with grpc.aio.insecure_channel(address, options=OWN) as channel:
            try:
                await inference_pb2_grpc.InferenceServiceStub(channel).GenerateUnary(request, wait_for_ready=True)
            except grpc.aio.AioRpcError as error:
                return f"{error.code().name}: {error.details()}"
        return ""

    async with scripted([50]) as engine, workers(2, engine, text_model, *flags) as (_, address):
        ended = await asyncio.gather(*(reason(address) for _ in range(40)))
    # One that is let in before its process has the engine's hello ends UNAVAILABLE, and has taken its place too.
    refused = [one for one in ended if one.startswith("RESOURCE_EXHAUSTED")]
    assert len(refused) == 34  # 2**-29: one of the two meets fewer than its three
    assert all("0.001 requests a second (2 processes share that evenly)" in one for one in refused), refused


@pytest.mark.parametrize(
    ("kill", "number"), [(os.kill, signal.SIGTERM), (os.killpg, signal.SIGINT)], ids=["SIGTERM", "Ctrl-C"]
)
async def test_a_signal_to_the_command_or_its_group_lets_running_streams_finish(
    text_model: Path, kill: Callable[[int, int], None], number: int
) -> None:
    async with (
        scripted([50], step_s=0.02) as engine,
        workers(2, engine, text_model) as (pid, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        stream = inference_pb2_grpc.InferenceServiceStub(channel).Generate(by_ids([10], greedy(max_tokens=40)))
        await stream.read()
        kill(pid, number)
        ids = 0
        while (message := await stream.read()) is not grpc.aio.EOF:
            ids += sum(len(choice.token_ids) for choice in message.choices)
        assert ids == 40


async def test_a_process_that_crashes_as_it_starts_is_replaced(text_model: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(CRASH_ONCE)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    async with scripted([50]) as engine, workers(2, engine, text_model, PYTHONPATH=path) as (_, address):
        assert (tmp_path / "crashed").exists()
        assert await answered(address) == 3


def test_each_crash_within_a_minute_doubles_the_wait_and_the_fifth_gives_up() -> None:
    crashes = Crashes()
    assert [crashes.again_s(now_s) for now_s in (0.0, 1.0, 3.0, 7.0, 15.0)] == [1.0, 2.0, 4.0, 8.0, None]


def test_crashes_that_are_a_minute_old_count_no_more() -> None:
    crashes = Crashes()
    assert [crashes.again_s(now_s) for now_s in (0.0, 10.0, 60.0, 61.0, 131.0, 300.0)] == [1.0, 2.0, 4.0, 4.0, 1.0, 1.0]


async def test_a_process_that_crashes_at_each_start_is_given_up_and_the_command_says_so(
    text_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(CRASH_ALWAYS)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-P", "-c", RUN, "--port", "0", "--workers", "2", "--model", str(text_model)]
    child = await asyncio.create_subprocess_exec(
        *command, stderr=asyncio.subprocess.PIPE, env=os.environ | {"PYTHONPATH": path}, start_new_session=True
    )
    try:
        _, written = await asyncio.wait_for(child.communicate(), START_S)
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    said = written.decode()
    assert child.returncode == 1, said
    assert "ended 5 times within 60 s" in said and "RuntimeError: it crashes" in said and "the frontend ends" in said


async def test_no_process_takes_a_folder_services_where_the_user_stands_for_its_own(
    text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The frontend's, the one that renders the chat template, and the one that compiles grammars."""
    (tmp_path / "services").mkdir()
    (tmp_path / "services" / "__init__.py").write_text("raise SystemExit('this is not ours')")
    monkeypatch.chdir(tmp_path)
    options = greedy(max_tokens=3)
    options.grammar.regex = "a+"
    request = inference_pb2.ChatUnaryRequest(request=inference_pb2.ChatRequest(messages=[user("hi")], options=options))
    async with (
        scripted([50]) as engine,
        workers(2, engine, text_model) as (_, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        answer = await once_attached(lambda: stub.ChatUnary(request, wait_for_ready=True))
        assert len(answer.response.choices[0].token_ids) == 3


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


async def test_one_port_tells_the_metrics_of_all_processes_and_of_the_one_that_replaces_another(
    text_model: Path,
) -> None:
    port = free_port()
    async with scripted([5, 6, 7]) as engine, workers(2, engine, text_model, "--metrics-port", str(port)) as at:
        pid, address = at
        await once_attached(lambda: answered(address))
        for _ in range(7):
            await answered(address)
        told = await scrape(port)
        assert told.count(names.REQUEST_DURATION, error_type="") == 8
        by_worker = [told.count(names.REQUEST_DURATION, worker=str(number), error_type="") for number in range(2)]
        assert sum(by_worker) == 8
        assert told.value(names.INFO) == 2
        for process in processes(pid):
            os.kill(process, signal.SIGKILL)
        await engine.wait_until(lambda engine: len(engine.hellos) == 4, START_S)
        await once_attached(lambda: answered(address))
        async with asyncio.timeout(START_S):
            while (told := await scrape(port)).value(names.INFO) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert told.count(names.REQUEST_DURATION, error_type="") == 1  # the new ones count from their own start
