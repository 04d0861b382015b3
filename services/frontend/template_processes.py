"""The processes that render chat templates: started when they are needed, killed when one takes too long."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from services.common.errors import RequestError, invalid, unavailable
from services.frontend.template_worker import LENGTH

PROCESSES = 2
"""One that meets a template without an end leaves another to the rest."""
MEMORY_BYTES = 1024**3
"""Address space of each."""
START_S = 60.0
"""A machine that is busy takes seconds to start Python."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Budget:
    """Of one rendering: wall-clock time, and UTF-8 bytes at most of the text."""

    time_s: float
    text_bytes: int


class TemplateProcesses:
    """Renders templates by name. `close` it in any case."""

    def __init__(self, templates: Mapping[str, str], budget: Budget) -> None:
        self._templates = dict(templates)
        self._budget = budget
        self._idle: list[_Process] = []
        self._free = asyncio.Semaphore(PROCESSES)
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        """What goes on beside requests: a start, and ends that are waited for."""

    def warm(self) -> None:
        """Starts one, so that the first request does not wait for it."""
        if self._templates:
            self._beside(self._start_one())

    async def render(self, template: str, variables: Mapping[str, Any], path: str) -> str:
        """Raises RequestError: INVALID_ARGUMENT naming `path` for what the template refuses or cannot do."""
        data = json.dumps({"template": template, "variables": variables, "characters": self._budget.text_bytes})
        async with self._free:
            process = self._idle.pop() if self._idle else await self._start()
            try:
                async with asyncio.timeout(self._budget.time_s):
                    answer = await process.ask(data.encode())
            except TimeoutError:
                self._end(process)
                log.warning("the chat template was ended after %g s", self._budget.time_s)
                raise _failing(path, f"takes longer than {self._budget.time_s:g} s (template_timeout_s)") from None
            except (EOFError, OSError):
                self._end(process)
                log.warning("the process that renders the chat template died")
                raise _failing(path, "ends its process") from None
            except BaseException:
                self._end(process)  # its answer, still to come, is nobody's
                raise
            self._keep(process)
        return self._read(answer, path)

    def _read(self, answer: dict[str, Any], path: str) -> str:
        if (text := answer.get("text")) is not None and len(text.encode(errors="replace")) <= self._budget.text_bytes:
            return str(text)
        if (said := answer.get("refused")) is not None:
            raise invalid(path, f"the model's chat template refuses them: {said}", "CHAT_TEMPLATE")
        if (failed := answer.get("failed")) is not None:
            raise invalid(path, f"the model's chat template fails: {failed}", "CHAT_TEMPLATE")
        raise _failing(path, f"writes more than {self._budget.text_bytes} bytes (max_rendered_bytes)")

    async def close(self) -> None:
        """Ends them."""
        self._closed = True
        while self._idle:
            self._end(self._idle.pop())
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _end(self, process: _Process) -> None:
        process.kill()
        self._beside(process.ended())

    def _beside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start_one(self) -> None:
        with contextlib.suppress(RequestError):  # a request would meet it too, and tell
            async with self._free:
                self._keep(await self._start())

    def _keep(self, process: _Process) -> None:
        if self._closed:
            self._end(process)
        else:
            self._idle.append(process)

    async def _start(self) -> _Process:
        process = None
        try:
            async with asyncio.timeout(START_S):
                process = await _Process.start()
                setup = {"templates": self._templates, "memory_bytes": MEMORY_BYTES}
                await process.ask(json.dumps(setup).encode())
                return process
        except (TimeoutError, EOFError, OSError) as error:
            if process is not None:
                self._end(process)
            log.error("cannot start a process for the chat template: %r", error)
            raise unavailable("TEMPLATE_PROCESS", "the process that renders the chat template cannot start") from error
        except BaseException:
            if process is not None:
                self._end(process)
            raise


class _Process:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls) -> _Process:
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # a folder `services` where the user stands must not be taken for ours
                "-m",
                "services.frontend.template_worker",
                str(os.getpid()),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
        )

    async def ask(self, data: bytes) -> dict[str, Any]:
        """Raises EOFError or OSError where the process is gone."""
        sink, source = self._process.stdin, self._process.stdout
        if sink is None or source is None:
            raise EOFError
        sink.write(LENGTH.pack(len(data)) + data)
        await sink.drain()
        head = await source.readexactly(LENGTH.size)
        answer: dict[str, Any] = json.loads(await source.readexactly(*LENGTH.unpack(head)))
        return answer

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def ended(self) -> None:
        await self._process.wait()


def _failing(path: str, what: str) -> RequestError:
    return invalid(path, f"the model's chat template {what} for them", "CHAT_TEMPLATE")
