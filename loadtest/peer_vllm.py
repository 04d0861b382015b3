"""vLLM as a peer: its own server at its best CPU settings, asked over its OpenAI HTTP API with the same clock."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from loadtest import peer_process
from loadtest.open_loop import Ask, CallError
from loadtest.workload import Planned
from services.common.errors import StartError

START_S = 240.0
POLL_S = 0.5
MAX_SEQS = 64  # as Triptych's scheduler
ENVIRONMENT = {
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",  # both cores compute
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONUNBUFFERED": "1",
}


@asynccontextmanager
async def serving(python: Path, model: Path) -> AsyncIterator[Ask]:
    """Starts `vllm serve` of that environment on loopback. Raises StartError with its last lines."""
    port = peer_process.free_port()
    command = [str(python), "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "peer"]
    command += ["--dtype", "float32", "--enforce-eager", "--max-num-seqs", str(MAX_SEQS)]
    path = {"PATH": os.pathsep.join([str(python.parent), os.environ.get("PATH", os.defpath)])}  # its own tools first
    async with peer_process.running(command, ENVIRONMENT | path, pipe=False) as peer:
        deadline_s = time.monotonic() + START_S
        while not await _healthy(port):
            if peer.process.returncode is not None or time.monotonic() > deadline_s:
                state = f"has not started within {START_S:g} s" if peer.process.returncode is None else "ended"
                raise StartError("\n".join([f"vllm {state}; its last lines:", *peer.lines]))
            await asyncio.sleep(POLL_S)
        yield over_http(port)


def over_http(port: int) -> Ask:
    """Asks an OpenAI completions server on loopback, streamed; one event holds the ids it lists."""

    async def ask(request: Planned, left_s: float) -> AsyncIterator[int]:
        body = {
            "model": "peer",
            "prompt": list(request.prompt_ids),
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        reader, writer = await _post(port, "/v1/completions", json.dumps(body).encode())
        try:
            async with asyncio.timeout(left_s):
                async for event in _events(reader):
                    if "choices" not in event:
                        raise CallError("HTTP", f"an event without choices: {event}")
                    if count := sum(len(choice.get("token_ids") or ()) for choice in event["choices"]):
                        yield count
        finally:
            writer.close()

    return ask


async def _post(port: int, path: str, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**22)
    # HTTP/1.0: the answer is neither chunked nor kept alive, so its lines are the events and its end the stream's.
    writer.write(
        f"POST {path} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    )
    writer.write(body)
    await writer.drain()
    status = (await reader.readline()).decode()
    while (await reader.readline()).strip():
        pass  # headers
    if " 200 " not in status:
        raise CallError("HTTP", f"{status.strip()}: {(await reader.read(2000)).decode('utf-8', 'replace')}")
    return reader, writer


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    async for line in reader:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])
        elif line.startswith(b"data: [DONE]"):
            return
    raise CallError("HTTP", "the answer broke off")


async def _healthy(port: int) -> bool:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    try:
        writer.write(b"GET /health HTTP/1.0\r\n\r\n")
        await writer.drain()
        return b" 200 " in await asyncio.wait_for(reader.readline(), 5)
    except (OSError, TimeoutError):
        return False
    finally:
        writer.close()
