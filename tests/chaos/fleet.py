"""Replicas of an engine behind one frontend, all real processes, kept alive as a kubelet would: what ends is started
again; and clients that ask for streams all the while, each of which must be whole."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from triptych.engine.v1 import admin_pb2, admin_pb2_grpc, engine_pb2
from triptych.inference.v1 import generation_pb2, inference_pb2, inference_pb2_grpc

from loadtest.parts import is_idle
from tests.support.calls import Answer, by_ids
from tests.support.cluster import free_port, health

RESTART_S = 0.2
STARTUP_S = 90.0


@dataclass
class Fleet:
    """`executor` is the command of one, without its port; `flags` are those of schedulers and of the frontend."""

    model: Path
    folder: Path
    executor: Sequence[str]
    replicas: int = 2
    scheduler_flags: Sequence[str] = ()
    frontend_flags: Sequence[str] = ()
    frontends: int = 1
    environment: dict[str, str] = field(default_factory=dict)
    """Of every process, beside this one's."""
    log_to: Path | None = None
    """Of schedulers and frontends, instead of a file of each in `folder`."""
    ports: dict[str, int] = field(default_factory=dict)
    routes: dict[str, int] = field(default_factory=dict)
    """Ports that others reach a part at, where it is not its own: a proxy's."""
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)
    ending: bool = False

    @property
    def engines(self) -> list[str]:
        """Every part that may be killed."""
        return [f"{kind}-{n}" for n in range(self.replicas) for kind in ("executor", "scheduler")]

    @property
    def doors(self) -> list[str]:
        """The frontends."""
        return ["frontend", *(f"frontend-{n}" for n in range(1, self.frontends))]

    @property
    def address(self) -> str:
        """Of the frontends, as a gRPC target."""
        addresses = [f"127.0.0.1:{self.routes.get(door, self.ports[door])}" for door in self.doors]
        return addresses[0] if len(addresses) == 1 else "ipv4:" + ",".join(addresses)

    def route(self, name: str) -> int:
        """The port that others reach a part at, which has one from now on."""
        own = self.ports.setdefault(name, free_port())
        return self.routes.get(name, own)

    def start(self, name: str) -> None:
        """Starts one on its port."""
        kind, _, number = name.partition("-")
        port = self.ports.setdefault(name, free_port())
        triptych = [sys.executable, "-m", "services.cli.main", kind, "--model", str(self.model), "--port", str(port)]
        if kind == "executor":
            command = [sys.executable, *self.executor, "--port", str(port)]
        elif kind == "scheduler":
            peer = self.route(f"executor-{number}")
            command = [*triptych, "--executor", f"127.0.0.1:{peer}", *self.scheduler_flags]
        else:
            peers = [f"127.0.0.1:{self.route(f'scheduler-{n}')}" for n in range(self.replicas)]
            command = [*triptych, "--engine", peers[0], *self.frontend_flags]
            if peers[1:]:
                command += ["--more-engines", ",".join(peers[1:])]
        path = os.pathsep.join([".", os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | self.environment
        with self._log_file(name).open("ab") as log:
            self.processes[name] = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        self.starts[name] = self.starts.get(name, 0) + 1

    async def supervise(self) -> None:
        """Starts again what has ended, until it is cancelled."""
        while True:
            for name, process in list(self.processes.items()):
                if process.poll() is not None and not self.ending:
                    assert name != "frontend" or self.frontends > 1, (
                        f"the frontend ended with {process.returncode}\n{self.log(name)[-3000:]}"
                    )
                    await asyncio.sleep(RESTART_S)
                    self.start(name)
            await asyncio.sleep(0.05)

    async def wait_generate(self, serving: bool = True, timeout_s: float = STARTUP_S) -> None:
        """Until the frontend's `generate` health is so."""
        ends_s = time.monotonic() + timeout_s
        while any([await self.healthy(door, "generate") != serving for door in self.doors]):
            if time.monotonic() > ends_s:
                raise TimeoutError(f"generate was not {serving}\n" + "\n".join(map(self.tail, self.processes)))
            await asyncio.sleep(0.1)

    async def healthy(self, name: str, service: str) -> bool:
        """Whether a part says so of one of its health names."""
        return await asyncio.to_thread(health, self.ports[name], service) == "SERVING"

    def log(self, name: str) -> str:
        """All that it has logged."""
        file = self._log_file(name)
        return file.read_text(errors="replace") if file.is_file() else ""

    def _log_file(self, name: str) -> Path:
        own = self.folder / f"{name}.log"
        return own if self.log_to is None or name.startswith("executor") else self.log_to

    def tail(self, name: str) -> str:
        """The end of that."""
        return f"--- {name}\n{self.log(name)[-2000:]}"

    def signal(self, name: str, number: signal.Signals) -> None:
        """Sends one; a process that has just ended is left alone."""
        with contextlib.suppress(ProcessLookupError):
            self.processes[name].send_signal(number)

    async def settled(self, timeout_s: float = 60.0) -> None:
        """Every scheduler serves, has no request, and every block is free."""
        ends_s = time.monotonic() + timeout_s
        for n in range(self.replicas):
            while True:
                beat = await self._heartbeat(n)
                if is_idle(beat):
                    break
                if time.monotonic() > ends_s:
                    raise AssertionError(f"scheduler-{n} is not idle: {beat}\n{self.tail(f'scheduler-{n}')}")
                await asyncio.sleep(0.2)

    async def _heartbeat(self, n: int) -> engine_pb2.Heartbeat | None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.ports[f'scheduler-{n}']}") as channel:
            try:
                stats = await admin_pb2_grpc.AdminServiceStub(channel).GetStats(admin_pb2.GetStatsRequest(), timeout=5)
            except grpc.aio.AioRpcError:
                return None
            return stats.heartbeat

    def stop(self) -> None:
        """Ends all."""
        self.ending = True
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
        for process in self.processes.values():
            process.wait(10)


@contextlib.asynccontextmanager
async def running(fleet: Fleet) -> AsyncIterator[Fleet]:
    """All of it up and supervised."""
    supervisor = None
    try:
        for name in (*fleet.engines, *fleet.doors):
            fleet.start(name)
        await fleet.wait_generate()
        await fleet.settled(STARTUP_S)
        supervisor = asyncio.create_task(fleet.supervise())
        yield fleet
        if supervisor.done():
            supervisor.result()
    finally:
        fleet.ending = True
        if supervisor is not None:
            supervisor.cancel()
        fleet.stop()


@dataclass
class Load:
    """`clients` ask for one stream after the other until they are told to stop; every answer is checked.

    `expected(prompt, seed, count)` are its ids. A seed of 0 asks greedily, which the stub takes for a seed as well.
    """

    fleet: Fleet
    clients: int
    max_tokens: tuple[int, int]
    expected: Callable[[Sequence[int], int, int], Sequence[int]]
    vocab_size: int
    whole: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)
    stopping: bool = False

    async def run(self) -> None:
        """Until `stopping`; then the streams that run are waited for."""
        async with contextlib.AsyncExitStack() as stack:
            channels = [
                await stack.enter_async_context(grpc.aio.insecure_channel(self.fleet.address)) for _ in range(4)
            ]
            await asyncio.gather(*(self._client(n, channels[n % 4]) for n in range(self.clients)))

    async def _client(self, number: int, channel: grpc.aio.Channel) -> None:
        rng = random.Random(number)
        while not self.stopping:
            prompt = [rng.randrange(3, self.vocab_size) for _ in range(rng.randint(2, 40))]
            seed, count = rng.choice([0, rng.randrange(1, 2**63)]), rng.randint(*self.max_tokens)
            sampling = generation_pb2.Sampling(temperature=1.0 if seed else 0.0)
            options = inference_pb2.Options(sampling=sampling, max_tokens=count, ignore_eos=True, seed=seed)
            answer = Answer()
            try:
                stub = inference_pb2_grpc.InferenceServiceStub(channel)
                async for message in stub.Generate(by_ids(prompt, options), timeout=180):
                    answer.messages.append(message)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNAVAILABLE and not answer.ids:
                    self.refused += 1  # no engine could take it then: the client is told so, and asks again
                    await asyncio.sleep(0.3)
                    continue
                self.wrong.append(f"client {number}, {len(answer.ids)} ids: {error.code().name}: {error.details()}")
                return
            if found := _fault(answer, self.expected(prompt, seed, count), len(prompt), count):
                self.wrong.append(f"client {number}, prompt {prompt}, seed {seed}: {found}")
                return
            self.whole += 1


def _fault(answer: Answer, expected: Sequence[int], prompt_tokens: int, count: int) -> str:
    """What is wrong with an answer that came to its end; nothing where it is whole."""
    if answer.ids != list(expected):
        place = next((i for i, (a, b) in enumerate(zip(answer.ids, expected, strict=False)) if a != b), None)
        return f"{len(answer.ids)} ids of {len(expected)}, the first that differs at {place}"
    if len(answer.finishes) != 1 or answer.reason != "LENGTH":
        return f"its finishes are {answer.finishes}"
    if (answer.usage.prompt_tokens, answer.usage.completion_tokens) != (prompt_tokens, count):
        return f"its usage is {answer.usage}"
    return ""
