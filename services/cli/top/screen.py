"""The live view: the terminal is taken, drawn on after each look and each key, and given back as it was."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from services.cli.top.fleet import Fleet
from services.cli.top.view import View

_UP, _DOWN = ("k", "\x1b[A", "\x1bOA"), ("j", "\x1b[B", "\x1bOB")
_READ_BYTES = 1024
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


async def show(fleet: Fleet, interval_s: float) -> int:
    """Until q, Ctrl-C, SIGTERM or SIGHUP; 0."""
    screen = _Screen(fleet)
    try:
        with screen.taken():
            await screen.run(interval_s)
    finally:
        await fleet.close()
    return 0


class _Screen:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._console = Console(highlight=False)
        self._view = View(fleet, ascii_only=not self._console.encoding.startswith("utf"))
        self._live = Live(console=self._console, screen=True, auto_refresh=False)
        self._chosen = 0
        self._end = asyncio.Event()

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """The terminal, with keys read as they are pressed and not shown."""
        loop, fd = asyncio.get_running_loop(), sys.stdin.fileno()
        before = termios.tcgetattr(fd)
        signals: dict[signal.Signals, Callable[[], None]] = dict.fromkeys(
            (signal.SIGINT, signal.SIGTERM, signal.SIGHUP), self._end.set
        )
        signals[signal.SIGWINCH] = self._draw
        try:
            tty.setcbreak(fd)
            with self._live:
                for number, on_signal in signals.items():
                    loop.add_signal_handler(number, on_signal)
                loop.add_reader(fd, self._on_keys, fd)
                self._draw()
                yield
        finally:
            loop.remove_reader(fd)
            for number in signals:
                loop.remove_signal_handler(number)
            termios.tcsetattr(fd, termios.TCSAFLUSH, before)

    async def run(self, interval_s: float) -> None:
        """Looks and draws until the end."""
        while not self._end.is_set():
            looking = asyncio.ensure_future(self._fleet.look())
            ending = asyncio.ensure_future(self._end.wait())
            await asyncio.wait({looking, ending}, return_when=asyncio.FIRST_COMPLETED)
            if looking.done():
                looking.result()
                self._draw()
                await asyncio.wait({ending}, timeout=interval_s)
            for task in (looking, ending):
                task.cancel()
            await asyncio.gather(looking, ending, return_exceptions=True)

    def _on_keys(self, fd: int) -> None:
        keys = os.read(fd, _READ_BYTES).decode(errors="replace")
        if not keys or "q" in keys:  # nothing: the terminal is gone
            self._end.set()
            return
        moves = sum(keys.count(key) for key in _DOWN) - sum(keys.count(key) for key in _UP)
        self._chosen = min(max(self._chosen + moves, 0), len(self._fleet.engines) - 1)
        self._draw()

    def _draw(self) -> None:
        width, height = self._console.size
        self._live.update(drawn(self._view.screen(width, height, self._chosen)), refresh=True)


def drawn(lines: Sequence[Text]) -> Group:
    """One below the other, none wrapped."""
    for line in lines:
        line.no_wrap, line.overflow = True, "crop"
    return Group(*lines)
