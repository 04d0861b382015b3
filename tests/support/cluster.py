"""The three services as three real processes, for tests: started, awaited, stopped by pid."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from triptych.engine.v1 import engine_pb2, engine_pb2_grpc

ORDER = ("executor", "scheduler", "frontend")


def free_port() -> int:
    """A port nobody listens on now, of those that the system gives to nobody who asks for any.

    Drawn apart from `random`, whose seed tests that run in another process may share.
    """
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", 20_000 + secrets.randbelow(12_000)))
            return int(probe.getsockname()[1])


@dataclass
class Cluster:
    """`flags` are each service's command-line flags beyond model, port and peers; logs go to files under `folder`."""

    model: Path
    folder: Path
    flags: Mapping[str, Sequence[str]] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """Of the frontend."""
        return f"127.0.0.1:{self.ports['frontend']}"

    def probe_port(self, name: str) -> int:
        """Where a service's health is told in plain text."""
        flags = list(self.flags.get(name, ()))
        return int(flags[flags.index("--health-port") + 1]) if "--health-port" in flags else self.ports[name]

    def start(self) -> None:
        """Starts the three and returns when a token could be made, end to end."""
        self.ports = {name: free_port() for name in ORDER}
        for name in ORDER:
            self.start_one(name)
        self.wait_generate(True, timeout_s=120)

    def start_one(self, service: str, *, name: str = "") -> None:
        """Starts one service on its port, or on that of `name`, as which it is then known."""
        name = name or service
        peers = {"scheduler": ("--executor", "executor"), "frontend": ("--engine", "scheduler")}
        command = [sys.executable, "-m", "services.cli.main", service, "--model", str(self.model)]
        command += ["--port", str(self.ports[name])]
        if service in peers:
            flag, peer = peers[service]
            command += [flag, f"127.0.0.1:{self.ports[peer]}"]
        command += self.flags.get(service, ())
        path = os.pathsep.join([".", os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command, stdout=log, stderr=log, env=os.environ | {"PYTHONPATH": path}
            )

    def revive(self) -> None:
        """Starts again what has ended, on its old port, and waits as `start` does."""
        for name in ORDER:
            if self.processes[name].poll() is not None:
                self.start_one(name)
        self.wait_generate(True, timeout_s=120)

    def wait_generate(self, serving: bool, *, timeout_s: float) -> None:
        """Waits until the frontend's `generate` health is as said. Raises TimeoutError with the ends of the logs."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            dead = [name for name, process in self.processes.items() if process.poll() is not None]
            if dead and serving:
                raise RuntimeError(f"{dead} ended while starting\n{self.log_tails()}")
            if (health(self.probe_port("frontend"), "generate") == "SERVING") == serving:
                return
            time.sleep(0.1)
        raise TimeoutError(f"generate was not {serving} within {timeout_s} s\n{self.log_tails()}")

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Signals one service."""
        self.processes[name].send_signal(number)

    def log(self, name: str) -> str:
        """What a service has logged so far."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def log_tails(self) -> str:
        """The ends of the three logs."""
        return "\n".join(f"--- {name}\n{self.log(name)[-3000:]}" for name in self.processes)

    def stop(self) -> None:
        """Ends what runs, frontend first."""
        for name in reversed(ORDER):
            process = self.processes.get(name)
            if process is None or process.poll() is not None:
                continue
            process.send_signal(signal.SIGCONT)
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(5)

    @contextlib.asynccontextmanager
    async def heartbeats(self) -> AsyncIterator[AsyncIterator[engine_pb2.Heartbeat]]:
        """What the scheduler reports of itself, as a second, silent frontend reads it."""
        from services.common.checkpoint import tokenizer_hash

        hello = engine_pb2.FrontendHello(
            min_version=1, max_version=1, frontend_id="observer", tokenizer_hash=tokenizer_hash(self.model)
        )
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.ports['scheduler']}") as channel:
            call = engine_pb2_grpc.EngineServiceStub(channel).Attach()
            await call.write(engine_pb2.AttachRequest(hello=hello))

            async def read() -> AsyncIterator[engine_pb2.Heartbeat]:
                async for message in call:
                    if message.HasField("heartbeat"):
                        yield message.heartbeat

            yield read()
            call.cancel()


@contextlib.contextmanager
def running(model: Path, folder: Path, **flags: Sequence[str]) -> Iterator[Cluster]:
    """A started cluster; `executor=[...]`, `scheduler=[...]`, `frontend=[...]` are extra flags."""
    cluster = Cluster(model, folder, flags)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def health(port: int, name: str) -> str:
    """grpc.health.v1 Check of one name: SERVING, NOT_SERVING, or the gRPC status code where there is no answer."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=2)
        except grpc.RpcError as error:
            return str(error.code().name)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
