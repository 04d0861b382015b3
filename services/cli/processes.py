"""Child processes of `triptych up`: started, their output shown line by line, ended in order, none left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

CHUNK_BYTES = 64 * 1024
AFTER_KILL_S = 5.0


@dataclass(frozen=True)
class Command:
    """One service to run; it gets `stop_s` seconds after SIGTERM, then SIGKILL."""

    name: str
    arguments: tuple[str, ...]
    stop_s: float


class Processes:
    """The running children. `show(name, line)` gets each line they write."""

    def __init__(self, show: Callable[[str, str], None]) -> None:
        self._show = show
        self._children: dict[str, asyncio.subprocess.Process] = {}
        self._commands: dict[str, Command] = {}
        self._pumps: list[asyncio.Task[None]] = []
        self._watches: list[asyncio.Task[None]] = []
        self._hurry = asyncio.Event()
        self._first_exit: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()

    async def start(self, command: Command) -> None:
        """Starts one in a session of its own, so that a terminal's Ctrl-C reaches the supervisor alone."""
        # -P: a folder `services` where the user stands must not be taken for ours.
        arguments = ("-P", "-m", "services.cli.child", str(os.getpid()), command.name, *command.arguments)
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        assert child.stdout is not None
        self._children[command.name] = child
        self._commands[command.name] = command
        self._pumps.append(asyncio.create_task(self._pump(command.name, child.stdout)))
        self._watches.append(asyncio.create_task(self._watch(command.name, child)))

    async def first_exit(self) -> tuple[str, int]:
        """The first child that ends, whenever it was started, and its return code (negative: the signal)."""
        return await asyncio.shield(self._first_exit)

    def hurry(self) -> None:
        """No more patience: `stop` kills what still runs."""
        self._hurry.set()

    async def stop(self, order: Sequence[str], at_most_s: float | None = None) -> None:
        """Ends all, one after the other in this order, and shows the last they wrote; each gets its own time, or less
        where that is over `at_most_s`."""
        for name in order:
            if (child := self._children.get(name)) is not None:
                stop_s = self._commands[name].stop_s
                await self._end(child, stop_s if at_most_s is None else min(stop_s, at_most_s))
        _, late = await asyncio.wait(self._pumps, timeout=AFTER_KILL_S) if self._pumps else (None, set())
        for pump in late:
            pump.cancel()

    async def _watch(self, name: str, child: asyncio.subprocess.Process) -> None:
        code = await child.wait()
        if not self._first_exit.done():
            self._first_exit.set_result((name, code))

    async def _end(self, child: asyncio.subprocess.Process, stop_s: float) -> None:
        if child.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            child.terminate()
        ended = asyncio.ensure_future(child.wait())
        hurried = asyncio.ensure_future(self._hurry.wait())
        await asyncio.wait({ended, hurried}, timeout=stop_s, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        if not ended.done():
            with contextlib.suppress(ProcessLookupError):
                child.kill()
        await ended

    async def _pump(self, name: str, stream: asyncio.StreamReader) -> None:
        rest = b""
        while chunk := await stream.read(CHUNK_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._show(name, line.decode("utf-8", "replace"))
            if len(rest) > CHUNK_BYTES:  # a line without an end must not grow without one
                self._show(name, rest.decode("utf-8", "replace"))
                rest = b""
        if rest:
            self._show(name, rest.decode("utf-8", "replace"))


def ending(code: int) -> str:
    """A return code in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
