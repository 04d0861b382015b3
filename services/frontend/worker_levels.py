"""Log levels of the processes of a frontend that has several: set in one, told to all over their standard input."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator

from services.common import logs


class WorkerLevels:
    """What has been set; a process that starts later is told it too."""

    def __init__(self) -> None:
        self._set: dict[str, tuple[str, float | None]] = {}  # by logger: the level, and when it ends
        self._processes: set[Process] = set()

    def begin(self, process: Process) -> None:
        """One has started, with a pipe for its standard input."""
        self._processes.add(process)
        for logger, (level, ends_s) in self._set.items():
            left_s = None if ends_s is None else ends_s - time.monotonic()
            if left_s is None or left_s >= 1:
                _tell(process, level, logger, left_s)

    def forget(self, process: Process) -> None:
        """It has ended."""
        self._processes.discard(process)
        if process.stdin is not None:
            process.stdin.close()

    async def set(self, level: str, logger: str, duration_s: int | None) -> str:
        """In all; each has the loggers that this process has. Nothing can go wrong, so empty."""
        self._set.pop(logger, None)
        if level:
            self._set[logger] = (level, None if duration_s is None else time.monotonic() + duration_s)
        for process in self._processes:
            _tell(process, level, logger, duration_s)
        return ""


@contextlib.asynccontextmanager
async def followed() -> AsyncIterator[None]:
    """In such a process: does what it is told, meanwhile."""
    task = asyncio.create_task(_follow())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _follow() -> None:
    reader = asyncio.StreamReader()
    with open(0, "rb", buffering=0, closefd=False) as standard_input:  # noqa: ASYNC230  nothing is read here
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), standard_input)
        try:
            async for line in reader:
                with contextlib.suppress(ValueError):  # a logger that was made late, in the parent alone
                    logs.levels().set(**json.loads(line))
        finally:
            transport.close()


def _tell(process: Process, level: str, logger: str, duration_s: float | None) -> None:
    if process.stdin is not None:
        line = json.dumps({"level": level, "logger": logger, "duration_s": duration_s})
        with contextlib.suppress(OSError, RuntimeError):  # it is ending
            process.stdin.write(line.encode() + b"\n")
