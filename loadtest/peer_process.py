"""A peer's process: started in a group of its own, its last lines kept, its whole group ended at exit."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from services.executor import THREAD_WAITS

STOP_S = 10.0
READ_S = 1.0
KEPT_LINES = 15


@dataclass(frozen=True)
class PeerProcess:
    """`lines` are the last it wrote to stderr and, where nobody else reads that, stdout."""

    process: asyncio.subprocess.Process
    lines: deque[str]
    reader: asyncio.Task[None]

    async def last_lines(self) -> list[str]:
        """Once it has ended: all it wrote is read, unless a process that it left behind holds on to its output."""
        await asyncio.wait({self.reader}, timeout=READ_S)
        return list(self.lines)


@asynccontextmanager
async def running(command: Sequence[str], environment: Mapping[str, str], *, pipe: bool) -> AsyncIterator[PeerProcess]:
    """`pipe`: stdin and stdout are the caller's."""
    inherited = {
        key: value
        for key, value in os.environ.items()
        # A peer's threads wait as its own makers have it, or as the caller says.
        if key not in ("PYTHONPATH", "VIRTUAL_ENV") and THREAD_WAITS.get(key) != value
    }
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE if pipe else asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE if pipe else asyncio.subprocess.STDOUT,
        env={**inherited, **environment},
        start_new_session=True,
        limit=64 * 1024 * 1024,
    )
    lines: deque[str] = deque(maxlen=KEPT_LINES)
    stream = process.stderr if pipe else process.stdout
    assert stream is not None
    reader = asyncio.create_task(_read(stream, lines))
    try:
        yield PeerProcess(process, lines, reader)
    finally:
        await _end(process)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)


def free_port() -> int:
    """A loopback port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _read(stream: asyncio.StreamReader, lines: deque[str]) -> None:
    async for line in stream:
        lines.append(line.decode("utf-8", "replace").rstrip())


async def _end(process: asyncio.subprocess.Process) -> None:
    # The group: servers start workers of their own, which must not outlive them.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
