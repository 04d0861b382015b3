"""Envoy, nginx and HAProxy before a frontend, with the files of docs/proxies as they stand there but for the ports."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import shutil
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from triptych.inference.v1 import inference_pb2_grpc

from tests.frontend.harness import Served, reason, scripted, serving, text_checkpoint
from tests.support.calls import by_ids, greedy
from tests.support.certificates import SERVER, Authority, Files
from tests.support.cluster import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

DOCS = Path(__file__).parents[2] / "docs" / "proxies"
COMMANDS = {
    "envoy.yaml": ("envoy", "-c", "{file}", "--concurrency", "1", "--use-dynamic-base-id", "-l", "warn"),
    "nginx.conf": ("nginx", "-p", ".", "-c", "{file}"),
    "haproxy.cfg": ("haproxy", "-f", "{file}"),
}
TOKEN = (("authorization", "Bearer acme-token"),)
PROMPT = [5, 6, 7]


def executable(name: str) -> str:
    """Of this environment, or of the machine."""
    found = (
        shutil.which(name, path=str(Path(sys.executable).parent))
        or shutil.which(name)
        or shutil.which(name, path="/usr/sbin")
    )
    if found is None:
        pytest.fail(f"{name} is not installed; `make test-tools` brings it")
    return found


def certificates(folder: Path) -> Authority:
    """What the configuration files name, in certs/."""
    certs = folder / "certs"
    certs.mkdir()
    authority = Authority(certs)
    for name, uri in (("proxy", "spiffe://test/proxy"), ("client", "spiffe://test/proxy"), ("server", SERVER)):
        files: Files = authority.issue(name, SERVER, "localhost", "127.0.0.1", uri)
        (certs / f"{name}-with-key.pem").write_bytes(files.cert.read_bytes() + files.key.read_bytes())
    return authority


@dataclass
class Proxied:
    """A frontend and the proxy before it."""

    served: Served
    channel: grpc.aio.Channel

    @property
    def stub(self) -> inference_pb2_grpc.InferenceServiceAsyncStub:
        return inference_pb2_grpc.InferenceServiceStub(self.channel)


@contextlib.asynccontextmanager
async def proxied(config: str, folder: Path) -> AsyncIterator[Proxied]:
    model = folder / "model"
    model.mkdir()
    text_checkpoint(model)
    authority = certificates(folder)
    tokens = folder / "tokens.yaml"
    tokens.write_text(yaml.safe_dump([{"sha256": hashlib.sha256(b"acme-token").hexdigest(), "tenant": "acme"}]))
    settings: dict[str, Any] = {
        "tls_cert": folder / "certs" / "server.pem",
        "tls_key": folder / "certs" / "server.key",
        "tls_client_ca": authority.ca,
        "auth": "tokens",
        "auth_tokens": tokens,
    }
    async with serving(model, scripted([7] * 500, step_s=0.02), **settings) as served:
        port = free_port()
        file = folder / config
        text = (DOCS / config).read_text()
        assert text.count("8443") == 1
        assert text.count("50051") == 1
        file.write_text(text.replace("8443", str(port)).replace("50051", str(served.frontend.server.port)))
        name, *arguments = COMMANDS[config]
        command = [executable(name), *(part.format(file=file) for part in arguments)]
        with (folder / "proxy.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(*command, cwd=folder, stdout=log, stderr=log)
        try:
            shown = grpc.ssl_channel_credentials(authority.ca.read_bytes())
            async with grpc.aio.secure_channel(f"localhost:{port}", shown) as channel:
                try:
                    await asyncio.wait_for(channel.channel_ready(), 60)
                except TimeoutError:
                    pytest.fail((folder / "proxy.log").read_text()[-3000:])
                yield Proxied(served, channel)
        finally:
            process.terminate()
            await asyncio.wait_for(process.wait(), 20)


def request(tokens: int) -> Any:
    """Of a greedy answer."""
    return by_ids(PROMPT, greedy(max_tokens=tokens, ignore_eos=True))


@pytest.mark.parametrize("config", COMMANDS)
async def test_streams_deadlines_cancels_and_errors_come_through(config: str, tmp_path: Path) -> None:
    async with proxied(config, tmp_path) as made:
        engine, stub = made.served.engine, made.stub
        await _answered(stub)

        # A stream comes as it is made: the first ids are here while the engine still makes others.
        messages = aiter(stub.Generate(request(50), metadata=TOKEN))
        ids: list[int] = []
        while not ids:
            ids += _ids(await anext(messages))
        assert engine.num_running == 1
        async for message in messages:
            ids += _ids(message)
        assert ids == [7] * 50
        assert engine.submits[-1].tenant == "acme"

        # A deadline reaches the engine, and ends the call there too.
        call = stub.Generate(request(500), metadata=TOKEN, timeout=1.5)
        with pytest.raises(grpc.aio.AioRpcError) as late:
            async for _ in call:
                pass
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert 0 < engine.submits[-1].timeout_ms <= 1510  # gRPC rounds up to three digits
        await engine.wait_until(lambda stub_engine: stub_engine.num_running == 0)

        # A cancel ends the work.
        call = stub.Generate(request(500), metadata=TOKEN)
        await call.read()
        await engine.wait_until(lambda stub_engine: stub_engine.num_running == 1)
        call.cancel()
        await engine.wait_until(lambda stub_engine: stub_engine.num_running == 0)

        # An error keeps its details.
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in stub.Generate(request(5), metadata=(("authorization", "Bearer wrong"),)):
                pass
        assert (refused.value.code(), reason(refused.value)) == (grpc.StatusCode.UNAUTHENTICATED, "UNKNOWN_TOKEN")

        # A frontend that is gone is UNAVAILABLE, which clients try again.
        await made.served.frontend.server.stop()
        with pytest.raises(grpc.aio.AioRpcError) as gone:
            async for _ in stub.Generate(request(5), metadata=TOKEN, timeout=20):
                pass
        assert gone.value.code() is grpc.StatusCode.UNAVAILABLE


async def _answered(stub: Any) -> None:
    """Until the proxy has found the frontend: Envoy asks its health first."""
    end_s = time.monotonic() + 30
    while True:
        try:
            async for _ in stub.Generate(request(1), metadata=TOKEN):
                pass
            return
        except grpc.aio.AioRpcError:
            if time.monotonic() > end_s:
                raise
            await asyncio.sleep(0.2)


def _ids(message: Any) -> list[int]:
    return [i for choice in message.choices for i in choice.token_ids]
