"""The services of an engine as processes of their own that a load test watches, kills and starts again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from sys import executable

import grpc
from triptych.engine.v1 import admin_pb2, admin_pb2_grpc, engine_pb2

from loadtest import peer_process, pipeline
from loadtest.peer_process import PeerProcess
from services.common.checkpoint import find, read_config
from services.common.errors import StartError

POLL_S = 0.05
IDLE_S = 60.0


@dataclass
class Parts:
    """`executor-N`, `scheduler-N` and one `frontend`, by name; a scheduler N is given executor N and the spare ones.

    `step_ms` is that of a stub executor, None takes the real one.
    """

    model: Path
    replicas: int = 1
    spares: int = 0
    step_ms: float | None = None
    scheduler_flags: Sequence[str] = ()
    ports: dict[str, int] = field(default_factory=dict)
    running: dict[str, PeerProcess] = field(default_factory=dict)
    ends: dict[str, AsyncExitStack] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """Of the frontend."""
        return self._address("frontend")

    @property
    def names(self) -> list[str]:
        """Of all of them, those that are called first."""
        executors = [f"executor-{n}" for n in range(self.replicas + self.spares)]
        return [*executors, *(f"scheduler-{n}" for n in range(self.replicas)), "frontend"]

    @property
    def pids(self) -> dict[str, int]:
        """Of each by name."""
        return {name: one.process.pid for name, one in self.running.items()}

    async def start(self, name: str) -> None:
        """Starts one on its port; what is left of the one before is cleared away first."""
        command = [executable, "-m", *self._command(name), "--port", self._address(name).rpartition(":")[2]]
        await self.stop(name)
        stack = self.ends[name] = AsyncExitStack()
        self.running[name] = await stack.enter_async_context(pipeline.ours(command))

    async def stop(self, name: str) -> None:
        """Ends one, if it was started."""
        if stack := self.ends.pop(name, None):
            await stack.aclose()

    def kill(self, name: str) -> None:
        """SIGKILL."""
        with contextlib.suppress(ProcessLookupError):
            self.running[name].process.send_signal(signal.SIGKILL)

    def ended(self) -> list[str]:
        """Those that have ended."""
        return [name for name, one in self.running.items() if one.process.returncode is not None]

    async def wait_ready(self) -> None:
        """Until a token could be made. Raises StartError where a process ends or time is up."""
        await pipeline.ready(self.address, self.running)

    async def heartbeat(self, scheduler: str) -> engine_pb2.Heartbeat | None:
        """What a scheduler tells of itself; None where it does not answer."""
        async with grpc.aio.insecure_channel(self._address(scheduler)) as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            try:
                return (await stub.GetStats(admin_pb2.GetStatsRequest(), timeout=5)).heartbeat
            except grpc.aio.AioRpcError:
                return None

    async def wait_idle(self, timeout_s: float = IDLE_S) -> None:
        """Until each scheduler serves, with no request and every block free. Raises StartError after `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        for name in [name for name in self.running if name.startswith("scheduler")]:
            while not is_idle(beat := await self.heartbeat(name)):
                if time.monotonic() > deadline_s:
                    raise StartError(f"{name} was not idle within {timeout_s:g} s; its last heartbeat: {beat}")
                await asyncio.sleep(POLL_S)

    def _address(self, name: str) -> str:
        return f"127.0.0.1:{self.ports.setdefault(name, peer_process.free_port())}"

    def _command(self, name: str) -> list[str]:
        kind, _, number = name.partition("-")
        common = ["services.cli.main", kind, "--model", str(self.model), "--log-level", "warning"]
        if kind == "executor":
            stub = ["loadtest.stub_executor", "--vocab-size", str(read_config(self.model).vocab_size)]
            return common if self.step_ms is None else [*stub, "--step-ms", str(self.step_ms)]
        if kind == "scheduler":
            spares = [self._address(f"executor-{self.replicas + n}") for n in range(self.spares)]
            listed = ["--spare-executors", ",".join(spares)] if spares else []
            return [*common, "--executor", self._address(f"executor-{number}"), *listed, *self.scheduler_flags]
        engines = [self._address(f"scheduler-{n}") for n in range(self.replicas)]
        more = ["--more-engines", ",".join(engines[1:])] if engines[1:] else []
        return [*common, "--engine", engines[0], *more]


def is_idle(beat: engine_pb2.Heartbeat | None) -> bool:
    """Whether an engine serves, holds no request, and has all of its blocks free."""
    if beat is None or beat.state != engine_pb2.ENGINE_STATE_SERVING:
        return False
    return not beat.running_requests + beat.waiting_requests and beat.free_blocks == beat.total_blocks > 0


@asynccontextmanager
async def started(
    model: str,
    *,
    replicas: int = 1,
    spares: int = 0,
    step_ms: float | None = None,
    scheduler_flags: Sequence[str] = (),
) -> AsyncIterator[Parts]:
    """All of them, ready and idle; ended at exit. Raises StartError where one ends or they are not ready in time."""
    parts = Parts(find(model), replicas, spares, step_ms, scheduler_flags)
    try:
        for name in parts.names:
            await parts.start(name)
        await parts.wait_ready()
        await parts.wait_idle()
        yield parts
    finally:
        for name in reversed(parts.names):
            await parts.stop(name)


@dataclass(frozen=True)
class Held:
    """What a process holds, as Linux tells it."""

    rss_bytes: int
    descriptors: int
    threads: int

    @classmethod
    def by(cls, pid: int) -> Held:
        """Now. Raises OSError where it has ended."""
        folder = Path(f"/proc/{pid}")
        pages = int((folder / "statm").read_text().split()[1])
        return cls(pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir(folder / "fd")), len(os.listdir(folder / "task")))
