"""The real SMG gateway as a process, before a frontend."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from openai import AsyncOpenAI

from services.cli.gateway import wait_ready
from tests.support.cluster import free_port

START_S = 60.0
STOP_S = 20.0


@dataclass
class Gateway:
    """`log` is what it writes."""

    address: str
    process: asyncio.subprocess.Process
    log: Path

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    @property
    def client(self) -> AsyncOpenAI:
        """The `openai` package, which is to see every error itself."""
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    async def ready(self, model: str) -> None:
        """Returns when it serves the model. Fails with the log's end where it ends, or takes too long."""
        ended = asyncio.ensure_future(self.process.wait())
        ready = asyncio.ensure_future(wait_ready(self.address, model))
        await asyncio.wait({ended, ready}, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        done = ready.done()
        for task in (ended, ready):
            task.cancel()
        assert done, self.log.read_text(errors="replace")[-3000:]


@asynccontextmanager
async def gateway(frontend: str, log: Path, *smg: str) -> AsyncIterator[Gateway]:
    """`triptych gateway` before the frontend at HOST:PORT, with more options of SMG's own."""
    listen = f"127.0.0.1:{free_port()}"
    command = ["-m", "services.cli.main", "gateway", "--listen", listen, "--frontend", frontend, "--", *smg]
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, stdout=output, stderr=output, env=os.environ | {"PYTHONUNBUFFERED": "1"}
        )
    try:
        yield Gateway(listen, process, log)
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), STOP_S)
            except TimeoutError:
                process.kill()
                await process.wait()
