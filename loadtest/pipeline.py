"""The engine over a stub executor, and a bare gRPC server, as processes; and many streams at once on either."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from triptych.inference.v1 import generation_pb2, inference_pb2, inference_pb2_grpc

from loadtest import peer_process
from loadtest.report import ROOT
from services.common.checkpoint import find, read_config
from services.common.errors import StartError
from services.common.health import GENERATE

CLIENT = "client"
BARE = "bare server"
START_S = 60.0
POLL_S = 0.1
TIMEOUT_S = 240.0
PROMPT_TOKENS = 16
STEP_TOKENS = 4096
_CPUCLOCK_SCHED = 2
_THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class StreamError(Exception):
    """A stream failed, or the run was too short to measure; the message is one line."""


@dataclass(frozen=True)
class Running:
    """Processes that serve at `address`; their pids by name."""

    address: str
    pids: Mapping[str, int]


@dataclass(frozen=True)
class Rate:
    """From the first call to the end of the last stream."""

    span_s: float
    messages: int
    token_ids: int
    cpu_s: Mapping[str, float]
    """By process, the client included."""

    @property
    def messages_per_s(self) -> float:
        """Of all streams together."""
        return self.messages / self.span_s

    @property
    def tokens_per_s(self) -> float:
        """Of all streams together."""
        return self.token_ids / self.span_s


@asynccontextmanager
async def engine(
    model: str,
    streams: int,
    *,
    step_ms: float = 0.0,
    profile: Path | None = None,
    flags: Sequence[str] = (),
    scheduler_flags: Sequence[str] = (),
) -> AsyncIterator[Running]:
    """Stub executor, scheduler and frontend, ready; the latter two are given `flags`. With `profile` they leave
    cProfile's files there.

    Raises StartError with the last lines of a process that ends or is not ready in time.
    """
    folder = find(model)
    names = ("executor", "scheduler", "frontend")
    ports = {name: peer_process.free_port() for name in names}
    addresses = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
    common = ("--model", str(folder), "--log-level", "warning", *flags)
    commands = {
        "executor": [
            "loadtest.stub_executor",
            "--vocab-size",
            str(read_config(folder).vocab_size),
            "--step-ms",
            str(step_ms),
        ],
        "scheduler": ["services.cli.main", "scheduler", *common, "--executor", addresses["executor"]],
        "frontend": ["services.cli.main", "frontend", *common, "--engine", addresses["scheduler"]],
    }
    commands["scheduler"] += ["--max-num-seqs", str(streams), "--max-num-batched-tokens", str(STEP_TOKENS)]
    commands["scheduler"] += scheduler_flags
    async with AsyncExitStack() as stack:
        processes: dict[str, peer_process.PeerProcess] = {}
        for name, command in commands.items():
            traced = ["-m", "cProfile", "-o", str(profile / f"{name}.prof")] if profile and name != "executor" else []
            arguments = [sys.executable, *traced, "-m", *command, "--port", str(ports[name])]
            processes[name] = await stack.enter_async_context(ours(arguments))
        await ready(addresses["frontend"], processes, generates)
        yield Running(addresses["frontend"], {name: one.process.pid for name, one in processes.items()})


@asynccontextmanager
async def bare() -> AsyncIterator[Running]:
    """The bare server, ready."""
    port = peer_process.free_port()
    command = [sys.executable, "-m", "loadtest.bare_server", "--port", str(port)]
    async with ours(command) as process:
        address = f"127.0.0.1:{port}"
        await ready(address, {BARE: process}, connects)
        yield Running(address, {BARE: process.process.pid})


def ours(command: Sequence[str]) -> AbstractAsyncContextManager[peer_process.PeerProcess]:
    """A process of this checkout."""
    # Found as this process found them: from the checkout, whatever is installed.
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return peer_process.running(command, {**_THREADS, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}, pipe=False)


async def generates(channel: grpc.aio.Channel) -> bool:
    """Whether a frontend says that a token could be made."""
    try:
        answer = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service=GENERATE), timeout=2
        )
    except grpc.aio.AioRpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def ready(
    address: str,
    processes: Mapping[str, peer_process.PeerProcess],
    asks: Callable[[grpc.aio.Channel], Awaitable[bool]] = generates,
) -> None:
    """Waits until `asks` holds. Raises StartError with the last lines of a process that ends, or of all."""
    deadline_s = time.monotonic() + START_S
    async with grpc.aio.insecure_channel(address) as channel:
        while not await asks(channel):
            for name, one in processes.items():
                if one.process.returncode is not None:
                    lines = await one.last_lines()
                    raise StartError("\n".join([f"the {name} ended while starting; its last lines:", *lines]))
            if time.monotonic() > deadline_s:
                lines = [f"{name} | {line}" for name, one in processes.items() for line in one.lines]
                raise StartError("\n".join([f"not ready within {START_S:g} s; the last lines:", *lines]))
            await asyncio.sleep(POLL_S)


async def connects(channel: grpc.aio.Channel) -> bool:
    try:
        await asyncio.wait_for(channel.channel_ready(), 2)
    except TimeoutError:
        return False
    return True


async def coalesces(address: str) -> bool:
    """Whether the frontend serves min_delta_tokens: GetModel lists its limit then."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(channel)
        answer = await stub.GetModel(inference_pb2.GetModelRequest(), timeout=10)
        return "max_min_delta_tokens" in answer.model.limits


async def measure(running: Running, *, streams: int, tokens: int, min_delta_tokens: int = 0) -> Rate:
    """`streams` calls at once on one channel, `tokens` ids each. Raises StreamError."""
    options = inference_pb2.Options(
        sampling=generation_pb2.Sampling(temperature=0),
        max_tokens=tokens,
        ignore_eos=True,
        min_delta_tokens=min_delta_tokens,
    )
    async with grpc.aio.insecure_channel(running.address) as channel:
        stub: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(channel)
        start_cpu_s, start_s = _cpu_seconds(running.pids), time.perf_counter()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                counts = await asyncio.gather(*(_stream(stub, number, options) for number in range(streams)))
        except grpc.aio.AioRpcError as error:
            raise StreamError(f"a stream failed, {error.code().name}: {error.details()}") from None
        except TimeoutError:
            raise StreamError(f"the streams had not ended after {TIMEOUT_S:g} s") from None
        span_s, end_cpu_s = time.perf_counter() - start_s, _cpu_seconds(running.pids)
    messages, ids = (sum(column) for column in zip(*counts, strict=True))
    if min(count for _, count in counts) < tokens:
        raise StreamError(f"{ids} ids came, {streams} streams of {tokens} were asked for")
    return Rate(span_s, messages, ids, {name: end_cpu_s[name] - start_cpu_s[name] for name in end_cpu_s})


async def _stream(
    stub: inference_pb2_grpc.InferenceServiceAsyncStub, number: int, options: inference_pb2.Options
) -> tuple[int, int]:
    """Messages that hold a choice, and their ids."""
    # Distinct from the first id on, so that none finds another's blocks.
    ids = inference_pb2.TokenIds(ids=[64 + number, *range(64, 64 + PROMPT_TOKENS - 1)])
    messages = token_ids = 0
    async for message in stub.Generate(inference_pb2.GenerateRequest(token_ids=ids, options=options)):
        for choice in message.choices:
            messages += 1
            token_ids += len(choice.token_ids)
    return messages, token_ids


def _cpu_seconds(pids: Mapping[str, int]) -> dict[str, float]:
    return {name: cpu_seconds(pid) for name, pid in pids.items()} | {CLIENT: time.process_time()}


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, to the ns: by the clock that clock_getcpuclockid(3) names on Linux."""
    return time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)
